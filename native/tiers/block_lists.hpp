// Blocks in doubly linked lists, newest first; a block is in one list at most.
//
// A pinned block that is found at the old end is parked: it leaves the chain but still counts as one of its list, and
// comes back to the old end when it is no longer pinned. So each pin is passed once, however many blocks are pinned.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "tiers/block_map.hpp"

namespace memlane::tiers {

using Pins = std::span<const std::uint32_t>;  // of each block, how many; empty: nothing is pinned

class BlockLists {
public:
    using List = std::uint8_t;
    static constexpr List kNone = 0xFF;

    BlockLists(std::uint32_t blocks, List lists) : blocks_(blocks), ends_(lists) {}

    std::uint32_t blocks() const noexcept { return static_cast<std::uint32_t>(blocks_.size()); }
    // One block more; returns it.
    Block add() {
        blocks_.emplace_back();
        return blocks() - 1;
    }

    std::uint32_t size(List list) const noexcept { return ends_[list].size; }

    // The block is in no list.
    void push(List list, Block block) noexcept {
        blocks_[block].list = list;
        ++ends_[list].size;
        link_newest(list, block);
    }

    void remove(Block block) noexcept {
        Links& links = blocks_[block];
        if (!links.is_parked) unlink(block);
        --ends_[links.list].size;
        links = Links{};
    }

    void move(List list, Block block) noexcept {
        remove(block);
        push(list, block);
    }

    // The oldest that is not pinned; kNoBlock if there is none. It stays in its list.
    Block oldest(List list, Pins pins) noexcept {
        for (Block block; (block = ends_[list].oldest) != kNoBlock;) {
            if (pins.empty() || pins[block] == 0) return block;
            unlink(block);
            blocks_[block].is_parked = true;
        }
        return kNoBlock;
    }

    // Its last pin is gone. The block is in a list.
    void unpinned(Block block) noexcept {
        Links& links = blocks_[block];
        if (!links.is_parked) return;
        links.is_parked = false;
        link_oldest(links.list, block);
    }

    void clear() noexcept {
        for (Links& links : blocks_) links = Links{};
        for (Ends& ends : ends_) ends = Ends{};
    }

private:
    struct Links {
        Block newer = kNoBlock;
        Block older = kNoBlock;
        List list = kNone;
        bool is_parked = false;
    };
    struct Ends {
        Block newest = kNoBlock;
        Block oldest = kNoBlock;
        std::uint32_t size = 0;  // with those that are parked
    };

    void link_newest(List list, Block block) noexcept {
        Ends& ends = ends_[list];
        blocks_[block].older = ends.newest;
        blocks_[block].newer = kNoBlock;
        (ends.newest == kNoBlock ? ends.oldest : blocks_[ends.newest].newer) = block;
        ends.newest = block;
    }

    void link_oldest(List list, Block block) noexcept {
        Ends& ends = ends_[list];
        blocks_[block].newer = ends.oldest;
        blocks_[block].older = kNoBlock;
        (ends.oldest == kNoBlock ? ends.newest : blocks_[ends.oldest].older) = block;
        ends.oldest = block;
    }

    void unlink(Block block) noexcept {
        const Links& links = blocks_[block];
        Ends& ends = ends_[links.list];
        (links.newer == kNoBlock ? ends.newest : blocks_[links.newer].older) = links.older;
        (links.older == kNoBlock ? ends.oldest : blocks_[links.older].newer) = links.newer;
    }

    std::vector<Links> blocks_;
    std::vector<Ends> ends_;
};

}  // namespace memlane::tiers
