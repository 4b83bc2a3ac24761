// The keys of blocks that were evicted not long ago: a FIFO of at most `most` keys, with a look-up by key.
//
// Some 30 bytes a key, allocated as keys come. Where the bound may be on what was pushed, `RecentKeys` takes a third.
#pragma once

#include <cstdint>

#include "tiers/block_lists.hpp"
#include "tiers/block_map.hpp"

namespace memlane::tiers {

class GhostList {
public:
    explicit GhostList(std::uint64_t most) : most_(most) {}

    std::uint32_t size() const noexcept { return lists_.size(kUsed); }

    void prefetch(Key key) const noexcept { map_.prefetch(key); }

    // Newest; the oldest goes if there are too many. A key that is there already becomes the newest.
    void push(Key key) {
        if (most_ == 0) return;
        Block place = map_.remove(key);
        if (place == kNoBlock) place = lists_.oldest(kUnused, {});
        if (place == kNoBlock && size() == most_) map_.remove(map_.key_of(place = lists_.oldest(kUsed, {})));
        if (place == kNoBlock) {
            lists_.push(kUnused, place = lists_.add());
        }
        map_.insert(key, place);
        lists_.move(kUsed, place);
        // The next key removes the oldest.
        if (size() == most_) map_.prefetch(map_.key_of(lists_.oldest(kUsed, {})));
    }

    // It leaves. Returns whether it was there.
    bool take(Key key) noexcept {
        const Block place = map_.remove(key);
        if (place == kNoBlock) return false;
        lists_.move(kUnused, place);
        return true;
    }

    void drop_oldest() noexcept {
        const Block place = lists_.oldest(kUsed, {});
        if (place != kNoBlock) take(map_.key_of(place));
    }

    void clear() noexcept {
        while (size() > 0) drop_oldest();
    }

private:
    static constexpr BlockLists::List kUsed = 0, kUnused = 1;

    std::uint64_t most_;
    BlockLists lists_{0, 2};
    BlockMap map_;
};

}  // namespace memlane::tiers
