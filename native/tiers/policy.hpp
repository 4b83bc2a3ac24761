// What a pool asks an eviction policy. Blocks are named by their numbers, keys by their hashes.
//
//   an access            accessed(key)
//   a hit               touch(block)
//   a miss to store     a = admit(key); if the pool is full, victim(a, pins), which leaves; insert(key, block, a)
//
// A policy of the user's needs the keys themselves, hears of a block when it is reserved, and may throw where it says so.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tiers/block_lists.hpp"
#include "tiers/block_map.hpp"

namespace memlane::tiers {

// True if a key should be stored, and what the policy knows of it.
enum class Admission : std::uint8_t {
    kDeclined,
    kNew,
    kRecent,    // evicted not long ago
    kFrequent,  // evicted not long ago, and was used often
};

class Policy {
public:
    virtual ~Policy() = default;

    // An access to the key follows soon.
    virtual void prefetch(Key /*key*/) const noexcept {}

    // May throw.
    virtual void touch(Block block) = 0;

    // Judges a key that is not there. Learns from the miss.
    virtual Admission admit(Key key) = 0;

    // The block to evict for it; the policy forgets the block. kNoBlock if all are pinned. May throw.
    virtual Block victim(Admission incoming, Pins pins) = 0;
    virtual Block victim(Admission incoming, Pins pins, std::span<const std::byte> /*bytes*/) { return victim(incoming, pins); }

    // The block is reserved for that key, and may come back without having been inserted. False: declined after all.
    // May throw.
    virtual bool reserve(Block /*block*/) { return true; }
    virtual void give_back(Block /*block*/) {}

    // The block is not in the policy.
    virtual void insert(Key key, Block block, Admission admission) = 0;

    // The block is dropped without having been evicted.
    virtual void remove(Block block) = 0;

    // The last pin of a block that the policy has is gone.
    virtual void unpinned(Block block) = 0;

    // May throw.
    virtual void clear() = 0;
};

}  // namespace memlane::tiers
