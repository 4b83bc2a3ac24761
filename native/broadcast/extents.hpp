// Space behind the ring, in the ring's own file, for messages that do not fit a chunk.
//
//   begin            the pool: extents keep their space, and their pages in the writer's memory, for later messages
//   begin + pool     extents that found no range in the pool; their space is freed after their lap
//
// Nothing is lent or kept warm unless half of the file system stays free (RingWriter): however many queues share it,
// lent and warm extents never take more than the other half.
//
// The states of an extent in the writer's records:
//
//   free, cold   no space yet                                written by pwrite: a full file system is an error, not a SIGBUS
//   free, warm   space that the writer has mapped            written by a copy, which costs half of a pwrite
//   in use       belongs to one lap of one chunk            until every reader has finished with that lap
//   lent         readers keep it (lease.hpp)                 until the last lease ends; nobody waits for that
//
// Space is freed by punching it out of the file: beyond the pool at once, warm space when less than half of the file
// system is free or when there was no large message for a while.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <numeric>
#include <system_error>
#include <utility>
#include <vector>

#include "core/layout.hpp"
#include "os/file.hpp"

namespace memlane::broadcast {

// unfreed: a write failed, and so did freeing the space that it took; not used before trim() has freed it.
enum class Space : std::uint8_t { cold, unfreed, warm };

struct Extent {
    std::uint64_t offset;
    std::uint64_t bytes;
    Space space;  // when it was taken; not updated by writes
    std::uint32_t lease = 0;  // 1 + its row of extent_leases; 0: may not be lent
};

// The writer's records of the file behind `begin`. No other process has any.
class Extents {
public:
    // `leases`: how many extents may be lent at a time.
    Extents(std::uint64_t begin, std::uint64_t pool_bytes, std::uint64_t leases = 0)
        : end_(begin), pool_end_(begin + pool_bytes / core::kPage * core::kPage), lends_(leases > 0), leases_(leases) {
        std::iota(leases_.begin(), leases_.end(), std::uint32_t{1});
    }

    std::uint64_t end() const noexcept { return end_; }
    bool has_any() const noexcept { return !used_.empty(); }
    std::uint64_t warm_bytes() const noexcept { return warm_bytes_; }
    // The bytes of extents whose lap is not over.
    std::uint64_t awaited_bytes() const noexcept {
        std::uint64_t bytes = 0;
        for (const Used& one : used_)
            if (!one.is_lent) bytes += one.extent.bytes;
        return bytes;
    }
    bool is_in_pool(const Extent& extent) const noexcept { return extent.offset + extent.bytes <= pool_end_; }
    // True if extents are lent at all, and the pool has room for one of this size.
    bool can_lend(std::uint64_t bytes) const noexcept {
        const std::uint64_t rounded = core::align_up(bytes, core::kPage);
        if (!lends_) return false;
        if (end_ <= pool_end_ && rounded <= pool_end_ - end_) return true;
        return std::any_of(free_.begin(), free_.end(), [&](const auto& one) {
            return one.first < pool_end_ && one.second.space != Space::unfreed && one.second.bytes >= rounded;
        });
    }

    // True if a warm range has room for this many bytes, so that take() needs no memory.
    bool has_warm(std::uint64_t bytes) const noexcept {
        const std::uint64_t rounded = core::align_up(bytes, core::kPage);
        return rounded <= warm_bytes_ && std::any_of(free_.begin(), free_.end(), [&](const auto& one) {
                   return one.second.space == Space::warm && one.second.bytes >= rounded;
               });
    }

    // True if the pool has no range of this size, but would have one if warm and cold neighbours were joined.
    bool fits_if_trimmed(std::uint64_t bytes) const noexcept {
        const std::uint64_t rounded = core::align_up(bytes, core::kPage);
        std::uint64_t begin = 0, end = 0;  // of a run of neighbours
        bool fits = false;
        for (const auto& [offset, range] : free_) {
            if (offset >= pool_end_) break;
            if (range.space == Space::unfreed) continue;
            if (range.bytes >= rounded) return false;
            if (offset != end) begin = offset;
            end = offset + range.bytes;
            fits |= end - begin >= rounded;
        }
        if (end_ >= pool_end_) return fits;
        if (pool_end_ - end_ >= rounded) return false;
        return fits || (end == end_ && pool_end_ - begin >= rounded);
    }

    // With `lends` it may be lent, if it is in the pool and a row of leases is free.
    Extent take(std::uint64_t bytes, std::uint64_t position, bool lends = false) {
        Extent extent{0, core::align_up(bytes, core::kPage), Space::warm};
        if (!take_free(extent, true)) {
            extent.space = Space::cold;
            if (!take_free(extent, true) && !append(extent, pool_end_) && !take_free(extent, false)) append_beyond(extent);
        }
        if (lends && !leases_.empty() && is_in_pool(extent)) {
            extent.lease = leases_.back();
            leases_.pop_back();
        }
        used_.push_back({extent, position, false});
        return extent;
    }

    // The latest take() may not be lent after all.
    void unlend() {
        Extent& extent = used_.back().extent;
        end_lease(extent);
        extent.lease = 0;
    }
    // The latest take().
    const Extent& latest() const noexcept { return used_.back().extent; }

