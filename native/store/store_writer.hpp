// The writer's end of the store. An object's life: admit (its entry is free) - fill in - offer - refer - retire.
//
// The writer reads, too (as slot 0). Its pins count like a reader's. Its `reads` of an object are
// those it made in place of readers that still owed one.
//
// No call waits. While every reader has read and nobody pins, no call makes a system call; otherwise each
// participant in the way costs one liveness check.
#pragma once

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "store/allocations.hpp"
#include "store/object_reader.hpp"

namespace memlane::store {

class StoreWriter : public ObjectReader {
public:
    static constexpr std::size_t kSlot = 0;

    static std::shared_ptr<StoreWriter> create(core::Segment& ring, std::uint64_t ring_bytes, const StoreGeometry& g,
                                               const Secret& secret, bool unlink_when_complete = false) {
        // First, so that a ring that has a storage is refused, whatever the state of that storage.
        if (ObjectTable::exists_in(ring)) throw core::RankTaken("the ring has a storage already");
        // The table comes last, because a ring never loses it again; a failure before that leaves nothing behind.
        std::shared_ptr<core::Segment> own = ring.join_same_mapping(kSlot);
        ObjectTable table = ObjectTable::add(ring, ring_bytes, g, secret, unlink_when_complete);
        return std::shared_ptr<StoreWriter>(new StoreWriter(std::move(own), std::move(table)));
    }

    // Retires the orphans in these bytes of the ring. Returns 0 if the bytes are free now; if an orphan there
    // is pinned, where a new allocation may begin behind it.
    std::uint64_t obstacle(std::uint64_t offset, std::uint64_t bytes) {
        if (orphans_.empty()) return 0;
        auto orphan = orphans_.lower_bound(offset);
        if (orphan != orphans_.begin() && std::prev(orphan)->second.end > offset) --orphan;
        while (orphan != orphans_.end() && orphan->first < offset + bytes) {
            if (!close_entry(orphan->second.id)) return core::align_up(orphan->second.end, core::kCacheLine);
            orphan = orphans_.erase(orphan);
        }
        return 0;
    }

    // True if the entry of object `id` is free. Retires an orphan in it, unless it is pinned.
    bool admits(std::uint32_t id) {
        const ObjectEntry& entry = table().entry(table().index_of(id));
        if (!is_live(core::load_relaxed(entry.stamp))) return true;
        const auto orphan = orphans_.find(table().offset_of(core::load_relaxed(entry.address)));
        if (orphan == orphans_.end() || !close_entry(orphan->second.id)) return false;
        orphans_.erase(orphan);
        return !is_live(core::load_relaxed(entry.stamp));
    }

    // The first id from `id` on whose entry is free: skips the entries of stored objects and of pinned orphans.
    std::optional<std::uint32_t> admitted_from(std::uint32_t id) {
        for (std::uint64_t i = 0; i < table().capacity(); ++i, id = next_id(id))
            if (admits(id)) return id;
        return std::nullopt;
    }

    // True if anybody is reading it now.
    bool is_in_use(std::uint32_t id) { return knows(id) && is_pinned(table().index_of(id)); }

    // Makes the bytes at `address` an object, with no references yet. `size`: count bytes, metadata and data.
    void offer(std::uint32_t id, std::uint64_t address, std::uint64_t size) {
        const std::uint64_t index = table().index_of(id);
        for (std::size_t slot = 0; slot < table().participants(); ++slot)
            core::store_relaxed<std::uint32_t>(table().usage(index, slot).reads, 0);
        ObjectEntry& entry = table().entry(index);
        core::store_relaxed(entry.address, address);
        core::store_relaxed(entry.size, size);
        core::store_relaxed(entry.references, 0u);
        SYNC_STORE(offer);
        core::store_release(entry.stamp, live_stamp(id));
        StoreFacts& facts = table().facts();
        core::add_single_writer<std::uint64_t>(facts.objects, 1);
        core::add_single_writer(facts.bytes, size);
    }

    bool knows(std::uint32_t id) const noexcept {
        return core::load_relaxed(table().entry(table().index_of(id)).stamp) == live_stamp(id);
    }

