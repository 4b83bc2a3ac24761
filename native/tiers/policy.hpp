// What a pool asks an eviction policy. Blocks are named by their numbers, keys by their hashes.
//
//   an access            accessed(key)
//   a hit               touch(block)
//   a miss to store     a = admit(key); if the pool is full, victim(a, pins), which leaves; insert(key, block, a)
#pragma once

#include <cstdint>

#include "tiers/block_lists.hpp"
#include "tiers/block_map.hpp"

namespace memlane::tiers {

// Whether a key should be stored, and what the policy knows of it.
enum class Admission : std::uint8_t {
    kDeclined,
    kNew,
    kRecent,    // evicted not long ago
    kFrequent,  // evicted not long ago, and was used often
};

class Policy {
public:
    virtual ~Policy() = default;

    virtual void touch(Block block) = 0;

    // Of a key that is not there. Learns from the miss.
    virtual Admission admit(Key key) = 0;

    // The block to evict for it; the policy forgets the block. kNoBlock if all are pinned.
    virtual Block victim(Admission incoming, Pins pins) = 0;

    // The block is not in the policy.
    virtual void insert(Key key, Block block, Admission admission) = 0;

    // The block is dropped without having been evicted.
    virtual void remove(Block block) = 0;

    // The last pin of a block that the policy has is gone.
    virtual void unpinned(Block block) = 0;

    virtual void clear() = 0;
};

}  // namespace memlane::tiers
