// Where the bytes of blocks lie.
//
// An array of blocks is one base, one stride from block to block, and the extents of a block: the pieces of memory that
// hold its bytes, in the C order of its elements, relative to the start of the block. A row of an offload region has
// one extent; a block of a cache that keeps keys and values apart, shape (2, blocks, ...) viewed block first, has two:
//
//     base                    + stride                + 2 * stride
//     | K of block 0          | K of block 1          | ...   |
//     | V of block 0          | V of block 1          | ...   |
//       ^ extent 1 = {offset of V from K, bytes}
//
// Blocks can be moved between any two arrays whose blocks have the same number of bytes, whatever their
// extents: the boundaries of both cut a block into segments, each contiguous on both sides.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace memlane::offload {

struct Extent {
    std::int64_t offset;
    std::uint64_t bytes;
};

struct Segment {
    std::int64_t from;
    std::int64_t to;
    std::uint64_t bytes;
};

// Ids of one move: 32 bits, so that a million pairs are 8 MB.
struct Pair {
    std::uint32_t from;
    std::uint32_t to;
};
static_assert(sizeof(Pair) == 8);

// A block of more pieces than this is refused: their table would be larger than the block.
inline constexpr std::uint64_t kMostExtents = 1u << 20;

// Bytes of memory, relative to the array's base: [low, high).
struct Hull {
    std::int64_t low = 0;
    std::int64_t high = 0;
};

struct Blocks {
    std::byte* base = nullptr;
    std::uint64_t count = 0;
    std::int64_t stride = 0;
    std::uint64_t block_bytes = 0;
    std::vector<Extent> extents;
    Hull block;         // of one block
    bool apart = true;  // no two blocks, and no two elements of a block, share a byte

    bool is_contiguous() const noexcept { return extents.size() <= 1; }

    // The hull of the blocks from `first` to `last`.
    Hull hull(std::uint64_t first, std::uint64_t last) const noexcept {
        const std::int64_t a = static_cast<std::int64_t>(first) * stride;
        const std::int64_t b = static_cast<std::int64_t>(last) * stride;
        return {std::min(a, b) + block.low, std::max(a, b) + block.high};
    }
};

struct Dimension {
    std::int64_t size;
    std::int64_t stride;
};

// The test that numpy and torch use: sorted by stride, each dimension must step over all that the smaller ones
// reach. It may reject unusual arrays without overlaps, but never accepts an array with one.
inline bool steps_apart(std::vector<Dimension> dimensions, std::int64_t item_bytes) {
    std::sort(dimensions.begin(), dimensions.end(),
              [](const Dimension& a, const Dimension& b) { return std::abs(a.stride) < std::abs(b.stride); });
    std::int64_t reach = item_bytes;
    for (const Dimension& d : dimensions) {
        if (d.size == 1) continue;
        if (std::abs(d.stride) < reach) return false;
        reach += (d.size - 1) * std::abs(d.stride);
    }
    return true;
}

inline void append(std::vector<Extent>& extents, std::int64_t offset, std::uint64_t bytes) {
    if (!extents.empty() && extents.back().offset + static_cast<std::int64_t>(extents.back().bytes) == offset)
        extents.back().bytes += bytes;
    else
        extents.push_back({offset, bytes});
}

// An array whose first axis counts the blocks; strides in bytes. None if a block has more than kMostExtents pieces.
inline std::optional<Blocks> blocks_of(void* base, std::span<const std::int64_t> shape,
                                       std::span<const std::int64_t> strides, std::int64_t item_bytes) {
    Blocks blocks;
    blocks.base = static_cast<std::byte*>(base);
    blocks.count = static_cast<std::uint64_t>(shape[0]);
    blocks.stride = strides[0];
    std::vector<Dimension> inner;
    std::int64_t block_bytes = item_bytes;
    for (std::size_t i = 1; i < shape.size(); ++i) {
        block_bytes *= shape[i];
        if (shape[i] != 1) inner.push_back({shape[i], strides[i]});
    }
    blocks.block_bytes = static_cast<std::uint64_t>(block_bytes);
    if (block_bytes == 0 || blocks.count == 0) return blocks;
    if (blocks.count == 1) blocks.stride = block_bytes;  // of a single block it may be anything
    std::vector<Dimension> all = inner;
    all.push_back({shape[0], strides[0]});
    blocks.apart = steps_apart(std::move(all), item_bytes);

    std::int64_t run = item_bytes;
    while (!inner.empty() && inner.back().stride == run) {
        run *= inner.back().size;
        inner.pop_back();
    }
    const std::uint64_t runs = static_cast<std::uint64_t>(block_bytes / run);
    if (runs > kMostExtents) return std::nullopt;
    // Counts like an odometer, the last dimension fastest.
    std::vector<std::int64_t> at(inner.size(), 0);
    std::int64_t offset = 0;
    for (std::uint64_t i = 0; i < runs; ++i) {
        append(blocks.extents, offset, static_cast<std::uint64_t>(run));
        for (std::size_t d = inner.size(); d-- > 0;) {
            offset += inner[d].stride;
            if (++at[d] < inner[d].size) break;
            offset -= inner[d].stride * inner[d].size;
            at[d] = 0;
        }
    }
    blocks.block = {blocks.extents[0].offset, 0};
    for (const Extent& e : blocks.extents) {
        blocks.block.low = std::min(blocks.block.low, e.offset);
        blocks.block.high = std::max(blocks.block.high, e.offset + static_cast<std::int64_t>(e.bytes));
    }
    return blocks;
}

// Cuts the blocks of both at the extent boundaries of both. The blocks must have the same number of bytes.
inline std::vector<Segment> segments_of(const Blocks& from, const Blocks& to) {
    std::vector<Segment> segments;
    std::size_t f = 0;
    std::size_t t = 0;
    std::uint64_t done_f = 0;
    std::uint64_t done_t = 0;
    while (f < from.extents.size() && t < to.extents.size()) {
        const Extent& source = from.extents[f];
        const Extent& target = to.extents[t];
        const std::uint64_t bytes = std::min(source.bytes - done_f, target.bytes - done_t);
        segments.push_back({source.offset + static_cast<std::int64_t>(done_f),
                            target.offset + static_cast<std::int64_t>(done_t), bytes});
        done_f += bytes;
        done_t += bytes;
        if (done_f == source.bytes) ++f, done_f = 0;
        if (done_t == target.bytes) ++t, done_t = 0;
    }
    return segments;
}

}  // namespace memlane::offload
