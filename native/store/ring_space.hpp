// The space of a ring, reserved in pieces as the ring grows into it.
//
// Touching the mapping where the file has no space yet would allocate some, or end in SIGBUS if the file system is
// full. So the writer reserves space before it writes, and nobody reads where there is none, whatever a peer has written.
#pragma once

#include <algorithm>

#include "core/errors.hpp"
#include "core/layout.hpp"
#include "core/segment.hpp"

namespace memlane::store {

class RingSpace {
public:
    // A put that needs a new piece takes about 3 ms longer.
    static constexpr std::uint64_t kPiece = 4u << 20;

    static constexpr std::uint64_t first_piece(std::uint64_t ring_bytes) noexcept { return std::min(ring_bytes, kPiece); }

    // `known`: bytes that are known to have their space.
    RingSpace(core::Segment& segment, std::uint64_t ring_bytes, std::uint64_t known = 0)
        : segment_(segment), ring_bytes_(ring_bytes), known_(known) {}

    bool is_taken(std::uint64_t end) const noexcept { return end <= known_; }

    // Called by the writer. ShmExhausted changes nothing.
    void take(std::uint64_t end) {
        if (is_taken(end)) return;
        const std::uint64_t wanted = std::min(core::align_up(end, kPiece), ring_bytes_);
        try {
            grow(wanted);
        } catch (const core::ShmExhausted&) {
            const std::uint64_t least = std::min(core::align_up(end, core::kPage), ring_bytes_);
            if (least >= wanted) throw;
            grow(least);
        }
    }

    // True if these bytes of the ring have their space. One system call when the ring has grown, none otherwise.
    bool has(std::uint64_t offset, std::uint64_t bytes) {
        if (offset + bytes <= known_) return true;
        known_ = std::min(os::space_end(segment_.file(), known_), ring_bytes_);
        // Before Linux 5.14, bytes that nobody has written to count as a hole, so there are holes between the allocations.
        return offset + bytes <= known_ || os::has_space(segment_.file(), offset, bytes);
    }

private:
    void grow(std::uint64_t end) {
        const std::uint64_t bytes = end - known_;
        // Check first: a reservation that fills the file system before it fails would hurt everybody else meanwhile.
        if (const std::uint64_t free = os::free_bytes(segment_.file()); bytes > free)
            throw core::ShmExhausted(ENOSPC, bytes, free);
        segment_.reserve(known_, bytes);
        known_ = end;
    }

    core::Segment& segment_;
    std::uint64_t ring_bytes_;
    std::uint64_t known_;  // from the beginning of the ring to here
};

}  // namespace memlane::store
