// The kernel of benchmarks/gpu on this host: each thread of each block in turn. It has no barriers, so any order will do.
#include <cstdint>

#define __global__

namespace {
struct Index {
    unsigned x;
};
struct alignas(16) uint4 {
    std::uint32_t x, y, z, w;
};
Index threadIdx, blockIdx, blockDim, gridDim;
}  // namespace

#include "../../benchmarks/gpu/kernel.cu"

extern "C" void launch(unsigned grid, unsigned threads, const unsigned long long* places, unsigned long long blocks,
                       unsigned long long bytes) {
    gridDim.x = grid, blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) copy_blocks(places, blocks, bytes);
}
