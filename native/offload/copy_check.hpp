// The checks made before the first byte moves.
//
// The ids are read once, into private memory: the caller's array may be written to meanwhile, and the id that was
// checked must be the id that is used. Then three things must hold: every id names a block; no destination
// appears twice; no destination shares a byte with a source. If they do, the order of the copies does not matter,
// and they may be reordered, merged and split among threads. The result is that of numpy's `dst[to] = src[from]`.
//
// A pair costs about 5 ns to read and 4 ns to look up. So a set of ids is kept as a bitmap while clearing one
// is cheaper than sorting the ids: 8 million blocks take a megabyte, which fits the L2 cache.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "core/sync.hpp"
#include "offload/copy_layout.hpp"

namespace memlane::offload {

struct IdRange {
    std::uint32_t first = std::numeric_limits<std::uint32_t>::max();
    std::uint32_t last = 0;

    void add(std::uint32_t id) noexcept {
        first = std::min(first, id);
        last = std::max(last, id);
    }
    std::uint64_t ids() const noexcept { return std::uint64_t{last} - first + 1; }
};

enum class Fault { none, no_such_source, no_such_target, target_twice, overlap, tangled };

// What is wrong with which pair. `id` is the caller's value, as the bits of a 64-bit number of the same signedness.
struct Finding {
    Fault fault = Fault::none;
    std::size_t pair = 0;
    std::uint64_t id = 0;
};

struct Reading {
    std::vector<Pair> pairs;
    IdRange from;
    IdRange to;
    bool ascending = true;  // strictly, by destination: then none appears twice
    Finding finding;
};

// `Int`: the type of the caller's ids. Each is loaded once.
template <class Int>
Reading read_pairs(const Int* ids, std::size_t count, const Blocks& from, const Blocks& to) {
    Reading reading;
    reading.pairs.resize(count);
    std::int64_t before = -1;
    for (std::size_t i = 0; i < count; ++i) {
        const auto source = static_cast<std::uint64_t>(core::load_relaxed(ids[2 * i]));
        const auto target = static_cast<std::uint64_t>(core::load_relaxed(ids[2 * i + 1]));
        if (source >= from.count || target >= to.count) {
            reading.finding = source >= from.count ? Finding{Fault::no_such_source, i, source}
                                                   : Finding{Fault::no_such_target, i, target};
            return reading;
        }
        const Pair pair{static_cast<std::uint32_t>(source), static_cast<std::uint32_t>(target)};
        reading.pairs[i] = pair;
        reading.from.add(pair.from);
        reading.to.add(pair.to);
        reading.ascending &= static_cast<std::int64_t>(target) > before;
        before = static_cast<std::int64_t>(target);
    }
    return reading;
}

// The ids on one side of the pairs: a bitmap where that is cheap, otherwise sorted.
class IdSet {
public:
    IdSet(const std::vector<Pair>& pairs, std::uint32_t Pair::* id, IdRange range) : first_(range.first) {
        constexpr std::uint64_t kWordsPerPair = 16;  // clearing them takes as long as sorting one id
        const std::uint64_t words = range.ids() / 64 + 1;
        if (words <= kWordsPerPair * pairs.size()) {
            bits_.resize(words);
            std::uint64_t twice = 0;
            for (const Pair& pair : pairs) {
                const std::uint32_t at = pair.*id - first_;
                const std::uint64_t bit = std::uint64_t{1} << (at % 64);
                twice |= bits_[at / 64] & bit;
                bits_[at / 64] |= bit;
            }
            has_twice_ = twice != 0;
            last_ = range.last;
            return;
        }
        sorted_.reserve(pairs.size());
        for (const Pair& pair : pairs) sorted_.push_back(pair.*id);
        std::sort(sorted_.begin(), sorted_.end());
        has_twice_ = std::adjacent_find(sorted_.begin(), sorted_.end()) != sorted_.end();
    }

    bool has_twice() const noexcept { return has_twice_; }

