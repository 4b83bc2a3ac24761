// A cache without blocks: what a policy hits with so much room. For the tuned policy and for replays.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "tiers/block_map.hpp"
#include "tiers/policy.hpp"

namespace memlane::tiers {

class Shadow {
public:
    Shadow(std::unique_ptr<Policy> policy, std::uint32_t blocks) : policy_(std::move(policy)), blocks_(blocks), map_(blocks) {}

    bool has(Key key) const noexcept { return map_.find(key) != kNoBlock; }

    void prefetch(Key key) const noexcept {
        map_.prefetch(key);
        policy_->prefetch(key);
    }

    // One access: a hit, or a miss that is stored or declined. Returns whether it was a hit.
    bool access(Key key) {
        if (const Block found = map_.find(key); found != kNoBlock) {
            policy_->touch(found);
            return true;
        }
        const Admission admission = policy_->admit(key);
        if (admission == Admission::kDeclined) return false;
        Block block = used_;
        if (used_ < blocks_) {
            ++used_;
        } else {
            block = policy_->victim(admission, {});
            map_.remove(map_.key_of(block));
        }
        map_.insert(key, block);
        policy_->insert(key, block, admission);
        ++stores_;
        return false;
    }

    void clear() {
        policy_->clear();
        map_.clear();
        used_ = 0;
    }

    std::uint64_t stores() const noexcept { return stores_; }
    const Policy& policy() const noexcept { return *policy_; }

private:
    std::unique_ptr<Policy> policy_;
    std::uint32_t blocks_;
    BlockMap map_;
    std::uint32_t used_ = 0;
    std::uint64_t stores_ = 0;
};

}  // namespace memlane::tiers
