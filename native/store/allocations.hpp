// Where the allocations of a ring lie: the arithmetic, without the memory. Known to the writer alone.
//
// An allocation lies at `address % size` and is contiguous. Positions grow until the start has gone round once; then start
// and end move back by one ring size. Addresses handed out before stay valid. Ids grow, and some may be skipped.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "store/byte_ring.hpp"

namespace memlane::store {

struct Allocation {
    std::uint32_t id;
    std::uint64_t address;
    std::uint64_t bytes;  // header included
};

constexpr std::uint32_t next_id(std::uint32_t id) noexcept { return static_cast<std::uint32_t>((id + 1) % kIdEnd); }

class Allocations {
public:
    explicit Allocations(std::uint64_t ring_bytes) : size_(ring_bytes) {}

    // Where a new allocation would lie, and where the ring would start then.
    struct Spot {
        std::uint64_t start;
        std::uint64_t address;
    };

    // None if there is no room. `at_least` skips everything between the newest allocation and this address or, on an
    // empty ring, everything before this offset.
    std::optional<Spot> find(std::uint64_t bytes, std::optional<std::uint64_t> at_least = std::nullopt) const noexcept {
        if (bytes > size_) return std::nullopt;
        std::uint64_t start = at_least && empty() ? 0 : start_;
        std::uint64_t address = at_least.value_or(end_);
        if (address % size_ + bytes > size_) address = (address / size_ + 1) * size_;
        if (address + bytes - start > size_) {
            if (!empty() || at_least) return std::nullopt;
            start = address = 0;  // nothing is in the way, whatever the positions
        }
        return Spot{start, address};
    }

    void add(const Spot& spot, std::uint32_t id, std::uint64_t bytes) {
        allocations_.push_back({id, spot.address, bytes});
        start_ = spot.start;
        end_ = spot.address + bytes;
        id_end_ = next_id(id);
    }

    void remove_oldest() noexcept {
        allocations_.pop_front();
        start_ = empty() ? end_ : start_ + (oldest().address + 2 * size_ - start_) % size_;
        if (start_ < size_) return;
        start_ -= size_;
        end_ -= size_;
    }

    // Forgets all allocations; ids continue.
    void clear() noexcept {
        allocations_.clear();
        start_ = end_ = 0;
    }

    bool empty() const noexcept { return allocations_.empty(); }
    const Allocation& oldest() const noexcept { return allocations_.front(); }
    const std::deque<Allocation>& all() const noexcept { return allocations_; }
    std::uint64_t offset_of(const Allocation& allocation) const noexcept { return allocation.address % size_; }
    std::uint64_t size() const noexcept { return size_; }
    std::uint64_t start() const noexcept { return start_; }
    std::uint64_t end() const noexcept { return end_; }
    // The id of the oldest allocation, or of the next one if there is none.
    std::uint32_t id_start() const noexcept { return empty() ? id_end_ : oldest().id; }
    std::uint32_t id_end() const noexcept { return id_end_; }
    // Only on an empty ring.
    void set_next_id(std::uint32_t id) noexcept { id_end_ = id; }

private:
    std::uint64_t size_;
    std::uint64_t start_ = 0;  // of the oldest allocation, or of the gap before it
    std::uint64_t end_ = 0;
    std::uint32_t id_end_ = 0;
    std::deque<Allocation> allocations_;  // oldest first
};

}  // namespace memlane::store
