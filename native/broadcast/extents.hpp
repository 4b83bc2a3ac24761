// Space behind the ring, in the ring's own file, for messages that do not fit a chunk.
//
// An extent belongs to one turn of one chunk. The writer writes it with pwrite and readers read it with pread
// through the descriptors that they hold: the file may have no name by then, a full file system is an error and never
// SIGBUS, and new pages need not be zeroed first. Only a view maps an extent. Of what is free again up to `keep`
// bytes stay allocated (warm: the next message pays for its copy only); the rest is given back to the system.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <vector>

#include "core/layout.hpp"
#include "os/file.hpp"

namespace memlane::broadcast {

struct Extent {
    std::uint64_t offset;
    std::uint64_t bytes;
};

// The writer's book of the file behind `begin`. Only the writer has one.
class Extents {
public:
    Extents(std::uint64_t begin, std::uint64_t keep) : end_(begin), keep_(keep) {}

    std::uint64_t end() const noexcept { return end_; }
    bool in_use() const noexcept { return !used_.empty(); }
    std::uint64_t warm_bytes() const noexcept { return warm_bytes_; }
    // Position of the message whose extent is in use for the longest time.
    std::optional<std::uint64_t> oldest() const noexcept {
        return used_.empty() ? std::nullopt : std::optional(used_.front().position);
    }

    Extent take(std::uint64_t bytes, std::uint64_t position) {
        const std::uint64_t rounded = core::align_up(bytes, core::kPage);
        Extent extent{0, rounded};
        if (!take_free(extent)) {
            extent.offset = end_;
            end_ += rounded;
        }
        used_.push_back({extent, position});
        return extent;
    }

    // Frees every extent whose turn is over. Returns whether there was any.
    template <class IsOver>
    bool reclaim(const os::FileDescriptor& file, IsOver&& is_over) {
        bool any = false;
        for (auto at = used_.begin(); at != used_.end();) {
            if (!is_over(at->position)) {
                ++at;
                continue;
            }
            give_back(file, at->extent);
            at = used_.erase(at);
            any = true;
        }
        return any;
    }

    // The latest extent was not used after all: its space may be written in part.
    void cancel(const os::FileDescriptor& file) {
        const Extent extent = used_.back().extent;
        used_.pop_back();
        bool warm = false;
        try {
            os::punch_hole(file, extent.offset, extent.bytes);
        } catch (const std::system_error&) {
            warm = true;  // trim() tries again
            warm_bytes_ += extent.bytes;
        }
        add_free(extent, warm);
    }

    // Gives all that is free back to the system. False if nothing was left to give.
    bool trim(const os::FileDescriptor& file) {
        bool any = false;
        std::vector<Extent> warm;
        for (const auto& [offset, range] : free_)
            if (range.warm) warm.push_back({offset, range.bytes});
        for (const Extent& extent : warm) {
            os::punch_hole(file, extent.offset, extent.bytes);
            free_.erase(extent.offset);
            warm_bytes_ -= extent.bytes;
            add_free(extent, false);
            any = true;
        }
        return any;
    }

private:
    struct Used {
        Extent extent;
        std::uint64_t position;
    };
    struct FreeRange {
        std::uint64_t bytes;
        bool warm;
    };

    // First fit, warm ranges before cold ones; the rest of a range stays free.
    bool take_free(Extent& extent) {
        for (const bool warm : {true, false}) {
            for (auto at = free_.begin(); at != free_.end(); ++at) {
                if (at->second.warm != warm || at->second.bytes < extent.bytes) continue;
                extent.offset = at->first;
                const FreeRange rest{at->second.bytes - extent.bytes, warm};
                free_.erase(at);
                if (rest.bytes > 0) free_[extent.offset + extent.bytes] = rest;
                if (warm) warm_bytes_ -= extent.bytes;
                return true;
            }
        }
        return false;
    }

    void give_back(const os::FileDescriptor& file, const Extent& extent) {
        const bool warm = warm_bytes_ + extent.bytes <= keep_;
        if (warm) {
            warm_bytes_ += extent.bytes;
        } else {
            os::punch_hole(file, extent.offset, extent.bytes);
        }
        add_free(extent, warm);
    }

    // Neighbours of one kind become one range, so that the file does not grow for want of a range long enough.
    void add_free(Extent extent, bool warm) {
        auto next = free_.lower_bound(extent.offset);
        if (next != free_.begin()) {
            const auto before = std::prev(next);
            if (before->second.warm == warm && before->first + before->second.bytes == extent.offset) {
                extent = {before->first, before->second.bytes + extent.bytes};
                free_.erase(before);
            }
        }
        if (next != free_.end() && next->second.warm == warm && extent.offset + extent.bytes == next->first) {
            extent.bytes += next->second.bytes;
            next = free_.erase(next);
        }
        if (!warm && extent.offset + extent.bytes == end_) {
            end_ = extent.offset;  // the file's own length stays: cutting it could hurt a reader that still looks
            return;
        }
        free_[extent.offset] = {extent.bytes, warm};
    }

    std::uint64_t end_;
    std::uint64_t keep_;
    std::uint64_t warm_bytes_ = 0;
    std::vector<Used> used_;
    std::map<std::uint64_t, FreeRange> free_;
};

}  // namespace memlane::broadcast