    // Sets how many times every reader is to read the object, in total.
    void refer(std::uint32_t id, std::uint32_t references) {
        const std::uint64_t index = table().index_of(id);
        ObjectEntry& entry = table().entry(index);
        // Reads made in place of readers that have since read themselves do not count towards new references.
        std::uint32_t& stood_in = table().usage(index, kSlot).reads;
        if (const std::uint32_t had = core::load_relaxed(stood_in); had > 0)
            core::store_relaxed(stood_in, static_cast<std::uint32_t>(
                                              std::min<std::uint64_t>(had, owed(index, core::load_relaxed(entry.references)))));
        const std::uint32_t before = core::load_relaxed(entry.references);
        for (std::size_t slot = 1; slot < table().participants(); ++slot) take_back_reads(index, slot, before);
        SYNC_STORE(refer);
        core::store_release(entry.references, references);
        StoreFacts& facts = table().facts();
        core::add_single_writer<std::uint64_t>(before == 0 ? facts.puts : facts.hits, 1);
    }

    // Takes one reference back, leaving `left`. Returns false, with nothing changed, if a reader has read it
    // already. Checks before it stores: a reader that saw fewer references for a moment would not count its
    // read, and owe it for ever. A concurrent read may be counted once too often; refer() takes that back.
    bool drop_reference(std::uint32_t id, std::uint32_t left) {
        const std::uint64_t index = table().index_of(id);
        for (std::size_t slot = 1; slot < table().participants(); ++slot) {
            SYNC_LOAD(count);
            if (core::load_acquire(table().usage(index, slot).reads) > left && !is_gone(slot)) return false;
        }
        SYNC_STORE(refer);
        core::store_release(table().entry(index).references, left);
        return true;
    }

    // True if every reader has read it `references` times. Readers that have closed or died owe nothing.
    bool is_read(std::uint32_t id, std::uint32_t references) {
        const std::uint64_t index = table().index_of(id);
        return owed(index, references) <= core::load_relaxed(table().usage(index, kSlot).reads);
    }

    // The same, given its 4 count bytes. The table decides; for bytes that are no object of it, the count does.
    bool is_read_at(std::uint32_t id, const std::byte* count, std::uint64_t references) {
        const std::uint64_t address = core::load_relaxed(table().entry(table().index_of(id)).address);
        if (knows(id) && count == table().at(table().offset_of(address) + sizeof(AllocationHeader)))
            return is_read(id, static_cast<std::uint32_t>(std::min<std::uint64_t>(references, UINT32_MAX)));
        std::int32_t seen;
        std::memcpy(&seen, count, sizeof seen);
        return seen >= 0 && static_cast<std::uint64_t>(seen) / table().geometry().n_readers >= references;
    }

    // A read by the writer counts for a reader that still owes one, if there is one.
    void count(const Object& object) {
        if (is_read(object.id, core::load_relaxed(entry(object).references))) return;
        SYNC_STORE(count);
        core::add_single_writer(table().usage(object.index, kSlot).reads, 1u);
        add_to_documented_count(table().at(object.offset));
    }

    // Like retire(), to make room; counted as an eviction.
    bool evict(std::uint32_t id) {
        const bool is_here = knows(id);
        if (!retire(id)) return false;
        if (is_here) core::add_single_writer<std::uint64_t>(table().facts().evictions, 1);
        return true;
    }

    // Makes the object unreadable, so that its entry and its space can be reused. Returns false, with nothing
    // changed, while it is pinned.
    bool retire(std::uint32_t id) {
        if (!knows(id)) return true;
        if (!close_entry(id)) return false;
        forget(table().index_of(id));
        return true;
    }

    // Makes the object an orphan, readable until its entry or its space is needed. May be repeated.
    void clear(std::uint32_t id) {
        const std::uint64_t index = table().index_of(id);
        if (!knows(id) || is_orphan(id)) return;
        ObjectEntry& entry = table().entry(index);
        const std::uint64_t offset = table().offset_of(core::load_relaxed(entry.address));
        orphans_[offset] = {id, offset + sizeof(AllocationHeader) + core::load_relaxed(entry.size)};
        SYNC_STORE(refer);
        core::store_release(entry.references, 0u);
        forget(index);
    }

    // Undoes a put that did not finish, counters included: nobody knows the object yet.
    void take_back(std::uint32_t id) {
        if (!knows(id) || is_orphan(id)) return;
        StoreFacts& facts = table().facts();
        const bool was_counted = core::load_relaxed(table().entry(table().index_of(id)).references) > 0;
        if (!retire(id)) clear(id);
        if (was_counted) core::store_relaxed(facts.puts, core::load_relaxed(facts.puts) - 1);
    }

