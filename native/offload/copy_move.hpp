// Moving blocks within the memory of this host, on one thread or several.
//
// What bounds a move, and what is done about it:
//
//   blocks of      bounded by                          remedy
//   64 B .. 1 KiB  a page walk and a line, at random   pairs sorted by destination page; sources prefetched
//   4 KiB          the start of each page              eight pages side by side, past the caches (copy_streaming.hpp)
//   64 KiB ..      memory                              the same; more threads
//   any, cached    nothing                             memcpy
//
// Pairs that are neighbours on both sides become one copy if their bytes are adjacent. They are found while
// copying: a list of such runs would cost more than it saves where there are none.
//
// The work is cut into units of a mebibyte that the threads take from one counter, so a preempted thread delays
// the end by one unit. Threads are started for each call: that should cost 100 us (not measured), little beside
// a mebibyte each, and a pool would have to be handled at every fork.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "offload/copy_check.hpp"
#include "offload/copy_layout.hpp"
#include "core/copy_streaming.hpp"
#include "os/clock.hpp"
#include "os/threads.hpp"

namespace memlane::offload {

using core::kLine;
using core::prefetch;
using core::StreamingCopy;

// Bytes that a thread takes at a time, and the least work for which one more thread is started.
inline constexpr std::uint64_t kUnitBytes = 1u << 20;
// More threads do not make memory faster.
inline constexpr unsigned kMostThreads = 8;
// A pair costs at least as much as copying this many bytes.
inline constexpr std::uint64_t kPairBytes = 512;
// The interval at which run() calls `look`.
inline constexpr os::Nanoseconds kLookInterval = 50 * os::kMillisecond;

class Move {
public:
    // Moves pairs that check_pairs has accepted, between arrays that outlive the move.
    Move(const Blocks& from, const Blocks& to, Reading reading)
        : from_(from.base), to_(to.base), from_stride_(from.stride), to_stride_(to.stride), block_bytes_(from.block_bytes),
          segments_(segments_of(from, to)), pairs_(std::move(reading.pairs)) {
        if (block_bytes_ == 0) pairs_.clear();
        if (block_bytes_ <= kSmallBlock && !reading.ascending && pairs_.size() >= kSortedPairs) sort(reading.to);
        streams_ = core::kCanStream && bytes() >= core::kStreamingBytes;
        merges_ = std::all_of(segments_.begin(), segments_.end(), [&](const Segment& s) {
            return from_stride_ == to_stride_ && from_stride_ == static_cast<std::int64_t>(s.bytes);
        });
        parts_ = segments_.size() == 1 ? std::max<std::uint64_t>(1, block_bytes_ / kUnitBytes) : 1;
        per_unit_ = std::max<std::uint64_t>(1, kUnitBytes / std::max(block_bytes_, kPairBytes));
        units_ = parts_ > 1 ? pairs_.size() * parts_ : (pairs_.size() + per_unit_ - 1) / per_unit_;
    }
    Move(const Move&) = delete;
    Move& operator=(const Move&) = delete;

    std::uint64_t bytes() const noexcept { return pairs_.size() * block_bytes_; }

    // The number of threads that are worthwhile on `cores` cores; run() caps a larger request by the amount of work.
    unsigned threads(unsigned cores) const noexcept {
        const std::uint64_t cost = pairs_.size() * std::max(block_bytes_, kPairBytes);
        return static_cast<unsigned>(std::clamp<std::uint64_t>(cost / kUnitBytes, 1, std::min(cores, kMostThreads)));
    }

    // Runs on that many threads, the caller's included. Only the caller's calls `look()`, from time to time; an
    // exception from it ends the move where it is. Returns how many threads could not be started.
    template <class Look>
    unsigned run(unsigned threads, Look&& look) {
        const auto wanted = static_cast<unsigned>(std::min<std::uint64_t>(threads, units_));
        os::Helpers helpers(wanted > 1 ? wanted - 1 : 0, [this] { work([] {}); });
        os::Nanoseconds next = os::monotonic_now() + kLookInterval;
        try {
            work([&] {
                if (os::monotonic_now() < next) return;
                look();
                next = os::monotonic_now() + kLookInterval;
            });
        } catch (...) {
            ended_.store(true, std::memory_order_relaxed);
            throw;
        }
        const unsigned missing = helpers.missing();
        helpers.join();  // orders all their copies before the return
        return missing;
    }

private:
    // Up to this size, several blocks share a page.
    static constexpr std::uint64_t kSmallBlock = 1024;
    static constexpr std::size_t kSortedPairs = 1u << 14;
    static constexpr std::size_t kAhead = 16;

