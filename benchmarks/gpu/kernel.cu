// Copies blocks between page-locked host memory and a GPU's own: a candidate that is measured, not a part of memlane.
//
// `places` has two addresses a block, from and to. The GPU reads and writes registered host memory at the host's own address,
// as any does that has cudaDevAttrCanUseHostPointerForRegisteredMem. A warp copies one piece of a block at a time, 16 bytes a
// lane if all is aligned for that, with four loads under way before the first store: each takes a round trip over the bus.
constexpr unsigned long long kPiece = 4096;

extern "C" __global__ void copy_blocks(const unsigned long long* places, unsigned long long blocks, unsigned long long bytes) {
    const unsigned long long lane = threadIdx.x % 32;
    const unsigned long long warps = gridDim.x * (blockDim.x / 32);
    const unsigned long long pieces = (bytes + kPiece - 1) / kPiece;
    for (unsigned long long i = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; i < blocks * pieces; i += warps) {
        const unsigned long long block = i / pieces, begin = i % pieces * kPiece;
        const unsigned long long left = bytes - begin, size = left < kPiece ? left : kPiece;
        const unsigned long long from = places[2 * block] + begin, to = places[2 * block + 1] + begin;
        if ((from | to | size) % 16 == 0) {
            const uint4* const source = reinterpret_cast<const uint4*>(from);
            uint4* const target = reinterpret_cast<uint4*>(to);
            const unsigned long long words = size / 16;
            unsigned long long at = lane;
            for (; at + 96 < words; at += 128) {
                const uint4 a = source[at], b = source[at + 32], c = source[at + 64], d = source[at + 96];
                target[at] = a, target[at + 32] = b, target[at + 64] = c, target[at + 96] = d;
            }
            for (; at < words; at += 32) target[at] = source[at];
        } else {
            for (unsigned long long at = lane; at < size; at += 32)
                reinterpret_cast<char*>(to)[at] = reinterpret_cast<const char*>(from)[at];
        }
    }
}
