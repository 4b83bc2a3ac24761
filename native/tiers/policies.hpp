// Eviction policies of the literature, and the family that the tuned policy chooses from.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tiers/block_lists.hpp"
#include "tiers/ghost_list.hpp"
#include "tiers/policy.hpp"
#include "tiers/recent_keys.hpp"

namespace memlane::tiers {

// The oldest block of `first` that is not pinned, else of `second`, and its list; kNoBlock if all are pinned.
inline std::pair<Block, BlockLists::List> oldest_of(BlockLists& lists, BlockLists::List first, BlockLists::List second,
                                                    Pins pins) noexcept {
    const Block block = lists.oldest(first, pins);
    return block != kNoBlock ? std::pair{block, first} : std::pair{lists.oldest(second, pins), second};
}

// The least recently used block goes.
class Lru : public Policy {
public:
    explicit Lru(std::uint32_t blocks) : lists_(blocks, 1) {}

    void touch(Block block) override { lists_.move(0, block); }
    Admission admit(Key) override { return Admission::kNew; }
    Block victim(Admission, Pins pins) override {
        const Block block = lists_.oldest(0, pins);
        if (block != kNoBlock) lists_.remove(block);
        return block;
    }
    void insert(Key, Block block, Admission) override { lists_.push(0, block); }
    void remove(Block block) override { lists_.remove(block); }
    void unpinned(Block block) override { lists_.unpinned(block); }
    void clear() override { lists_.clear(); }

protected:
    std::uint32_t size() const noexcept { return lists_.size(0); }

private:
    BlockLists lists_;
};

// ARC, as in figure 4 of Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST '03.
class Arc final : public Policy {
public:
    explicit Arc(std::uint32_t blocks)
        : blocks_(blocks), lists_(blocks, 2), keys_(blocks), ghosts_{GhostList(blocks), GhostList(blocks)} {}

    void prefetch(Key key) const noexcept override {
        for (const GhostList& ghosts : ghosts_) ghosts.prefetch(key);
    }
    void touch(Block block) override { lists_.move(kFrequent, block); }

    Admission admit(Key key) override {
        const double recent = ghosts_[kRecent].size(), frequent = ghosts_[kFrequent].size();
        if (ghosts_[kRecent].take(key)) {
            target_ = std::min<double>(target_ + std::max(frequent / recent, 1.0), blocks_);
            return Admission::kRecent;
        }
        if (ghosts_[kFrequent].take(key)) {
            target_ = std::max<double>(target_ - std::max(recent / frequent, 1.0), 0);
            return Admission::kFrequent;
        }
        make_room();
        return Admission::kNew;
    }

    Block victim(Admission incoming, Pins pins) override {
        const std::uint32_t recent = lists_.size(kRecent);
        const bool keeps_no_ghost = incoming == Admission::kNew && recent == blocks_;
        const bool is_recent =
            recent > 0 && (keeps_no_ghost || recent > target_ || (incoming == Admission::kFrequent && recent == target_));
        const auto [block, list] = oldest_of(lists_, is_recent ? kRecent : kFrequent, is_recent ? kFrequent : kRecent, pins);
        if (block == kNoBlock) return block;
        if (!keeps_no_ghost) ghosts_[list].push(keys_[block]);
        lists_.remove(block);
        return block;
    }

    void insert(Key key, Block block, Admission admission) override {
        keys_[block] = key;
        lists_.push(admission == Admission::kNew ? kRecent : kFrequent, block);
    }

    void remove(Block block) override { lists_.remove(block); }
    void unpinned(Block block) override { lists_.unpinned(block); }
    void clear() override {
        lists_.clear();
        for (GhostList& ghosts : ghosts_) ghosts.clear();
        target_ = 0;
    }

    double target() const noexcept { return target_; }

private:
    static constexpr BlockLists::List kRecent = 0, kFrequent = 1;  // T1 and T2; their ghosts are B1 and B2

    // Case IV: the key is nowhere. Where no ghost is to go, the oldest recent block leaves without one. A pool inserts many
    // blocks after it has made room for all of them, so there may be more than in the paper.
    void make_room() {
        const std::uint64_t recent = lists_.size(kRecent), frequent = lists_.size(kFrequent);
        GhostList &recently = ghosts_[kRecent], &frequently = ghosts_[kFrequent];
        if (recent + recently.size() >= blocks_) {
            while (recently.size() > 0 && recent + recently.size() >= blocks_) recently.drop_oldest();
        } else {
            const std::uint64_t others = recent + frequent + recently.size();
            while (frequently.size() > 0 && others + frequently.size() >= 2 * std::uint64_t{blocks_}) frequently.drop_oldest();
        }
    }

    std::uint32_t blocks_;
    BlockLists lists_;
    std::vector<Key> keys_;
    GhostList ghosts_[2];
    double target_ = 0;  // p: how many blocks the recent ones should have
};

// S3-FIFO: Yang et al., "FIFO queues are all you need for cache eviction", SOSP '23.
class S3Fifo final : public Policy {
public:
    explicit S3Fifo(std::uint32_t blocks)
        : small_(std::max(blocks / 10, 1u)), lists_(blocks, 2), keys_(blocks), uses_(blocks), ghosts_(blocks - blocks / 10) {}

    void touch(Block block) override { uses_[block] = std::min<std::uint8_t>(static_cast<std::uint8_t>(uses_[block] + 1), 3); }

    Admission admit(Key key) override {
        return ghosts_.take(key) ? Admission::kRecent : Admission::kNew;
    }

    Block victim(Admission, Pins pins) override {
        Block block = kNoBlock;
        if (lists_.size(kSmall) >= small_) block = from_small(pins);
        if (block == kNoBlock) block = from_main(pins);
        if (block == kNoBlock) block = from_small(pins);
        return block;
    }

