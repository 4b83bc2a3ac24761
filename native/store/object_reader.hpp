// How a participant reads objects: pin - validate - read - validate again - count the read - unpin.
//
// No lock, and no system call except to see that the ring has grown. Per object: two additions to the participant's own
// pins, two checks of the entry, one of the allocation's header, one addition to its reads and one to the documented count.
//
// Several threads of a process may read at once. The GIL serializes the calls made here, so only what other
// processes write as well is atomic.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#include "core/participants.hpp"
#include "core/wait.hpp"
#include "os/clock.hpp"
#include "store/object_table.hpp"
#include "store/ring_space.hpp"

namespace memlane::store {

struct Object {
    std::uint32_t id;
    std::uint64_t index;   // in the table
    std::uint64_t offset;  // of its 4 count bytes, in the ring's mapping
    std::uint64_t size;    // of these, metadata and data
    std::uint64_t serial;  // of the pin
};

// Saturates: the sign must not change, and the table is authoritative. Aligned in allocations that a storage allocated.
inline void add_to_documented_count(std::byte* at) noexcept {
    if (reinterpret_cast<std::uintptr_t>(at) % alignof(std::uint32_t) != 0) {
        std::uint32_t value;
        std::memcpy(&value, at, sizeof value);
        value += value < kMostReferences ? 1 : 0;
        std::memcpy(at, &value, sizeof value);
        return;
    }
    auto& count = *reinterpret_cast<std::uint32_t*>(at);
    std::uint32_t seen = core::load_relaxed(count);
    while (seen < kMostReferences && !std::atomic_ref(count).compare_exchange_weak(seen, seen + 1)) continue;
}

class ObjectReader {
public:
    // `own` holds the lock of the slot.
    ObjectReader(std::shared_ptr<core::Segment> own, ObjectTable table, std::size_t slot)
        : segment_(std::move(own)),
          table_(std::move(table)),
          participants_(*segment_, table_.slots()),
          space_(*segment_, table_.ring_bytes()),
          slot_(slot) {}

    core::Segment& segment() const noexcept { return *segment_; }
    const ObjectTable& table() const noexcept { return table_; }
    const core::Participants& participants() const noexcept { return participants_; }
    core::ParticipantSlot& own_slot() const noexcept { return participants_.slot(slot_); }
    std::size_t slot() const noexcept { return slot_; }

    // The ring mapped for views of objects: read-only in this process, because other readers see them, too.
    const std::shared_ptr<os::Mapping>& shown() {
        if (!shown_)
            shown_ = segment_->with_memory(table_.ring_bytes(), [this] {
                return std::make_shared<os::Mapping>(segment_->file(), table_.ring_bytes(), 0, os::Mapping::Access::read);
            });
        return shown_;
    }

    // Pins the object if it is stored under that id at that address: it is not evicted until unpin().
    std::optional<Object> pin(std::uint64_t address, std::uint32_t id) {
        Object object{id, table_.index_of(id), table_.offset_of(address) + sizeof(AllocationHeader), 0, next_serial_++};
        held_.push_back({object.serial, os::tick_now()});
        add_pin(object.index);
        if (!is_granted(object) || core::load_relaxed(entry(object).address) != address || !fits(object)) {
            drop_pin(object.index);
            held_.pop_back();
            return std::nullopt;
        }
        count_held();
        return object;
    }

    // True if the entry is still the pinned object's. It always is, unless this end was closed meanwhile. If it
    // is, the loads before this call saw the object's bytes and no others.
    bool is_valid(const Object& object) const noexcept {
        std::atomic_thread_fence(std::memory_order_acquire);
        const std::uint64_t stamp = stamp_of(object.index);
        return stamp == live_stamp(object.id) || stamp == closing_stamp(object.id);
    }

    void unpin(const Object& object) noexcept {
        if (std::erase_if(held_, [&](const Held& held) { return held.serial == object.serial; }) == 0) return;
        count_held();
        drop_pin(object.index);
    }

