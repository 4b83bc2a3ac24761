// A policy on a trace of requests, from empty: no pins, no pool, nothing left out.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tiers/policies.hpp"
#include "tiers/shadow.hpp"
#include "tiers/tuned.hpp"

namespace memlane::tiers {

class Replay {
public:
    struct Counts {
        std::uint64_t requests = 0, accesses = 0, hits = 0, prefix_hits = 0, stores = 0;
    };

    Replay(const std::string& policy, std::uint32_t blocks) {
        if (policy == "tuned") {
            tuner_ = std::make_unique<Tuner>(blocks);
            cache_.emplace(std::make_unique<Tuned>(blocks, tuner_->choice()), blocks);
        } else {
            cache_.emplace(policy_named(policy, blocks), blocks);
        }
    }

    // The leading run that is there is counted first; then each key is accessed once, the last first.
    void request(std::span<const Key> keys) {
        ++counts_.requests;
        for (const Key key : keys) {
            if (!cache_->has(key)) break;
            ++counts_.prefix_hits;
        }
        const std::vector<Key> order(keys.rbegin(), keys.rend());
        for (const Key key : order) counts_.hits += cache_->access(key);
        if (tuner_) tuner_->accessed(order);
        counts_.accesses += keys.size();
    }

    // All keys; the counts stay, and what a tuner has chosen.
    void forget() { cache_->clear(); }

    Counts counts() const noexcept {
        Counts now = counts_;
        now.stores = cache_->stores();
        return now;
    }

private:
    std::unique_ptr<Tuner> tuner_;
    std::optional<Shadow> cache_;
    Counts counts_;
};

}  // namespace memlane::tiers