    void insert(Key key, Block block, Admission admission) override {
        keys_[block] = key;
        uses_[block] = 0;
        lists_.push(admission == Admission::kNew ? kSmall : kMain, block);
    }

    void remove(Block block) override { lists_.remove(block); }
    void unpinned(Block block) override { lists_.unpinned(block); }
    void clear() override {
        lists_.clear();
        ghosts_.clear();
    }

private:
    static constexpr BlockLists::List kSmall = 0, kMain = 1;

    Block from_small(Pins pins) {
        for (Block block; (block = lists_.oldest(kSmall, pins)) != kNoBlock;) {
            if (uses_[block] > 1) {
                lists_.move(kMain, block);
                continue;
            }
            ghosts_.push(keys_[block]);
            lists_.remove(block);
            return block;
        }
        return kNoBlock;
    }

    Block from_main(Pins pins) {
        for (Block block; (block = lists_.oldest(kMain, pins)) != kNoBlock;) {
            if (uses_[block] > 0) {
                --uses_[block];
                lists_.move(kMain, block);
                continue;
            }
            lists_.remove(block);
            return block;
        }
        return kNoBlock;
    }

    std::uint32_t small_;
    BlockLists lists_;
    std::vector<Key> keys_;
    std::vector<std::uint8_t> uses_;
    GhostList ghosts_;
};

// A FIFO on probation, a protected LRU, and the ghosts of both: what two-segment policies have in common.
class Segments {
public:
    static constexpr BlockLists::List kProbation = 0, kProtected = 1;

    Segments(std::uint32_t blocks, std::uint32_t most_ghosts) : ghosts(most_ghosts), lists_(blocks, 2), keys_(blocks) {}

    void touch(Block block) noexcept { lists_.move(kProtected, block); }

    // `probation`: how many blocks it may keep while the protected segment has some.
    Block victim(std::uint32_t probation, Pins pins) {
        const std::uint32_t on_probation = lists_.size(kProbation);
        const bool is_first = on_probation > 0 && (on_probation >= probation || lists_.size(kProtected) == 0);
        const auto [block, list] =
            oldest_of(lists_, is_first ? kProbation : kProtected, is_first ? kProtected : kProbation, pins);
        if (block == kNoBlock) return block;
        ghosts.push(keys_[block]);
        lists_.remove(block);
        return block;
    }

    void insert(Key key, Block block, bool is_protected) {
        keys_[block] = key;
        lists_.push(is_protected ? kProtected : kProbation, block);
    }

    void remove(Block block) noexcept { lists_.remove(block); }
    void unpinned(Block block) noexcept { lists_.unpinned(block); }
    void clear() {
        lists_.clear();
        ghosts.clear();
    }

    std::uint32_t size() const noexcept { return lists_.size(kProbation) + lists_.size(kProtected); }

    RecentKeys ghosts;

private:
    BlockLists lists_;
    std::vector<Key> keys_;
};

// New blocks are on probation, `share` of all; 0: they are declined. Whoever comes back is protected.
class TwoSegment final : public Policy {
public:
    TwoSegment(std::uint32_t blocks, double share, std::uint32_t ghosts)
        : declines_(share == 0), probation_(static_cast<std::uint32_t>(share * blocks)), segments_(blocks, ghosts) {}

    void prefetch(Key key) const noexcept override { segments_.ghosts.prefetch(key); }
    void touch(Block block) override { segments_.touch(block); }

    Admission admit(Key key) override {
        if (segments_.ghosts.take(key) != RecentKeys::kAbsent) return Admission::kRecent;
        if (!declines_) return Admission::kNew;
        segments_.ghosts.push(key);
        return Admission::kDeclined;
    }

    Block victim(Admission, Pins pins) override { return segments_.victim(probation_, pins); }
    void insert(Key key, Block block, Admission admission) override {
        segments_.insert(key, block, admission == Admission::kRecent);
    }
    void remove(Block block) override { segments_.remove(block); }
    void unpinned(Block block) override { segments_.unpinned(block); }
    void clear() override { segments_.clear(); }

private:
    bool declines_;
    std::uint32_t probation_;
    Segments segments_;
};

// Chooses the misses in a full cache that are admitted: one in `kEvery`. Then a loop over more than fits finds what is there, while
// every other policy here drops each block shortly before it is wanted; and where that loop has ended, another takes its
// place. After the bimodal insertion of Qureshi et al., "Adaptive insertion policies for high performance caching", ISCA '07.
class RareAdmission {
public:
    static constexpr std::uint32_t kEvery = 32;

    bool admits(bool is_full) noexcept { return !is_full || ++misses_ % kEvery == 0; }

private:
    std::uint32_t misses_ = 0;
};

// LRU, but most of what is new is declined.
class Rare final : public Lru {
public:
    explicit Rare(std::uint32_t blocks) : Lru(blocks), blocks_(blocks) {}

    Admission admit(Key) override {
        return admission_.admits(size() == blocks_) ? Admission::kNew : Admission::kDeclined;
    }

private:
    std::uint32_t blocks_;
    RareAdmission admission_;
};

// "lru", "arc" or "s3fifo".
inline std::unique_ptr<Policy> policy_named(const std::string& name, std::uint32_t blocks) {
    if (name == "lru") return std::make_unique<Lru>(blocks);
    if (name == "arc") return std::make_unique<Arc>(blocks);
    if (name == "s3fifo") return std::make_unique<S3Fifo>(blocks);
    throw std::invalid_argument("no policy is called " + name);
}

}  // namespace memlane::tiers
