// The writer's end of the store. An object: admit (its place is free) - fill in - offer - refer; in the end retire.
//
// It reads, too (slot 0 of the claims): its pins count like a reader's, and its `reads` of an object are those by which
// it stood in for readers that still owed one.
//
// No call waits. While every reader has read and nobody pins, no call makes a system call; otherwise each participant
// that is in the way costs one question whether it lives.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "store/object_reader.hpp"

namespace memlane::store {

class StoreWriter : public ObjectReader {
public:
    static constexpr std::size_t kSlot = 0;

    static std::shared_ptr<StoreWriter> create(core::Segment& ring, std::uint64_t ring_bytes, const StoreGeometry& g) {
        // First, so that a ring which has a storage is refused whatever became of that.
        if (ObjectTable::exists_in(ring)) throw core::RankTaken("the ring has a storage already");
        // The table comes last, because a ring never loses it again; it costs nobody anything before that.
        std::shared_ptr<core::Segment> own = ring.join_same_mapping(kSlot);
        return std::shared_ptr<StoreWriter>(new StoreWriter(std::move(own), ObjectTable::add(ring, ring_bytes, g)));
    }

    // Does nobody read what was cleared in these bytes of the ring?
    bool is_deserted(std::uint64_t offset, std::uint64_t bytes) {
        return std::none_of(ghosts_.begin(), ghosts_.end(), [&](const Ghost& ghost) {
            return ghost.offset < offset + bytes && offset < ghost.offset + ghost.bytes && is_pinned(ghost.index);
        });
    }

    // May these bytes become object `id`? Its entry, too, must be nobody's.
    bool admits(std::uint32_t id, std::uint64_t offset, std::uint64_t bytes) {
        const std::uint64_t index = table().index_of(id);
        if (is_live(core::load_relaxed(table().entry(index).stamp))) return false;
        const bool is_haunted = std::any_of(ghosts_.begin(), ghosts_.end(), [&](const Ghost& ghost) {
            return ghost.index == index && is_pinned(index);
        });
        return !is_haunted && is_deserted(offset, bytes);
    }

    // What was written there is an object from now on, with no reference yet. `size`: count bytes, metadata and data.
    void offer(std::uint32_t id, std::uint64_t address, std::uint64_t size) {
        const std::uint64_t index = table().index_of(id);
        std::erase_if(ghosts_, [&](const Ghost& ghost) { return !is_pinned(ghost.index); });
        for (std::size_t slot = 0; slot < table().participants(); ++slot)
            core::store_relaxed<std::uint32_t>(table().claims(index, slot).reads, 0);
        ObjectEntry& entry = table().entry(index);
        core::store_relaxed(entry.address, address);
        core::store_relaxed(entry.size, size);
        core::store_relaxed(entry.references, 0u);
        core::store_relaxed(entry.stored_ns, os::monotonic_now());
        SYNC_STORE(offer);
        core::store_release(entry.stamp, live_stamp(id));
        StoreFacts& facts = table().facts();
        core::add_single_writer<std::uint64_t>(facts.objects, 1);
        core::add_single_writer(facts.bytes, size);
    }

    bool knows(std::uint32_t id) const noexcept {
        return core::load_relaxed(table().entry(table().index_of(id)).stamp) == live_stamp(id);
    }

    // Every reader is to read it so often, all in all.
    void refer(std::uint32_t id, std::uint32_t references) {
        const std::uint64_t index = table().index_of(id);
        ObjectEntry& entry = table().entry(index);
        // Reads by which it stood in for others, and which they did themselves later, are nothing for new references.
        std::uint32_t& stood_in = table().claims(index, kSlot).reads;
        if (const std::uint32_t had = core::load_relaxed(stood_in); had > 0)
            core::store_relaxed(stood_in, static_cast<std::uint32_t>(
                                              std::min<std::uint64_t>(had, owed(index, core::load_relaxed(entry.references)))));
        const std::uint32_t before = core::load_relaxed(entry.references);
        SYNC_STORE(refer);
        core::store_release(entry.references, references);
        StoreFacts& facts = table().facts();
        core::add_single_writer<std::uint64_t>(before == 0 ? facts.puts : facts.hits, 1);
    }

    // Has every reader read it so often? Who has closed or died owes nothing.
    bool is_read(std::uint32_t id, std::uint32_t references) {
        const std::uint64_t index = table().index_of(id);
        return owed(index, references) <= core::load_relaxed(table().claims(index, kSlot).reads);
    }

    // A read by the writer, if a reader still owes one.
    void stand_in(const Object& object) {
        if (is_read(object.id, core::load_relaxed(entry(object).references))) return;
        SYNC_STORE(count);
        core::add_single_writer(table().claims(object.index, kSlot).reads, 1u);
        add_to_documented_count(table().at(object.offset));
    }

