// Which blocks of a disk tier are too old: pure, takes the time, in seconds since 1970.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tiers/block_lists.hpp"

namespace memlane::tiers {

class SlotAges {
public:
    // `limit`: a block lives for so many seconds, and for less than one more, as times are whole seconds; 0: for ever.
    SlotAges(std::uint32_t slots, std::uint32_t limit) : limit_(limit), stored_(limit > 0 ? slots : 0) {}

    bool has_limit() const noexcept { return limit_ > 0; }
    void stored(Block slot, std::uint32_t when) noexcept {
        if (has_limit()) stored_[slot] = when;
    }
    // Also of a slot without a block.
    bool is_old(Block slot, std::uint32_t now) const noexcept {
        return has_limit() && std::uint64_t{stored_[slot]} + limit_ < now;
    }
    // All slots in turn, so that each is looked at now and then.
    Block next() noexcept {
        if (++next_ >= stored_.size()) next_ = 0;
        return next_;
    }

private:
    std::uint32_t limit_;
    std::vector<std::uint32_t> stored_;  // when; empty: there is no limit
    Block next_ = 0;
};

}  // namespace memlane::tiers
