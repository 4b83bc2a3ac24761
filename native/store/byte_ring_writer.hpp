// The writer's side of a ring: its chunks, and the tenant that keeps something in them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>

#include "core/errors.hpp"
#include "store/chunks.hpp"

namespace memlane::store {

// The user of the chunks, which is asked before they are freed or reused.
class Tenant {
public:
    virtual ~Tenant() = default;
    // 0 if a new chunk may be placed there; otherwise the offset behind what is in its way.
    virtual std::uint64_t obstacle(std::uint64_t offset, std::uint64_t bytes) = 0;
    // The chunk is about to be freed; false keeps it.
    virtual bool release(std::uint32_t id) = 0;
    // All chunks are about to be forgotten.
    virtual void forget_all() = 0;
};

// Where a new chunk may be placed, or why it cannot be.
struct Room {
    std::optional<Chunks::Place> place;
    bool is_obstructed = false;                   // by something that the tenant keeps
    std::optional<core::ShmExhausted> shortage;  // the ring cannot grow
};

class ByteRingWriter {
public:
    explicit ByteRingWriter(std::uint64_t ring_bytes) : chunks(ring_bytes) {}

    // Changes nothing but the ring's space. `take(end)` reserves it up to `end`, or throws ShmExhausted.
    template <class Take>
    Room room_for(std::uint64_t bytes, Take&& take) {
        const std::uint64_t size = chunks.size();
        Room room;
        room.place = chunks.place(bytes);
        for (bool goes_back = chunks.empty(); room.place; goes_back = false) {
            const std::uint64_t at = room.place->address % size;
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
            room.place = chunks.place(bytes, goes_back ? 0 : room.place->address - at + std::min(behind, size));
        }
        return room;
    }

    // Frees chunks, oldest first, while `is_free(chunk)` and the tenant allow it, until `most` bytes are freed.
    // Calls `freed(id)` after each. An exception never leaves a chunk half freed.
    template <class IsFree, class Freed>
    void free(std::uint64_t most, IsFree&& is_free, Freed&& freed) {
        for (std::uint64_t sum = 0; sum < most && !chunks.empty();) {
            const Chunk oldest = chunks.oldest();
            if (!is_free(oldest)) return;
            if (const auto owner = tenant.lock(); owner && !owner->release(oldest.id)) return;
            chunks.remove_oldest();
            sum += oldest.bytes;
            freed(oldest.id);
        }
    }

    void clear() {
        if (const auto owner = tenant.lock()) owner->forget_all();
        chunks.clear();
    }

    Chunks chunks;
    std::weak_ptr<Tenant> tenant;  // expired once its storage is closed: the ring stays usable without it
};

}  // namespace memlane::store
