// What a pool or a tier tells observers: counters in a segment without a name, which lasts as long as its process has it.
//
// Keys stay private. The process writes with relaxed stores, some 80 of them a call; observers only read.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>

#include "core/segment.hpp"
#include "core/sync.hpp"
#include "tiers/block_jobs.hpp"
#include "tiers/block_pool.hpp"

namespace memlane::tiers {

// Fields are added at the end, and read by `memlane.inspect`.
struct TierFacts {
    std::uint64_t blocks, used, reserved, pinned;
    std::uint64_t accesses, hits, stored, evicted, declined;
    // For a disk tier only.
    std::uint64_t loaded, missed, errors, corrupt, expired, queue, is_stalled, retired;
    std::uint64_t dropped;  // of a pool
    std::uint64_t is_detached, lookups, found, written;  // of a disk tier
    std::uint64_t left_out;                              // of a pool
};
static_assert(sizeof(TierFacts) == 184);

// For a disk tier: how long blocks took to be stored, and to be loaded.
using TierSpans = std::array<Spans, 2>;
static_assert(sizeof(TierSpans) == 512);

class ShownFacts {
public:
    // `block_bytes`: 0 of a pool, which has no memory. Throws what creating a segment throws.
    void show(const core::SegmentId& id, const std::string& name, const std::string& label, std::uint64_t blocks,
              std::uint64_t block_bytes) {
        const core::SegmentPlan plan{core::System::tier,
                                     {blocks, block_bytes, 0, 0},
                                     0,
                                     {{core::Section::tier_facts, sizeof(TierFacts), 1},
                                      {core::Section::delivery_times, sizeof(Spans), std::tuple_size_v<TierSpans>}}};
        segment_ = core::Segment::create(plan, id, name, {}, std::nullopt);
        core::set_label(segment_->header(), label);
        segment_->remove_name();
        facts_ = segment_->section<TierFacts>(core::Section::tier_facts);
        spans_ = segment_->section<TierSpans>(core::Section::delivery_times);
    }

    void publish(const TierFacts& now) const noexcept {
        if (facts_ != nullptr) copy(now, facts_);
    }
    void publish(const TierSpans& now) const noexcept {
        if (facts_ != nullptr) copy(now, spans_);
    }

    void end() noexcept {
        facts_ = nullptr;
        segment_.reset();
    }

    static TierFacts of(const BlockPool& pool) noexcept {
        const PoolStatistics now = pool.statistics();
        TierFacts facts{};
        facts.blocks = pool.blocks();
        facts.used = now.used;
        facts.reserved = now.reserved;
        facts.pinned = now.pinned;
        facts.accesses = now.accesses;
        facts.hits = now.hits;
        facts.stored = now.stored;
        facts.evicted = now.evicted;
        facts.declined = now.declined;
        facts.retired = now.retired;
        facts.dropped = now.dropped;
        facts.left_out = now.left_out;
        return facts;
    }

private:
    template <class Facts>
    static void copy(const Facts& now, Facts* shown) noexcept {
        const auto* const from = reinterpret_cast<const std::uint64_t*>(&now);
        auto* const to = reinterpret_cast<std::uint64_t*>(shown);
        for (std::size_t i = 0; i < sizeof now / sizeof *to; ++i) core::store_relaxed(to[i], from[i]);
    }

    std::shared_ptr<core::Segment> segment_;
    TierFacts* facts_ = nullptr;
    TierSpans* spans_ = nullptr;
};

}  // namespace memlane::tiers
