// Moving blocks between this host and a GPU: queues copies on a stream, by the functions of the CUDA runtime
// that torch has loaded. They are called by address, so nothing here needs CUDA to build.
//
// Queuing a copy costs the caller one to two microseconds, whatever its size, so copies are merged. Pairs whose
// bytes are adjacent on both sides become one copy. Pairs with a constant step on both sides (the rows of a
// region to the blocks of a cache) become one two-dimensional copy. The rest are queued in one call where the
// runtime has one (cudaMemcpyBatchAsync, CUDA 12.8 and later; not on the legacy default stream).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "offload/copy_layout.hpp"

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

// cudaMemcpyKind.
enum class Direction : int { to_device = 1, to_host = 2 };

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

// The copies of a move, merged as far as possible.
inline std::vector<DeviceCopy> device_copies(const Blocks& from, const Blocks& to, const std::vector<Pair>& pairs) {
    constexpr std::int64_t kMostPitch = 0x7fffffff;  // CUDA's limit is at least this
    std::vector<DeviceCopy> copies;
    for (const Segment& s : segments_of(from, to)) {
        const auto width = static_cast<std::int64_t>(s.bytes);
        const bool joins = from.stride == width && to.stride == width;
        const bool steps = from.stride >= width && to.stride >= width && from.stride <= kMostPitch && to.stride <= kMostPitch;
        for (std::size_t i = 0; i < pairs.size();) {
            std::size_t run = 1;
            while (steps && i + run < pairs.size() && pairs[i + run].from == pairs[i].from + run &&
                   pairs[i + run].to == pairs[i].to + run)
                ++run;
            copies.push_back({to.base + std::int64_t{pairs[i].to} * to.stride + s.to,
                              from.base + std::int64_t{pairs[i].from} * from.stride + s.from,
                              joins ? s.bytes * run : s.bytes, joins ? 1 : run, static_cast<std::size_t>(to.stride),
                              static_cast<std::size_t>(from.stride)});
            i += run;
        }
    }
    return copies;
}

// Queues the copies; returns CUDA's error, or 0. `queued` counts those accepted before the error.
inline int queue_copies(const CudaRuntime& cuda, std::vector<DeviceCopy> copies, Direction direction, void* stream,
                        std::size_t& queued) {
    const int kind = static_cast<int>(direction);
    queued = 0;
    const auto flat = std::stable_partition(copies.begin(), copies.end(), [](const DeviceCopy& c) { return c.rows > 1; });
    for (auto c = copies.begin(); c != flat; ++c, ++queued)
        if (const int error = cuda.copy_2d(c->to, c->to_pitch, c->from, c->from_pitch, c->bytes, c->rows, kind, stream))
            return error;
    const auto left = static_cast<std::size_t>(copies.end() - flat);
    const bool is_legacy = reinterpret_cast<std::uintptr_t>(stream) <= 1;  // it has two handles, 0 and 1
    if (left > 1 && !is_legacy && (cuda.batch_13 != nullptr || cuda.batch_12 != nullptr)) {
        std::vector<void*> to;
        std::vector<const void*> from;
        std::vector<std::size_t> bytes;
        for (auto c = flat; c != copies.end(); ++c) {
            to.push_back(c->to);
            from.push_back(c->from);
            bytes.push_back(c->bytes);
        }
        BatchAttributes attributes;
        std::size_t first = 0;
        std::size_t failed = 0;
        const int error =
            cuda.batch_13 != nullptr
                ? cuda.batch_13(to.data(), from.data(), bytes.data(), left, &attributes, &first, 1, stream)
                : cuda.batch_12(to.data(), from.data(), bytes.data(), left, &attributes, &first, 1, &failed, stream);
        if (error == 0) queued += left;
        return error;
    }
    for (auto c = flat; c != copies.end(); ++c, ++queued)
        if (const int error = cuda.copy(c->to, c->from, c->bytes, kind, stream)) return error;
    return 0;
}

}  // namespace memlane::offload
