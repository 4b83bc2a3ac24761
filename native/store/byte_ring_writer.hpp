// The writer's side of a ring: its allocations, and the tenant that keeps something in them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>

#include "core/errors.hpp"
#include "store/allocations.hpp"

namespace memlane::store {

// The user of the allocations, which is asked before they are freed or reused.
class Tenant {
public:
    virtual ~Tenant() = default;
    // 0 if a new allocation may lie there; otherwise the offset behind what is in its way.
    virtual std::uint64_t obstacle(std::uint64_t offset, std::uint64_t bytes) = 0;
    // The allocation is about to be freed; false keeps it.
    virtual bool release(std::uint32_t id) = 0;
    // All allocations are about to be forgotten.
    virtual void forget_all() = 0;
};

// Where a new allocation may lie, or why it cannot.
struct Room {
    std::optional<Allocations::Spot> spot;
    bool is_obstructed = false;                   // by something that the tenant keeps
    std::optional<core::ShmExhausted> shortage;  // the ring cannot grow
};

class ByteRingWriter {
public:
    explicit ByteRingWriter(std::uint64_t ring_bytes) : allocations(ring_bytes) {}

    // Changes nothing but the ring's space. `take(end)` reserves it up to `end`, or throws ShmExhausted.
    template <class Take>
    Room room_for(std::uint64_t bytes, Take&& take) {
        const std::uint64_t size = allocations.size();
        Room room;
        room.spot = allocations.find(bytes);
        for (bool goes_back = allocations.empty(); room.spot; goes_back = false) {
            const std::uint64_t at = room.spot->address % size;
            const auto owner = tenant.lock();
            std::uint64_t behind = owner ? owner->obstacle(at, bytes) : 0;
            if (behind == 0) {
                try {
                    take(at + bytes);
                    return room;
                } catch (const core::ShmExhausted& error) {  // for now the ring ends here
                    room.shortage = error;
                    behind = size;
                }
            } else {
                room.is_obstructed = true;
            }
            // An empty ring has room everywhere, whatever its positions.
            room.spot = allocations.find(bytes, goes_back ? 0 : room.spot->address - at + std::min(behind, size));
        }
        return room;
    }

    // Frees allocations, oldest first, while `is_free(allocation)` and the tenant allow it, until `most` bytes are freed.
    // Calls `freed(id)` after each. An exception never leaves an allocation half freed.
    template <class IsFree, class Freed>
    void free(std::uint64_t most, IsFree&& is_free, Freed&& freed) {
        for (std::uint64_t sum = 0; sum < most && !allocations.empty();) {
            const Allocation oldest = allocations.oldest();
            if (!is_free(oldest)) return;
            if (const auto owner = tenant.lock(); owner && !owner->release(oldest.id)) return;
            allocations.remove_oldest();
            sum += oldest.bytes;
            freed(oldest.id);
        }
    }

    void clear() {
        if (const auto owner = tenant.lock()) owner->forget_all();
        allocations.clear();
    }

    Allocations allocations;
    std::weak_ptr<Tenant> tenant;  // expired once its storage is closed: the ring stays usable without it
};

}  // namespace memlane::store