    // To make room: as retire(), and counted.
    bool evict(std::uint32_t id) {
        const bool is_here = knows(id);
        if (!retire(id)) return false;
        if (is_here) core::add_single_writer<std::uint64_t>(table().facts().evictions, 1);
        return true;
    }

    // Nobody reads it and nobody will: its entry and its space may be used again. False while somebody pins it, and
    // nothing has changed then.
    bool retire(std::uint32_t id) {
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
        forget(index);
        return true;
    }

    // The same, whoever reads it: who is at it keeps entry and space, all others are refused.
    void clear(std::uint32_t id) {
        const std::uint64_t index = table().index_of(id);
        if (!knows(id)) return;
        mark(index, retired_stamp(id));
        const ObjectEntry& entry = table().entry(index);
        if (is_pinned(index))
            ghosts_.push_back({index, table().offset_of(core::load_relaxed(entry.address)),
                               sizeof(ChunkHeader) + core::load_relaxed(entry.size)});
        forget(index);
    }

    // Of a put that did not come to its end: nobody knows the object, and it was never there.
    void take_back(std::uint32_t id) {
        if (!knows(id)) return;
        StoreFacts& facts = table().facts();
        const bool was_counted = core::load_relaxed(table().entry(table().index_of(id)).references) > 0;
        clear(id);
        if (was_counted) core::store_relaxed(facts.puts, core::load_relaxed(facts.puts) - 1);
    }

    struct Blocker {
        std::size_t slot;
        std::uint64_t owes;
        std::uint32_t pins;
    };
    // Who keeps an object from being retired.
    std::vector<Blocker> blockers(std::uint32_t id, std::uint32_t references) {
        const std::uint64_t index = table().index_of(id);
        std::vector<Blocker> found;
        for (std::size_t slot = 0; slot < table().participants(); ++slot) {
            const Claims& claims = table().claims(index, slot);
            const Blocker blocker{slot, slot == kSlot ? 0 : owed_by(index, slot, references), core::load_relaxed(claims.pins)};
            if ((blocker.owes > 0 || blocker.pins > 0) && !is_gone(slot)) found.push_back(blocker);
        }
        return found;
    }
    // Who still reads what was cleared.
    std::vector<Blocker> ghost_blockers() {
        std::vector<Blocker> found;
        for (std::size_t slot = 0; slot < table().participants(); ++slot) {
            std::uint32_t pins = 0;
            for (const Ghost& ghost : ghosts_) pins += core::load_relaxed(table().claims(ghost.index, slot).pins);
            if (pins > 0 && !is_gone(slot)) found.push_back({slot, 0, pins});
        }
        return found;
    }

private:
    struct Ghost {
        std::uint64_t index;
        std::uint64_t offset;
        std::uint64_t bytes;
    };

    StoreWriter(std::shared_ptr<core::Segment> own, ObjectTable table)
        : ObjectReader(std::move(own), std::move(table), kSlot) {
        participants().join(kSlot, os::own_identity());
    }

    // Before it looks for pins, and before anything is written where the object lay.
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

    // Pins of who has closed or died are void. Should a successor take the place meanwhile, it pins later than the entry
    // was marked, sees that, and is refused.
    bool is_pinned(std::uint64_t index) {
        for (std::size_t slot = 0; slot < table().participants(); ++slot) {
            SYNC_LOAD(pin);
            SYNC_LOAD(unpin);
            if (core::load_acquire(table().claims(index, slot).pins) > 0 && !is_gone(slot)) return true;
        }
        return false;
    }

    // Absent is not gone: it may come, and owes every read from the first.
    bool is_gone(std::size_t slot) {
        if (slot == kSlot) return false;
        const core::Presence presence = participants().presence(slot);
        return presence == core::Presence::dead || presence == core::Presence::closed;
    }

    std::uint64_t owed_by(std::uint64_t index, std::size_t slot, std::uint32_t references) const noexcept {
        SYNC_LOAD(count);
        const std::uint32_t reads = core::load_acquire(table().claims(index, slot).reads);
        return reads < references ? references - reads : 0;
    }

    std::uint64_t owed(std::uint64_t index, std::uint32_t references) {
        std::uint64_t sum = 0;
        for (std::size_t slot = 1; slot < table().participants(); ++slot)
            if (const std::uint64_t owes = owed_by(index, slot, references); owes > 0 && !is_gone(slot)) sum += owes;
        return sum;
    }

    std::vector<Ghost> ghosts_;  // what was cleared while somebody read it
};

}  // namespace memlane::store
