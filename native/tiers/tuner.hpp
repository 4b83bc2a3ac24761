// Chooses the sizes of two segments and a ghost list while they are used, by shadow caches.
//
// Candidates are some two-segment caches, by their share of probation and the length of the ghost list; LRU; ARC; and rare
// admission, for loops over more than fits. A shadow of each sees all accesses, or those of a sample of keys, and the policy
// does as the one that has had the most hits lately. Every candidate can be had with the same two lists: LRU and rare
// admission protect every new block, ARC moves the share.
//
// More shares and lengths than these, twelve in all, hit no more on two traces of real requests at seven capacities.
//
// A shadow takes some 45 bytes a block, ARC's 150, and a long ghost list 100: all together 0.8 KB for each block that they
// have.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tiers/policies.hpp"
#include "tiers/shadow.hpp"

namespace memlane::tiers {

struct Candidate {
    enum class Kind : std::uint8_t { kTwoSegment, kLru, kArc, kRare } kind;
    double share;          // of probation
    std::uint32_t ghosts;  // times the capacity
};
inline constexpr std::uint32_t kLongGhosts = 10;
inline constexpr std::array<Candidate, 7> kCandidates{{
    {Candidate::Kind::kLru, 0, 1},
    {Candidate::Kind::kArc, 0, 1},
    {Candidate::Kind::kRare, 0, 1},
    {Candidate::Kind::kTwoSegment, 0, 1},
    {Candidate::Kind::kTwoSegment, 0, kLongGhosts},
    {Candidate::Kind::kTwoSegment, .05, kLongGhosts},
    {Candidate::Kind::kTwoSegment, .5, kLongGhosts},
}};
constexpr std::uint32_t ghosts_of(std::uint32_t times, std::uint32_t blocks) noexcept {
    return static_cast<std::uint32_t>(std::min<std::uint64_t>(std::uint64_t{times} * blocks, 0xFFFF'FFFF));
}
// What a tuner has learned, for a later life of it.
struct TunerState {
    std::uint32_t candidate = 0, candidates = 0;  // that was chosen; how many there were
    double share = 0;
    std::array<double, kCandidates.size()> scores{};

    bool is_valid() const noexcept {
        const auto is_score = [](double score) { return std::isfinite(score) && score >= 0; };
        return candidates == kCandidates.size() && candidate < candidates && is_score(share) && share <= 1 &&
               std::ranges::all_of(scores, is_score);
    }
};
// What a tuner has chosen, for a policy that may be used by another thread.
struct Choice {
    std::atomic<std::uint32_t> candidate{0};
    std::atomic<double> share{0};  // of probation, as a part of the capacity
    std::array<std::atomic<double>, kCandidates.size()> scores{};  // of each candidate

    TunerState state() const noexcept {
        TunerState now{candidate.load(std::memory_order_relaxed), kCandidates.size(), share.load(std::memory_order_relaxed)};
        for (std::size_t at = 0; at < scores.size(); ++at) now.scores[at] = scores[at].load(std::memory_order_relaxed);
        return now;
    }
};

// Feeds the shadows, and chooses.
class Tuner {
public:
    // Up to so many blocks the shadows see every access; beyond, they are as small, and see as small a part of the keys.
    static constexpr std::uint32_t kWhole = 3'000;
    static constexpr std::size_t kRound = 1024;  // accesses between two choices
    // A hit counts half after so many accesses, as a multiple of the capacity. Another candidate must have had so many more
    // hits. Shorter memories and smaller margins change their minds too often, at 2 to 5 % of the hits.
    static constexpr double kHalfLife = 20, kMargin = 0.02, kLn2 = 0.6931471805599453;
    // What a hit of rare admission counts: it keeps blocks without those before them, and what came first for too long. In
    // loops it has many times the hits of the others.
    static constexpr double kOfRare = 0.7;

    explicit Tuner(std::uint32_t blocks)
        : size_(std::min(blocks, kWhole)),
          sampled_((std::uint64_t{size_} << 32) / blocks),
          keeps_(1 - kLn2 / (kHalfLife * size_)) {
        for (const Candidate& each : kCandidates) shadows_.emplace_back(policy_of(each), size_);
    }

    // Accesses in their order. A choice is made every kRound of them, however they are split into calls.
    void accessed(std::span<const Key> keys) {
        for (const Key key : keys) {
            if ((key >> 32) < sampled_) seen_.push_back(key);
            if (++accesses_ % kRound == 0) choose();
        }
    }

    // Before the first access: goes on with what an earlier tuner has learned, though not with its shadows.
    void restore(const TunerState& state) noexcept {
        if (!state.is_valid()) return;
        chosen_ = state.candidate;
        scores_ = state.scores;
        publish(state.share);
    }

    std::shared_ptr<const Choice> choice() const noexcept { return choice_; }

private:
    static constexpr std::size_t kAhead = 6;  // memory is asked for so many keys before it is read

    // One shadow after the other sees all of the round, so that only its own memory is in the caches; the choice comes last.
    void choose() {
        std::uint32_t best = chosen_;
        for (std::uint32_t at = 0; at < shadows_.size(); ++at) {
            const double counts = kCandidates[at].kind == Candidate::Kind::kRare ? kOfRare : 1;
            for (std::size_t i = 0; i < seen_.size(); ++i) {
                if (i + kAhead < seen_.size()) shadows_[at].prefetch(seen_[i + kAhead]);
                scores_[at] = scores_[at] * keeps_ + counts * shadows_[at].access(seen_[i]);
            }
            if (scores_[at] > scores_[best]) best = at;
        }
        if (scores_[best] > scores_[chosen_] * (1 + kMargin)) chosen_ = best;
        const Candidate& candidate = kCandidates[chosen_];
        double share = candidate.share;
        if (candidate.kind == Candidate::Kind::kArc) {
            share = static_cast<const Arc&>(shadows_[chosen_].policy()).target() / size_;
        }
        publish(share);
        seen_.clear();
    }

    void publish(double share) noexcept {
        choice_->share.store(share, std::memory_order_relaxed);
        choice_->candidate.store(chosen_, std::memory_order_relaxed);
        for (std::size_t at = 0; at < scores_.size(); ++at) choice_->scores[at].store(scores_[at], std::memory_order_relaxed);
    }

    std::unique_ptr<Policy> policy_of(const Candidate& each) const {
        if (each.kind == Candidate::Kind::kLru) return std::make_unique<Lru>(size_);
        if (each.kind == Candidate::Kind::kArc) return std::make_unique<Arc>(size_);
        if (each.kind == Candidate::Kind::kRare) return std::make_unique<Rare>(size_);
        return std::make_unique<TwoSegment>(size_, each.share, ghosts_of(each.ghosts, size_));
    }

    std::uint32_t size_;
    std::uint64_t sampled_;  // keys whose upper half is below
    double keeps_;
    std::vector<Shadow> shadows_;
    std::vector<Key> seen_;  // of the round, as far as they are of the sample
    std::uint64_t accesses_ = 0;
    std::array<double, kCandidates.size()> scores_{};
    std::uint32_t chosen_ = 0;
    std::shared_ptr<Choice> choice_ = std::make_shared<Choice>();
};

}  // namespace memlane::tiers
