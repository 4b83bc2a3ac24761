// Moving blocks between this host and a GPU: queues copies on a stream, by the functions of the CUDA runtime
// that torch has loaded. They are called by address, so nothing here needs CUDA to build.
//
// Queuing a copy costs the caller one to two microseconds, whatever its size, so copies are merged. Pairs whose
// bytes are adjacent on both sides become one copy. Pairs with a constant step on both sides (the rows of a
// region to the blocks of a cache) become one two-dimensional copy. `copy_ways.hpp` chooses how they are queued.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "offload/copy_layout.hpp"
#include "offload/copy_ways.hpp"

namespace memlane::offload {

// `rows` pieces of `bytes` bytes, a pitch apart on each side.
struct DeviceCopy {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
    std::size_t rows;
    std::size_t to_pitch;
    std::size_t from_pitch;
};

// The layout of cudaMemcpyAttributes: source accessed in stream order, no hints, no flags.
struct BatchAttributes {
    int source_access_order = 1;
    int hints[4] = {};
    unsigned flags = 0;
};
static_assert(sizeof(BatchAttributes) == 24);

struct CudaRuntime {
    using Copy = int (*)(void*, const void*, std::size_t, int, void*);
    using Copy2D = int (*)(void*, std::size_t, const void*, std::size_t, std::size_t, std::size_t, int, void*);
    using Batch13 = int (*)(void**, const void**, std::size_t*, std::size_t, BatchAttributes*, std::size_t*, std::size_t,
                            void*);
    using Batch12 = int (*)(void**, const void**, std::size_t*, std::size_t, BatchAttributes*, std::size_t*, std::size_t,
                            std::size_t*, void*);

    Copy copy = nullptr;
    Copy2D copy_2d = nullptr;
    Batch13 batch_13 = nullptr;  // at most one of the two: same name, different parameters
    Batch12 batch_12 = nullptr;
};

// Where registrations of host memory begin, in order. Drivers refuse a copy that reaches from one into the next.
using Registered = std::vector<std::uintptr_t>;

// The number of bytes from there on that lie before the next one.
inline std::size_t bytes_before_next(const Registered& begins, const std::byte* at) {
    const auto address = reinterpret_cast<std::uintptr_t>(at);
    const auto next = std::upper_bound(begins.begin(), begins.end(), address);
    return next == begins.end() ? std::numeric_limits<std::size_t>::max() : *next - address;
}

// The copies of a move, merged as far as possible.
inline std::vector<DeviceCopy> device_copies(const Blocks& from, const Blocks& to, const std::vector<Pair>& pairs,
                                             Direction direction, const Registered& begins) {
    const bool is_from_host = direction == Direction::to_device;
    const auto host_stride = static_cast<std::size_t>(is_from_host ? from.stride : to.stride);
    constexpr std::int64_t kMostPitch = 0x7fffffff;  // CUDA's limit is at least this
    std::vector<DeviceCopy> copies;
    for (const Segment& s : segments_of(from, to)) {
        const auto width = static_cast<std::int64_t>(s.bytes);
        const bool joins = from.stride == width && to.stride == width;
        const bool steps = from.stride >= width && to.stride >= width && from.stride <= kMostPitch && to.stride <= kMostPitch;
        for (std::size_t i = 0; i < pairs.size();) {
            std::byte* target = to.base + std::int64_t{pairs[i].to} * to.stride + s.to;
            const std::byte* source = from.base + std::int64_t{pairs[i].from} * from.stride + s.from;
            const auto room = [&] { return bytes_before_next(begins, is_from_host ? source : target); };
            std::size_t run = 1;
            for (const std::size_t most = room(); steps && i + run < pairs.size() && run * host_stride + s.bytes <= most &&
                                                  pairs[i + run].from == pairs[i].from + run &&
                                                  pairs[i + run].to == pairs[i].to + run;)
                ++run;
            i += run;
            if (run > 1 && !joins) {
                copies.push_back({target, source, s.bytes, run, static_cast<std::size_t>(to.stride),
                                  static_cast<std::size_t>(from.stride)});
                continue;
            }
            for (std::size_t left = s.bytes * run, part = 0; left > 0; left -= part, target += part, source += part) {
                part = std::min(left, room());
                copies.push_back({target, source, part, 1, 0, 0});
            }
        }
    }
    return copies;
}

struct Queued {
    int error = 0;           // CUDA's, or 0
    std::size_t copies = 0;  // those accepted before the error
    WaysTaken ways;
};

// The copies in one call.
inline int queue_batch(const CudaRuntime& cuda, std::span<const DeviceCopy> copies, void* stream) {
    std::vector<void*> to;
    std::vector<const void*> from;
    std::vector<std::size_t> bytes;
    for (const DeviceCopy& c : copies) {
        to.push_back(c.to);
        from.push_back(c.from);
        bytes.push_back(c.bytes);
    }
    BatchAttributes attributes;
    std::size_t first = 0;
    std::size_t failed = 0;
    return cuda.batch_13 != nullptr
               ? cuda.batch_13(to.data(), from.data(), bytes.data(), copies.size(), &attributes, &first, 1, stream)
               : cuda.batch_12(to.data(), from.data(), bytes.data(), copies.size(), &attributes, &first, 1, &failed, stream);
}

// Queues copies that are alike, until one is refused.
inline void queue_group(const CudaRuntime& cuda, const std::vector<DeviceCopy>& copies, Direction direction, void* stream,
                        Queued& queued) {
    if (copies.empty() || queued.error != 0) return;
    std::size_t bytes = 0;
    for (const DeviceCopy& c : copies) bytes += c.bytes;
    const bool is_legacy = reinterpret_cast<std::uintptr_t>(stream) <= 1;  // it has two handles, 0 and 1
    const bool has_batches = !is_legacy && (cuda.batch_13 != nullptr || cuda.batch_12 != nullptr);
    const bool has_rows = copies.front().rows > 1;
    const Way way =
        has_rows ? Way::two_dimensional : way_of(direction, copies.size(), bytes / copies.size(), has_batches);
    queued.ways.add(way);
    if (way == Way::batch) {
        for (std::span<const DeviceCopy> left = copies; !left.empty() && queued.error == 0;) {
            const auto part = left.first(std::min(left.size(), kMostInBatch));
            queued.error = queue_batch(cuda, part, stream);
            if (queued.error == 0) queued.copies += part.size();
            left = left.subspan(part.size());
        }
        return;
    }
    const int kind = static_cast<int>(direction);
    for (const DeviceCopy& c : copies) {
        queued.error = way == Way::loop
                           ? cuda.copy(c.to, c.from, c.bytes, kind, stream)
                           : cuda.copy_2d(c.to, c.to_pitch, c.from, c.from_pitch, c.bytes, c.rows, kind, stream);
        if (queued.error != 0) return;
        ++queued.copies;
    }
}

// Queues the copies, those of several rows first.
inline Queued queue_copies(const CudaRuntime& cuda, std::vector<DeviceCopy> copies, Direction direction, void* stream) {
    const auto flat = std::stable_partition(copies.begin(), copies.end(), [](const DeviceCopy& c) { return c.rows > 1; });
    Queued queued;
    queue_group(cuda, {copies.begin(), flat}, direction, stream, queued);
    queue_group(cuda, {flat, copies.end()}, direction, stream, queued);
    return queued;
}

}  // namespace memlane::offload
