// Tracks how much of every chunk is known to have space, so that no process is killed by SIGBUS for touching it.
#pragma once

#include <algorithm>
#include <vector>

#include "broadcast/ring_layout.hpp"

namespace memlane::broadcast {

class ChunkSpace {
public:
    // `bytes`: how much of each chunk, from its start, the creator reserved; 0 if unknown.
    ChunkSpace(const RingGeometry& geometry, std::uint64_t bytes)
        : geometry_(geometry), reserved_(geometry.max_chunks, std::min(bytes, geometry.max_chunk_bytes)) {}

    bool has(std::uint64_t chunk, std::uint64_t bytes) const noexcept { return bytes <= reserved_[chunk]; }

    // One comparison if the space is there, system calls otherwise. Can be repeated after ShmExhausted.
    void ensure(core::Segment& segment, std::uint64_t chunk, std::uint64_t bytes) {
        if (has(chunk, bytes)) return;
        constexpr std::uint64_t kStep = 64u << 10;
        const std::uint64_t from = reserved_[chunk];
        const std::uint64_t to = std::min(core::align_up(bytes, kStep), geometry_.max_chunk_bytes);
        segment.reserve(chunk * geometry_.max_chunk_bytes + from, to - from);
        reserved_[chunk] = to;
    }

private:
    RingGeometry geometry_;
    std::vector<std::uint64_t> reserved_;
};

}  // namespace memlane::broadcast
