// What is looked at before the first byte moves.
//
// The ids are read once, into memory of our own: the caller's array may be written to meanwhile, and an id that was
// checked must be the id that is used. After that three things must hold: every id is a block's; no destination comes
// twice; no destination shares a byte with a source. Then the order of the copies cannot matter, and they may be
// reordered, merged and given to several threads. The result is that of numpy's `dst[to] = src[from]`.
//
// A pair costs about 5 ns to read and 4 ns to look up, so the bits of a set of ids are kept while they are cheaper to
// clear than the ids are to sort: 8 million blocks are a megabyte, which the second cache holds.
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

// What is wrong with which pair; `id` is as the caller wrote it (the bits of an unsigned number, if it is one).
struct Finding {
    Fault fault = Fault::none;
    std::size_t pair = 0;
    std::uint64_t id = 0;
};

struct Reading {
    std::vector<Pair> pairs;
    IdRange from;
    IdRange to;
    bool ascending = true;  // strictly, in the destination: nothing can be there twice
    Finding finding;
};

// Int: how the caller's ids are stored. Each is loaded once.
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

// The ids on one side of the pairs: bits where that is cheap, else sorted.
class IdSet {
public:
    IdSet(const std::vector<Pair>& pairs, std::uint32_t Pair::* id, IdRange range) : first_(range.first) {
        constexpr std::uint64_t kWordsPerPair = 16;  // to clear them takes as long as to sort one id
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

    // Is one of [low, high] there?
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

namespace detail {

constexpr std::int64_t floor_div(std::int64_t a, std::int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

// The first pair whose destination an earlier pair has, too.
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

}  // namespace detail

// Does a destination share a byte with a source? Told exactly where blocks have one extent each, or both sides are one
// array (a pool that is compacted, the cells of two workers in one region); else memory that is far apart is told from
// memory that is not, and the latter refused as `tangled`.
inline Finding find_overlap(const Reading& reading, const Blocks& from, const Blocks& to) {
    const Hull source = detail::absolute(from, reading.from);
    const Hull target = detail::absolute(to, reading.to);
    if (source.high <= target.low || target.high <= source.low) return {};
    const auto& pairs = reading.pairs;
    const auto overlap = [&](std::size_t i) { return Finding{Fault::overlap, i, pairs[i].to}; };
    if (detail::is_same_layout(from, to)) {
        const IdSet sources(pairs, &Pair::from, reading.from);
        for (std::size_t i = 0; i < pairs.size(); ++i)
            if (sources.has_any(pairs[i].to, pairs[i].to)) return overlap(i);
        return {};
    }
    const auto bytes = static_cast<std::int64_t>(from.block_bytes);
    if (!from.is_contiguous() || !to.is_contiguous() || std::abs(from.stride) < bytes) return {Fault::tangled, 0, 0};
    // Source i covers [i * stride, i * stride + bytes); those that reach into [x, x + bytes) are at most two ids.
    const IdSet sources(pairs, &Pair::from, reading.from);
    const std::int64_t between = to.base - from.base;
    for (std::size_t i = 0; i < pairs.size(); ++i) {
        const std::int64_t x = between + static_cast<std::int64_t>(pairs[i].to) * to.stride;
        const std::int64_t sign = from.stride < 0 ? -1 : 1;
        const std::int64_t step = from.stride * sign;
        // i * step lies in (sign * x - bytes, sign * x + bytes)
        const std::int64_t low = detail::floor_div(sign * x - bytes, step) + 1;
        const std::int64_t high = -detail::floor_div(-(sign * x + bytes), step) - 1;
        if (sources.has_any(low, high)) return overlap(i);
    }
    return {};
}

// All of it. `finding.fault` is `none` where the pairs may be moved in any order.
template <class Int>
Reading check_pairs(const Int* ids, std::size_t count, const Blocks& from, const Blocks& to) {
    Reading reading = read_pairs(ids, count, from, to);
    if (reading.finding.fault != Fault::none || count == 0) return reading;
    if (!reading.ascending && IdSet(reading.pairs, &Pair::to, reading.to).has_twice()) {
        const std::size_t pair = detail::first_repeat(reading.pairs);
        reading.finding = {Fault::target_twice, pair, reading.pairs[pair].to};
        return reading;
    }
    if (from.block_bytes != 0) reading.finding = find_overlap(reading, from, to);
    return reading;
}

}  // namespace memlane::offload