    // Calls visit(extent, position) for every extent that is in use or lent.
    template <class Visit>
    void for_each_used(Visit&& visit) const {
        for (const Used& one : used_) visit(one.extent, one.position);
    }

    // Frees every extent whose lap is over and that no reader keeps. Returns whether there was any.
    template <class IsOver, class IsKept>
    bool reclaim(const os::FileDescriptor& file, IsOver&& is_over, IsKept&& is_kept) {
        bool any = false;
        for (auto at = used_.begin(); at != used_.end();) {
            const bool is_lap_over = at->is_lent || is_over(at->position);
            at->is_lent = is_lap_over && at->extent.lease != 0 && is_kept(at->extent.lease);
            if (!is_lap_over || at->is_lent) {
                ++at;
                continue;
            }
            const Extent extent = at->extent;
            const bool is_kept_warm = is_in_pool(extent);
            if (!is_kept_warm) os::punch_hole(file, extent.offset, extent.bytes);
            end_lease(extent);
            add_free({extent.offset, extent.bytes, is_kept_warm ? Space::warm : Space::cold});
            at = used_.erase(at);
            any = true;
        }
        return any;
    }

    // Cancels the latest take(). The extent may have been written in part.
    void cancel(const os::FileDescriptor& file) {
        Extent extent = used_.back().extent;
        used_.pop_back();
        try {
            os::punch_hole(file, extent.offset, extent.bytes);
            extent.space = Space::cold;
        } catch (const std::system_error&) {
            extent.space = Space::unfreed;
        }
        end_lease(extent);
        add_free(extent);
    }

    // Frees the space of all free extents. False if none had any.
    bool trim(const os::FileDescriptor& file) {
        std::vector<Extent> held;
        for (const auto& [offset, range] : free_)
            if (range.space != Space::cold) held.push_back({offset, range.bytes, range.space});
        for (const Extent& extent : held) {
            os::punch_hole(file, extent.offset, extent.bytes);
            free_.erase(extent.offset);
            if (extent.space == Space::warm) warm_bytes_ -= extent.bytes;
            add_free({extent.offset, extent.bytes, Space::cold});
        }
        return !held.empty();
    }

private:
    struct Used {
        Extent extent;
        std::uint64_t position;
        bool is_lent;  // its lap is over, but readers keep it
    };
    struct FreeRange {
        std::uint64_t bytes;
        Space space;
    };

    void end_lease(const Extent& extent) {
        if (extent.lease != 0) leases_.push_back(extent.lease);
    }

    // First fit among those of the extent's kind; the rest of a range stays free.
    bool take_free(Extent& extent, bool in_pool) {
        for (auto at = free_.begin(); at != free_.end(); ++at) {
            const auto [offset, range] = *at;
            if (range.space != extent.space || (offset < pool_end_) != in_pool || range.bytes < extent.bytes) continue;
            free_.erase(at);
            if (range.bytes > extent.bytes) free_[offset + extent.bytes] = {range.bytes - extent.bytes, range.space};
            if (range.space == Space::warm) warm_bytes_ -= extent.bytes;
            extent.offset = offset;
            return true;
        }
        return false;
    }

    bool append(Extent& extent, std::uint64_t limit) {
        if (end_ > limit || extent.bytes > limit - end_) return false;
        extent.offset = std::exchange(end_, end_ + extent.bytes);
        return true;
    }

    void append_beyond(Extent& extent) {
        if (const std::uint64_t end = end_; end < pool_end_) {  // the rest of the pool stays free
            end_ = pool_end_ + extent.bytes;
            add_free({end, pool_end_ - end, Space::cold});
            extent.offset = pool_end_;
        } else {
            append(extent, UINT64_MAX);
        }
    }

    // Joins neighbours of one kind, so that the file does not grow for lack
    // of a range that is long enough. No range crosses the end of the pool.
    void add_free(Extent extent) {
        if (extent.space == Space::warm) warm_bytes_ += extent.bytes;
        const auto joins = [&](std::uint64_t border, const FreeRange& range) {
            return range.space == extent.space && border != pool_end_;
        };
        auto next = free_.lower_bound(extent.offset);
        if (next != free_.begin()) {
            const auto before = std::prev(next);
            if (before->first + before->second.bytes == extent.offset && joins(extent.offset, before->second)) {
                extent = {before->first, before->second.bytes + extent.bytes, extent.space};
                free_.erase(before);
            }
        }
        if (next != free_.end() && extent.offset + extent.bytes == next->first && joins(next->first, next->second)) {
            extent.bytes += next->second.bytes;
            free_.erase(next);
        }
        if (extent.space == Space::cold && extent.offset + extent.bytes == end_) {
            end_ = extent.offset;  // the file keeps its length: a reader may still look there
            return;
        }
        free_[extent.offset] = {extent.bytes, extent.space};
    }

    std::uint64_t end_;
    std::uint64_t pool_end_;
    const bool lends_;
    std::uint64_t warm_bytes_ = 0;
    std::vector<std::uint32_t> leases_;  // rows that are free, each as 1 + row
    std::vector<Used> used_;
    std::map<std::uint64_t, FreeRange> free_;
};

}  // namespace memlane::broadcast