    // True if it contains an id of [low, high].
    bool has_any(std::int64_t low, std::int64_t high) const noexcept {
        if (bits_.empty()) {
            const auto at = std::lower_bound(sorted_.begin(), sorted_.end(), low);
            return at != sorted_.end() && *at <= high;
        }
        high = std::min<std::int64_t>(high, last_);
        for (std::int64_t id = std::max<std::int64_t>(low, first_); id <= high; ++id) {
            const auto at = static_cast<std::uint64_t>(id - first_);
            if (bits_[at / 64] >> (at % 64) & 1) return true;
        }
        return false;
    }

private:
    std::uint32_t first_;
    std::uint32_t last_ = 0;
    bool has_twice_ = false;
    std::vector<std::uint64_t> bits_;
    std::vector<std::uint32_t> sorted_;
};

constexpr std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

// The first pair whose destination an earlier pair already has.
inline std::size_t first_repeat(const std::vector<Pair>& pairs) {
    std::vector<std::pair<std::uint32_t, std::size_t>> by_target;
    for (std::size_t i = 0; i < pairs.size(); ++i) by_target.emplace_back(pairs[i].to, i);
    std::sort(by_target.begin(), by_target.end());
    std::size_t first = pairs.size();
    for (std::size_t i = 1; i < by_target.size(); ++i)
        if (by_target[i].first == by_target[i - 1].first) first = std::min(first, by_target[i].second);
    return first;
}

inline Hull absolute(const Blocks& blocks, IdRange used) {
    const auto base = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(blocks.base));
    const Hull hull = blocks.hull(used.first, used.last);
    return {base + hull.low, base + hull.high};
}

inline bool is_same_layout(const Blocks& a, const Blocks& b) {
    const auto same = [](const Extent& x, const Extent& y) { return x.offset == y.offset && x.bytes == y.bytes; };
    return a.base == b.base && a.stride == b.stride && a.extents.size() == b.extents.size() &&
           std::equal(a.extents.begin(), a.extents.end(), b.extents.begin(), same);
}

// Finds a destination that shares a byte with a source. Exact if each block has one extent (such as the cells
// of two workers in one region), or if both sides are the same array (a pool that is compacted). Otherwise it
// only compares the ranges that the blocks span, and refuses ranges that overlap as `tangled`.
inline Finding find_overlap(const Reading& reading, const Blocks& from, const Blocks& to) {
    const Hull source = absolute(from, reading.from);
    const Hull target = absolute(to, reading.to);
    if (source.high <= target.low || target.high <= source.low) return {};
    const auto& pairs = reading.pairs;
    const auto overlap = [&](std::size_t i) { return Finding{Fault::overlap, i, pairs[i].to}; };
    if (is_same_layout(from, to)) {
        const IdSet sources(pairs, &Pair::from, reading.from);
        for (std::size_t i = 0; i < pairs.size(); ++i)
            if (sources.has_any(pairs[i].to, pairs[i].to)) return overlap(i);
        return {};
    }
    const auto bytes = static_cast<std::int64_t>(from.block_bytes);
    if (!from.is_contiguous() || !to.is_contiguous() || std::abs(from.stride) < bytes) return {Fault::tangled, 0, 0};
    // Source i covers [i * stride, i * stride + bytes); at most two of them reach into [x, x + bytes).
    const IdSet sources(pairs, &Pair::from, reading.from);
    const std::int64_t between = to.base - from.base;
    for (std::size_t i = 0; i < pairs.size(); ++i) {
        const std::int64_t x = between + static_cast<std::int64_t>(pairs[i].to) * to.stride;
        const std::int64_t sign = from.stride < 0 ? -1 : 1;
        const std::int64_t step = from.stride * sign;
        // i * step lies in (sign * x - bytes, sign * x + bytes)
        const std::int64_t low = floor_div(sign * x - bytes, step) + 1;
        const std::int64_t high = -floor_div(-(sign * x + bytes), step) - 1;
        if (sources.has_any(low, high)) return overlap(i);
    }
    return {};
}

// All checks. `finding.fault` is `none` if the pairs may be moved in any order.
template <class Int>
Reading check_pairs(const Int* ids, std::size_t count, const Blocks& from, const Blocks& to) {
    Reading reading = read_pairs(ids, count, from, to);
    if (reading.finding.fault != Fault::none || count == 0) return reading;
    if (!reading.ascending && IdSet(reading.pairs, &Pair::to, reading.to).has_twice()) {
        const std::size_t pair = first_repeat(reading.pairs);
        reading.finding = {Fault::target_twice, pair, reading.pairs[pair].to};
        return reading;
    }
    if (from.block_bytes != 0) reading.finding = find_overlap(reading, from, to);
    return reading;
}

}  // namespace memlane::offload