    // A stable sort by the high bits of the destination, into 1024 parts. A random cell costs two page walks,
    // each up to 90 ns in a virtual machine; if the TLB covers the destinations of a part, it costs one. The
    // sort takes 11 ns a pair. Neighbours stay neighbours.
    void sort(IdRange range) {
        constexpr std::size_t kParts = 1024;
        unsigned shift = 0;
        while ((range.ids() - 1) >> shift >= kParts) ++shift;
        std::array<std::size_t, kParts + 1> starts{};
        const auto part = [&](const Pair& pair) { return (pair.to - range.first) >> shift; };
        for (const Pair& pair : pairs_) ++starts[part(pair) + 1];
        for (std::size_t i = 0; i < kParts; ++i) starts[i + 1] += starts[i];
        std::vector<Pair> sorted(pairs_.size());
        for (const Pair& pair : pairs_) sorted[starts[part(pair)]++] = pair;
        pairs_.swap(sorted);
    }

    template <class Look>
    void work(Look&& look) {
        StreamingCopy streaming;
        while (!ended_.load(std::memory_order_relaxed)) {
            const std::uint64_t unit = next_unit_.fetch_add(1, std::memory_order_relaxed);
            if (unit >= units_) break;
            if (parts_ > 1)
                copy_part(unit / parts_, unit % parts_, streaming);
            else
                copy_pairs(unit * per_unit_, std::min<std::uint64_t>((unit + 1) * per_unit_, pairs_.size()), streaming);
            look();
        }
        streaming.finish();
    }

    const std::byte* source(const Pair& pair) const noexcept { return from_ + std::int64_t{pair.from} * from_stride_; }
    std::byte* target(const Pair& pair) const noexcept { return to_ + std::int64_t{pair.to} * to_stride_; }

    void copy(std::byte* to, const std::byte* from, std::uint64_t bytes, StreamingCopy& streaming) const noexcept {
        if (streams_)
            streaming.add(to, from, bytes);
        else
            std::memcpy(to, from, bytes);
    }

    void copy_part(std::uint64_t pair, std::uint64_t part, StreamingCopy& streaming) const noexcept {
        const std::uint64_t start = part * kUnitBytes;
        const std::uint64_t end = part + 1 == parts_ ? block_bytes_ : start + kUnitBytes;
        copy(target(pairs_[pair]) + segments_[0].to + start, source(pairs_[pair]) + segments_[0].from + start, end - start,
             streaming);
    }

    void copy_pairs(std::uint64_t first, std::uint64_t last, StreamingCopy& streaming) const noexcept {
        const bool small = block_bytes_ <= kSmallBlock;
        for (std::uint64_t i = first; i < last;) {
            if (small && i + kAhead < pairs_.size()) ask_for(source(pairs_[i + kAhead]));
            std::uint64_t run = 1;
            if (merges_)
                while (i + run < last && pairs_[i + run].from == pairs_[i].from + run && pairs_[i + run].to == pairs_[i].to + run)
                    ++run;
            std::byte* const to = target(pairs_[i]);
            const std::byte* const from = source(pairs_[i]);
            for (const Segment& s : segments_) copy(to + s.to, from + s.from, s.bytes * run, streaming);
            i += run;
        }
    }

    // Prefetches every line of the block's first segment: an unaligned block of 64 bytes has two.
    void ask_for(const std::byte* block) const noexcept {
        const std::byte* const start = block + segments_[0].from;
        const std::byte* const end = start + segments_[0].bytes;
        for (const std::byte* at = start; at < end; at += kLine) prefetch(at);
        prefetch(end - 1);
    }

    const std::byte* from_;
    std::byte* to_;
    std::int64_t from_stride_;
    std::int64_t to_stride_;
    std::uint64_t block_bytes_;
    std::vector<Segment> segments_;
    std::vector<Pair> pairs_;
    bool streams_;
    bool merges_;
    std::uint64_t parts_;     // per block, each a unit, if blocks are larger than a unit
    std::uint64_t per_unit_;  // pairs per unit, if blocks are smaller
    std::uint64_t units_;
    std::atomic<std::uint64_t> next_unit_{0};
    std::atomic<bool> ended_{false};
};

}  // namespace memlane::offload
