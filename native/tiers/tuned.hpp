// The default policy: two segments and a ghost list, with the sizes that a tuner has chosen.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "tiers/policies.hpp"
#include "tiers/tuner.hpp"

namespace memlane::tiers {

class Tuned final : public Policy {
public:
    static constexpr std::uint32_t kMostGhosts = 4'000'000;  // or as many as blocks, if that is more

    Tuned(std::uint32_t blocks, std::shared_ptr<const Choice> choice)
        : blocks_(blocks),
          choice_(std::move(choice)),
          segments_(blocks, std::max(blocks, std::min(kMostGhosts, ghosts_of(kLongGhosts, blocks)))) {}

    void touch(Block block) override { segments_.touch(block); }

    Admission admit(Key key) override {
        const Candidate& chosen = candidate();
        const std::uint32_t age = segments_.ghosts.take(key);
        const bool is_recent = age != RecentKeys::kAbsent && age < std::uint64_t{chosen.ghosts} * blocks_;
        bool is_wanted = chosen.kind != Candidate::Kind::kTwoSegment || chosen.share > 0;
        if (chosen.kind == Candidate::Kind::kRare) {
            is_wanted = rare_.admits(segments_.size() == blocks_);
        } else if (is_recent) {
            return Admission::kRecent;
        }
        if (is_wanted) return Admission::kNew;
        segments_.ghosts.push(key);
        return Admission::kDeclined;
    }

    Block victim(Admission, Pins pins) override {
        return segments_.victim(static_cast<std::uint32_t>(choice_->share.load(std::memory_order_relaxed) * blocks_), pins);
    }

    void insert(Key key, Block block, Admission admission) override {
        const Candidate::Kind kind = candidate().kind;
        const bool is_one_list = kind == Candidate::Kind::kLru || kind == Candidate::Kind::kRare;
        segments_.insert(key, block, admission == Admission::kRecent || is_one_list);
    }

    void remove(Block block) override { segments_.remove(block); }
    void unpinned(Block block) override { segments_.unpinned(block); }
    void clear() override { segments_.clear(); }

private:
    const Candidate& candidate() const noexcept {
        return kCandidates[choice_->candidate.load(std::memory_order_relaxed)];
    }

    std::uint32_t blocks_;
    std::shared_ptr<const Choice> choice_;
    RareAdmission rare_;
    Segments segments_;
};

}  // namespace memlane::tiers
