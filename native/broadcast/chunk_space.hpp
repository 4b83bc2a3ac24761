// Tracks how much of every chunk is known to have space, so that no process is killed by SIGBUS for touching it.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "broadcast/ring_layout.hpp"

namespace memlane::broadcast {

class ChunkSpace {
public:
    // `bytes`: how much of each chunk, from its start, the creator reserved, for good; 0 if unknown.
    ChunkSpace(const RingGeometry& geometry, std::uint64_t bytes)
        : geometry_(geometry), least_(std::min(bytes, geometry.max_chunk_bytes)), reserved_(geometry.max_chunks, least_) {}

    bool has(std::uint64_t chunk, std::uint64_t bytes) const noexcept { return bytes <= reserved_[chunk]; }
    // True for every chunk, and always.
    bool has_everywhere(std::uint64_t bytes) const noexcept { return bytes <= least_; }
    std::uint64_t bytes_of(std::uint64_t chunk) const noexcept { return reserved_[chunk]; }

    // One comparison if the space is there, system calls otherwise. Can be repeated after ShmExhausted.
    void ensure(core::Segment& segment, std::uint64_t chunk, std::uint64_t bytes) {
        if (has(chunk, bytes)) return;
        constexpr std::uint64_t kStep = 64u << 10;
        const std::uint64_t from = reserved_[chunk];
        const std::uint64_t to = std::min(core::align_up(bytes, kStep), geometry_.max_chunk_bytes);
        segment.reserve(chunk * geometry_.max_chunk_bytes + from, to - from);
        reserved_[chunk] = to;
    }

    // Gives back what anybody has reserved beyond that in chunks that are free. Returns whether there was any.
    template <class IsFree>
    bool give_back(const os::FileDescriptor& file, IsFree&& is_free) {
        bool any = false;
        for (std::uint64_t chunk = 0; chunk < geometry_.max_chunks && least_ < geometry_.max_chunk_bytes; ++chunk) {
            if (!is_free(chunk)) continue;
            const std::uint64_t begin = chunk * geometry_.max_chunk_bytes + least_;
            const std::uint64_t end = begin + geometry_.max_chunk_bytes - least_;
            // Neighbours share a page if the size is odd: only whole pages can be given back.
            const auto data = os::next_data(file, core::align_up(begin, os::Mapping::page_bytes()));
            if (!data || *data >= end / os::Mapping::page_bytes() * os::Mapping::page_bytes()) continue;
            os::punch_hole(file, begin, end - begin);
            reserved_[chunk] = least_;
            any = true;
        }
        return any;
    }

    // Call it with the writer's count of give_back() before ensure(): what was reserved before may be gone.
    void follow(std::uint32_t times_given_back) {
        if (std::exchange(seen_, times_given_back) != times_given_back) std::fill(reserved_.begin(), reserved_.end(), least_);
    }

private:
    RingGeometry geometry_;
    std::uint64_t least_;
    std::vector<std::uint64_t> reserved_;
    std::uint32_t seen_ = 0;
};

}  // namespace memlane::broadcast