    // Counts one more read by this participant, up to the object's references.
    void count(const Object& object) noexcept {
        std::uint32_t& reads = table_.usage(object.index, slot_).reads;
        SYNC_LOAD(refer);
        const std::uint32_t references = core::load_acquire(entry(object).references);
        std::uint32_t seen = core::load_relaxed(reads);
        do {
            if (seen >= references) return;
            SYNC_STORE(count);
        } while (!std::atomic_ref(reads).compare_exchange_weak(seen, seen + 1, std::memory_order_release,
                                                               std::memory_order_relaxed));
        add_to_documented_count(table_.at(object.offset));
    }

    // Counts finished reads, for statistics.
    void note_progress() const noexcept {
        core::ParticipantSlot& own = own_slot();
        core::add_single_writer<std::uint64_t>(own.position, 1);
        core::store_relaxed(own.last_progress_ns, os::tick_now());
    }

    // From here on nobody waits for this reader, and its pins are void: another reader may take its place.
    void announce_close() noexcept { participants_.leave(slot_); }

protected:
    ObjectEntry& entry(const Object& object) const noexcept { return table_.entry(object.index); }

    void add_pin(std::uint64_t index) noexcept {
        SYNC_STORE(pin);
        std::atomic_ref(table_.usage(index, slot_).pins).fetch_add(1, std::memory_order_relaxed);
        core::full_fence();
    }
    void drop_pin(std::uint64_t index) noexcept {
        SYNC_STORE(unpin);
        std::atomic_ref(table_.usage(index, slot_).pins).fetch_sub(1, std::memory_order_release);
    }

    std::uint64_t stamp_of(std::uint64_t index) const noexcept {
        SYNC_LOAD(offer);
        SYNC_LOAD(retire);
        return core::load_acquire(table_.entry(index).stamp);
    }

    // After a pin: the stamp, once it is not closing. An entry is closing only while the writer looks for pins,
    // so a few `looks` suffice, unless the writer is preempted or killed just then. Each look decrements `looks`.
    std::uint64_t settled_stamp(std::uint64_t index, int& looks) const noexcept {
        std::uint64_t stamp = stamp_of(index);
        for (; looks > 0 && is_closing(stamp); --looks) {
            core::pause();
            stamp = stamp_of(index);
        }
        return stamp;
    }

private:
    struct Held {
        std::uint64_t serial;
        os::Nanoseconds since;
    };

    bool is_granted(const Object& object) const noexcept {
        int looks = 1000;
        return settled_stamp(object.index, looks) == live_stamp(object.id);
    }

    // Sets the object's size. Whatever the table says, reads nothing beyond the ring, and nothing where the
    // ring has no space. The allocation's header must agree with the table.
    bool fits(Object& object) {
        object.size = core::load_relaxed(entry(object).size);
        const std::uint64_t room = table_.ring_bytes() - (object.offset - sizeof(AllocationHeader));
        if (object.size < kCountBytes || room < sizeof(AllocationHeader) || object.size > room - sizeof(AllocationHeader))
            return false;
        if (!space_.has(object.offset - sizeof(AllocationHeader), sizeof(AllocationHeader) + object.size)) return false;
        const AllocationHeader header = read_header(table_.at(object.offset - sizeof(AllocationHeader)));
        const auto total = static_cast<std::uint64_t>(std::max(header.size, 0));
        if (header.id != static_cast<std::int32_t>(object.id)) return false;
        return total >= object.size + sizeof(AllocationHeader) && total <= room;
    }

    // `held_` is in the order of pinning, so the first is the oldest.
    void count_held() noexcept {
        core::store_relaxed<std::int64_t>(own_slot().views_since_ns, held_.empty() ? 0 : held_.front().since);
        core::store_relaxed(own_slot().views, static_cast<std::uint32_t>(held_.size()));
    }

    std::shared_ptr<core::Segment> segment_;
    ObjectTable table_;
    core::Participants participants_;
    RingSpace space_;
    std::shared_ptr<os::Mapping> shown_;
    const std::size_t slot_;
    std::vector<Held> held_;
    std::uint64_t next_serial_ = 0;
};

}  // namespace memlane::store