    struct Blocker {
        std::size_t slot;
        std::uint64_t owes;
        std::uint32_t pins;
    };
    // The participants that keep an object from being retired.
    std::vector<Blocker> blockers(std::uint32_t id, std::uint32_t references) {
        const std::uint64_t index = table().index_of(id);
        std::vector<Blocker> found;
        for (std::size_t slot = 0; slot < table().participants(); ++slot) {
            const Usage& usage = table().usage(index, slot);
            const Blocker blocker{slot, slot == kSlot ? 0 : owed_by(index, slot, references), core::load_relaxed(usage.pins)};
            if ((blocker.owes > 0 || blocker.pins > 0) && !is_gone(slot)) found.push_back(blocker);
        }
        return found;
    }
    // The participants that pin orphans.
    std::vector<Blocker> orphan_blockers() {
        std::vector<Blocker> found;
        for (std::size_t slot = 0; slot < table().participants(); ++slot) {
            std::uint32_t pins = 0;
            for (const auto& [offset, orphan] : orphans_)
                pins += core::load_relaxed(table().usage(table().index_of(orphan.id), slot).pins);
            if (pins > 0 && !is_gone(slot)) found.push_back({slot, 0, pins});
        }
        return found;
    }

private:
    struct Orphan {
        std::uint32_t id;
        std::uint64_t end;  // of its allocation in the ring
    };

    StoreWriter(std::shared_ptr<core::Segment> own, ObjectTable table)
        : ObjectReader(std::move(own), std::move(table), kSlot) {
        participants().join(kSlot, os::own_identity());
    }

    // Limits a reader's reads to `left`: any beyond that were of a reference that has been dropped since.
    void take_back_reads(std::uint64_t index, std::size_t slot, std::uint32_t left) noexcept {
        std::uint32_t& reads = table().usage(index, slot).reads;
        SYNC_LOAD(count);
        std::uint32_t seen = core::load_relaxed(reads);
        while (seen > left) {
            SYNC_STORE(count);
            if (std::atomic_ref(reads).compare_exchange_weak(seen, left, std::memory_order_relaxed)) return;
        }
    }

    bool is_orphan(std::uint32_t id) const {
        const ObjectEntry& entry = table().entry(table().index_of(id));
        const auto orphan = orphans_.find(table().offset_of(core::load_relaxed(entry.address)));
        return orphan != orphans_.end() && orphan->second.id == id;
    }

    // Retires the entry, unless it is pinned: then it stays live.
    bool close_entry(std::uint32_t id) {
        const std::uint64_t index = table().index_of(id);
        if (!knows(id)) return true;
        if (is_pinned(index)) return false;
        mark(index, closing_stamp(id));
        if (is_pinned(index)) {
            SYNC_STORE(offer);
            core::store_release(table().entry(index).stamp, live_stamp(id));
            return false;
        }
        mark(index, retired_stamp(id));
        return true;
    }

    // The fence orders the mark before the search for pins, and before any write to the object's space.
    void mark(std::uint64_t index, std::uint64_t stamp) noexcept {
        SYNC_STORE(retire);
        core::store_relaxed(table().entry(index).stamp, stamp);
        core::full_fence();
    }

    void forget(std::uint64_t index) const noexcept {
        StoreFacts& facts = table().facts();
        core::store_relaxed(facts.objects, core::load_relaxed(facts.objects) - 1);
        core::store_relaxed(facts.bytes, core::load_relaxed(facts.bytes) - core::load_relaxed(table().entry(index).size));
    }

    // Pins of participants that have closed or died are void. A successor that takes such a place meanwhile
    // pins after the entry was marked, sees the mark, and is refused.
    bool is_pinned(std::uint64_t index) {
        for (std::size_t slot = 0; slot < table().participants(); ++slot) {
            SYNC_LOAD(pin);
            SYNC_LOAD(unpin);
            if (core::load_acquire(table().usage(index, slot).pins) > 0 && !is_gone(slot)) return true;
        }
        return false;
    }

    // An absent reader is not gone: it may still attach, and owes every read from the first.
    bool is_gone(std::size_t slot) {
        if (slot == kSlot) return false;
        const core::Presence presence = participants().presence(slot);
        return presence == core::Presence::dead || presence == core::Presence::closed;
    }

    std::uint64_t owed_by(std::uint64_t index, std::size_t slot, std::uint32_t references) const noexcept {
        SYNC_LOAD(count);
        const std::uint32_t reads = core::load_acquire(table().usage(index, slot).reads);
        return reads < references ? references - reads : 0;
    }

    std::uint64_t owed(std::uint64_t index, std::uint32_t references) {
        std::uint64_t sum = 0;
        for (std::size_t slot = 1; slot < table().participants(); ++slot)
            if (const std::uint64_t owes = owed_by(index, slot, references); owes > 0 && !is_gone(slot)) sum += owes;
        return sum;
    }

    std::map<std::uint64_t, Orphan> orphans_;  // by offset in the ring
};

}  // namespace memlane::store
