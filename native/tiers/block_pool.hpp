// Which key is in which block: pins, reservations, eviction. No memory, only numbers. One thread at a time.
//
//   state      in the index  in the policy  pinned
//   free       no            no             no
//   reserved   yes, unseen   only a user's  no        until it is committed or given back
//   stored     yes           yes            0 or more
//   revoked    no            no             no        reserved, and forgotten meanwhile
//   forgotten  no            no             1 or more then free, or retired
//   spare      no            no             no        instead of a block that is evicted, which is aside then
//   aside      no            no             no        until somebody has stored its bytes elsewhere
//   retired    no            no             no        the medium refused it; until it is brought back
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "tiers/block_lists.hpp"
#include "tiers/block_map.hpp"
#include "tiers/key_store.hpp"
#include "tiers/policies.hpp"
#include "tiers/replay.hpp"
#include "tiers/tuned.hpp"
#include "tiers/tuner_feed.hpp"

namespace memlane::tiers {

struct PoolStatistics {
    std::uint64_t accesses = 0, hits = 0, prefix_hits = 0;
    std::uint64_t stored = 0, evicted = 0, declined = 0, dropped = 0;
    std::uint32_t used = 0, reserved = 0, pinned = 0, retired = 0;  // blocks, now
    std::uint32_t left_out = 0;  // tiers behind it that do not answer, now
};

class BlockPool {
public:
    struct Asked {
        Key hash;
        KeyStore::Bytes bytes;
    };

    BlockPool(std::uint32_t blocks, const std::string& policy)
        : name_(policy), index_(blocks), keys_(blocks), states_(blocks), pins_(blocks) {
        if (policy == "tuned") {
            tuner_ = std::make_unique<TunerFeed>(blocks);
            policy_ = std::make_unique<Tuned>(blocks, tuner_->choice());
        } else {
            policy_ = policy_named(policy, blocks);
        }
        for (Block block = blocks; block-- > 0;) free_.push_back(block);
    }

    // With a policy of the user's; there is no forecast then.
    BlockPool(std::uint32_t blocks, std::unique_ptr<Policy> policy)
        : policy_(std::move(policy)), index_(blocks), keys_(blocks), states_(blocks), pins_(blocks) {
        for (Block block = blocks; block-- > 0;) free_.push_back(block);
    }

    // A key that is stored from now on, or not found any more; "": none is.
    struct Change {
        std::string key;
        bool is_stored;
    };

    // What has changed since the last call, in that order. The first call only begins to note it.
    std::vector<Change> take_changes() {
        if (!changes_) changes_.emplace();
        return std::exchange(*changes_, {});
    }

    // Each key is accessed, the last first, so that the heads of prefixes outlive their tails. Pins the blocks of the
    // leading run of keys that are stored.
    std::vector<Block> pin(std::span<const Asked> asked) {
        const std::vector<Block> blocks = access(asked);
        std::vector<Block> run;
        for (const Block block : blocks) {
            if (block == kNoBlock) break;
            if (pins_[block]++ == 0) ++counts_.pinned;
            run.push_back(block);
        }
        counts_.prefix_hits += run.size();
        return run;
    }

    // They were pinned.
    void unpin(std::span<const Block> blocks) {
        for (const Block block : blocks) {
            if (--pins_[block] > 0) continue;
            --counts_.pinned;
            if (states_[block] == State::kForgotten) free(block);
            if (states_[block] == State::kStored) policy_->unpinned(block);
        }
    }

    // Pins a block, whatever it has: it is not used for another key until it is unpinned.
    void pin(Block block) noexcept {
        if (pins_[block]++ == 0) ++counts_.pinned;
    }

    // As an access, without a pin. Returns the blocks of those that are stored.
    std::vector<Block> touch(std::span<const Asked> asked) { return access(asked); }

    // What a call may use beside free blocks.
    struct Limits {
        std::size_t victims = SIZE_MAX;  // how many blocks it may evict
        bool may_use_retired = true;     // where there is no other block
    };

    // A block for each key that is not there, as far as they fit, the first keys first; kNoBlock for those that are skipped. The
    // policy is asked for the last key first, before it evicts any: as if each key had been stored alone, in that order.
    // `evicted` is called with the bytes of each key that makes room, and its block: that block is aside now if there were
    // spare ones, unless it is the block of a later key of the same call, whose victims are worth more.
    template <class Evicted>
    std::vector<Block> reserve(std::span<const Asked> asked, const Evicted& evicted, Limits limits) {
        std::vector<Block> blocks;
        blocks.reserve(asked.size());
        admissions_.resize(pins_.size());
        struct Settled {  // also if it throws
            BlockPool& pool;
            ~Settled() {
                pool.aside_.insert(pool.aside_.end(), pool.fresh_aside_.begin(), pool.fresh_aside_.end());
                pool.fresh_aside_.clear();
            }
        } const settled{*this};
        try {
            std::vector<std::optional<Admission>> admitted(asked.size());
            for (std::size_t at = asked.size(); at-- > 0;) {
                if (at >= kAhead) index_.prefetch(asked[at - kAhead].hash);
                if (index_.find(asked[at].hash) == kNoBlock) admitted[at] = policy_->admit(asked[at].hash);
            }
            for (std::size_t at = 0; at < asked.size(); ++at)
                blocks.push_back(reserve_one(asked[at], admitted[at], evicted, limits));
        } catch (...) {
            for (const Block block : blocks)
                if (block != kNoBlock) give_back(block);
            throw;
        }
        return blocks;
    }
    template <class Evicted>
    std::vector<Block> reserve(std::span<const Asked> asked, const Evicted& evicted) {
        return reserve(asked, evicted, Limits());
    }

    // Those whose mask is true are stored from now on; the others are free again. They were reserved together; the last is
    // stored first.
    void commit(std::span<const Block> blocks, std::span<const bool> mask) {
        for (std::size_t at = blocks.size(); at-- > 0;) {
            const Block block = blocks[at];
            if (states_[block] == State::kRevoked || !mask[at]) {
                give_back(block);
                continue;
            }
            --counts_.reserved;
            states_[block] = State::kStored;
            policy_->insert(index_.key_of(block), block, admissions_[block]);
            if (is_refused(block)) is_refused_[block] = false;
            note(block, true);
            ++counts_.stored;
        }
    }

    // They were reserved together, and none is stored.
    void give_back(std::span<const Block> blocks) {
        for (const Block block : blocks) give_back(block);
    }

    // Pins the block of each key that is stored; kNoBlock for the others. An access only if `touches`.
    std::vector<Block> pin_each(std::span<const Asked> asked, bool touches) {
        std::vector<Block> blocks;
        if (touches) {
            blocks = access(asked);
        } else {
            for (const Asked& key : asked) blocks.push_back(stored(key));
        }
        for (const Block block : blocks)
            if (block != kNoBlock && pins_[block]++ == 0) ++counts_.pinned;
        return blocks;
    }

    // Pins up to `most` stored blocks, the first of which is `next` or has a higher number; no access. Sets `next` to the
    // block after the last.
    std::vector<Block> pin_stored(Block& next, std::size_t most) {
        std::vector<Block> blocks;
        for (; next < states_.size() && blocks.size() < most; ++next) {
            if (states_[next] != State::kStored) continue;
            if (pins_[next]++ == 0) ++counts_.pinned;
            blocks.push_back(next);
        }
        return blocks;
    }

    // So many evicted blocks are lost: there was no spare block to keep them until they are stored elsewhere.
    void count_dropped(std::uint64_t blocks) noexcept { counts_.dropped += blocks; }

    // So many tiers behind the pool are not tried for now.
    void set_left_out(std::uint32_t tiers) noexcept { counts_.left_out = tiers; }

    // For an engine that asks for room first, and then stores whatever it likes: the key is stored and pinned, without
    // admission. False, and nothing has changed: no block is free, or the key is there.
    bool insert(const Asked& key) {
        if (index_.find(key.hash) != kNoBlock) return false;
        const Block block = take_free();
        if (block == kNoBlock) return false;
        Admission admission = policy_->admit(key.hash);
        if (admission == Admission::kDeclined) admission = Admission::kNew;
        give_key(block, key);
        states_[block] = State::kStored;
        policy_->insert(key.hash, block, admission);
        note(block, true);
        pins_[block] = 1;
        ++counts_.pinned;
        ++counts_.stored;
        return true;
    }

    // Makes so many free blocks spare, or as many as there are: `reserve` hands out a spare one in the place of each that it
    // evicts, whose bytes stay until it is spare again. Returns how many are.
    std::size_t set_aside(std::size_t count) {
        for (; spare_.size() > count; spare_.pop_back()) release(spare_.back());
        for (Block block; spare_.size() < count && (block = take_free()) != kNoBlock; ++counts_.reserved) {
            spare_.push_back(block);
            states_[block] = State::kSpare;
        }
        return spare_.size();
    }

    std::span<const Block> aside() const noexcept { return aside_; }
    bool is_aside(Block block) const noexcept { return states_[block] == State::kAside; }

    // Those that are aside are spare from now on.
    void reuse(std::span<const Block> blocks) {
        for (const Block block : blocks) {
            if (!is_aside(block)) continue;
            states_[block] = State::kSpare;
            spare_.push_back(block);
        }
        std::erase_if(aside_, [&](Block block) { return !is_aside(block); });
    }

    // The medium has refused the block: it is retired instead of free from the moment on that nobody has it.
    void retire(Block block) {
        is_refused_.resize(states_.size());
        is_refused_[block] = true;
    }
    // All that are free are retired.
    void retire_free() {
        for (const Block block : std::exchange(free_, {})) {
            retire(block);
            free(block);
        }
    }
    // True if the medium has refused the block since something was stored there.
    bool is_refused(Block block) const noexcept { return !is_refused_.empty() && is_refused_[block]; }
    // The block that has been retired for longest, if there is one, is the next to be used.
    void bring_back_one() {
        if (retired_.empty()) return;
        states_[retired_.front()] = State::kFree;
        free_.push_back(retired_.front());
        retired_.pop_front();
    }
    // All that are retired are free, to be used after all others.
    void bring_back() {
        for (const Block block : retired_) states_[block] = State::kFree;
        free_.insert(free_.begin(), retired_.rbegin(), retired_.rend());
        retired_.clear();
    }

    // Calls `evicted` with the key and the block of each of so many, none of them pinned or of `kept`. Unless there are as many:
    // then it returns false, and nothing has changed.
    template <class Evicted>
    bool evict(std::size_t count, std::span<const Asked> kept, const Evicted& evicted) {
        std::vector<Block> held = pin_each(kept, false);
        std::erase(held, kNoBlock);
        const PoolStatistics now = statistics();
        const bool is_possible = count <= now.used - now.pinned - now.reserved;
        for (std::size_t i = 0; is_possible && i < count; ++i) {
            const Block block = policy_->victim(Admission::kNew, pins_);
            evicted(keys_.of(block), block);
            note(block, false);
            index_.remove(index_.key_of(block));
            free(block);
            ++counts_.evicted;
        }
        unpin(held);
        return is_possible;
    }

    // When a key of an earlier life was last used, in any unit, and whether it had been found again since it was stored.
    struct Used {
        std::uint64_t at = 0;
        bool is_recent = false;
    };

    // Keys that were stored in an earlier life, in that order; of a key that comes twice the last counts. `uses` of each is
    // the order of eviction; empty: that of the stores. `last` are free blocks to use after all others, the first of them
    // first. The pool is empty.
    void restore(std::span<const Asked> asked, std::span<const Block> blocks, std::span<const Block> last,
                 std::span<const Used> uses = {}) {
        for (std::size_t at = 0; at < asked.size(); ++at) {
            if (at + kAhead < asked.size()) index_.prefetch(asked[at + kAhead].hash);
            if (const Block before = index_.find(asked[at].hash); before != kNoBlock) {
                index_.remove(asked[at].hash);
                states_[before] = State::kFree;
            }
            keys_.set(blocks[at], asked[at].bytes);
            index_.insert(asked[at].hash, blocks[at]);
            states_[blocks[at]] = State::kReserved;
        }
        std::vector<std::uint32_t> order(asked.size());
        std::iota(order.begin(), order.end(), 0u);
        if (!uses.empty()) std::ranges::stable_sort(order, {}, [&](std::uint32_t at) { return uses[at].at; });
        for (const std::uint32_t at : order) {
            const Block block = blocks[at];
            if (states_[block] != State::kReserved) continue;  // its key came twice
            if (!policy_->reserve(block)) {
                index_.remove(asked[at].hash);
                states_[block] = State::kFree;
                continue;
            }
            const bool is_recent = !uses.empty() && uses[at].is_recent;
            policy_->insert(asked[at].hash, block, is_recent ? Admission::kRecent : Admission::kNew);
            states_[block] = State::kStored;
        }
        free_.assign(last.rbegin(), last.rend());
        std::vector<bool> is_last(states_.size());
        for (const Block block : last) is_last[block] = true;
        for (auto block = static_cast<Block>(states_.size()); block-- > 0;)
            if (states_[block] == State::kFree && !is_last[block]) free_.push_back(block);
    }

    // Whatever is pinned or reserved stays with its holder, but is not found any more.
    void forget(std::span<const Asked> asked) {
        for (const Asked& key : asked) {
            const Block block = find(key);
            if (block == kNoBlock) continue;
            if (states_[block] == State::kStored) {
                policy_->remove(block);
                note(block, false);
            } else {
                policy_->give_back(block);
            }
            drop(block);
        }
    }

    void clear() {
        policy_->clear();
        for (auto& [more, replay] : forecasts_) replay.forget();
        for (Block block = 0; block < states_.size(); ++block) {
            if (states_[block] == State::kStored || states_[block] == State::kReserved) drop(block);
        }
        if (changes_) changes_->assign(1, {"", false});
    }

    PoolStatistics statistics() const noexcept {
        PoolStatistics now = counts_;
        now.retired = static_cast<std::uint32_t>(retired_.size());
        now.used = static_cast<std::uint32_t>(states_.size() - free_.size() - retired_.size());
        return now;
    }

    // What a pool with so many blocks more counts, from empty, since it was first asked for. Costs time in each access.
    Replay::Counts forecast(std::uint32_t more) {
        return forecasts_.try_emplace(more, name_, blocks() + more).first->second.counts();
    }

    KeyStore::Bytes key_of(Block block) const noexcept { return keys_.of(block); }
    bool is_stored(Block block) const noexcept { return states_[block] == State::kStored; }
    bool is_pinned(Block block) const noexcept { return pins_[block] > 0; }
    bool is_revoked(Block block) const noexcept { return states_[block] == State::kRevoked; }

    // The block of a stored key; kNoBlock if it is not there.
    Block stored(const Asked& key) const noexcept {
        const Block block = find(key);
        return block != kNoBlock && states_[block] == State::kStored ? block : kNoBlock;
    }

    bool has(Block block, KeyStore::Bytes key) const noexcept {
        return states_[block] == State::kStored && keys_.is(block, key);
    }
    // True if the key is stored, or being stored.
    bool knows(const Asked& key) const noexcept { return find(key) != kNoBlock; }
    // Nobody finds the key any more, if it is that block's.
    void forget(Block block, KeyStore::Bytes key) {
        if (!has(block, key)) return;
        policy_->remove(block);
        note(block, false);
        drop(block);
    }

    std::uint32_t blocks() const noexcept { return static_cast<std::uint32_t>(states_.size()); }
    TunerFeed* tuner() const noexcept { return tuner_.get(); }

private:
    static constexpr std::size_t kAhead = 8;  // memory is asked for so many keys before it is read

    enum class State : std::uint8_t { kFree, kReserved, kRevoked, kStored, kForgotten, kSpare, kAside, kRetired };

    // Reserved or stored. A key whose hash is another's is not there.
    Block find(const Asked& key) const noexcept {
        const Block block = index_.find(key.hash);
        return block != kNoBlock && keys_.is(block, key.bytes) ? block : kNoBlock;
    }

    std::vector<Block> access(std::span<const Asked> asked) {
        std::vector<Block> blocks(asked.size());
        for (std::size_t at = 0; at < asked.size(); ++at) {
            if (at + 2 * kAhead < asked.size()) index_.prefetch(asked[at + 2 * kAhead].hash);
            if (at + kAhead < asked.size()) prefetch(index_.likely(asked[at + kAhead].hash));
            blocks[at] = stored(asked[at]);
        }
        for (std::size_t at = asked.size(); at-- > 0;) {
            if (blocks[at] == kNoBlock) continue;
            policy_->touch(blocks[at]);
            ++counts_.hits;
        }
        counts_.accesses += asked.size();
        if (tuner_ || !forecasts_.empty()) watch(asked);
        return blocks;
    }

    void watch(std::span<const Asked> asked) {
        std::vector<Key> keys(asked.size());
        std::transform(asked.begin(), asked.end(), keys.begin(), [](const Asked& key) { return key.hash; });
        for (auto& [more, replay] : forecasts_) replay.request(keys);
        std::reverse(keys.begin(), keys.end());
        if (tuner_) tuner_->accessed(keys);
    }

    void prefetch(Block block) const noexcept {
        if (block == kNoBlock) return;
        index_.prefetch_key(block);
        keys_.prefetch(block);
        __builtin_prefetch(&states_[block]);
    }

    // `admitted`: nullopt if the key was there, and may have been evicted for one before it.
    template <class Evicted>
    Block reserve_one(const Asked& key, std::optional<Admission> admitted, const Evicted& evicted, Limits& limits) {
        if (index_.find(key.hash) != kNoBlock) return kNoBlock;
        const Admission admission = admitted ? *admitted : policy_->admit(key.hash);
        if (admission == Admission::kDeclined) {
            ++counts_.declined;
            return kNoBlock;
        }
        Block block = take_free();
        if (block == kNoBlock && limits.victims > 0 && (block = policy_->victim(admission, pins_, key.bytes)) != kNoBlock) {
            --limits.victims;
            evicted(keys_.of(block), block);
            note(block, false);
            index_.remove(index_.key_of(block));
            ++counts_.evicted;
            block = put_aside(block);
        }
        if (block == kNoBlock && limits.may_use_retired) {
            bring_back_one();
            block = take_free();
        }
        if (block == kNoBlock) return kNoBlock;
        give_key(block, key);
        states_[block] = State::kReserved;
        admissions_[block] = admission;
        ++counts_.reserved;
        bool is_wanted = false;
        try {
            is_wanted = policy_->reserve(block);
        } catch (...) {
            release(block);
            throw;
        }
        if (is_wanted) return block;
        ++counts_.declined;
        release(block);
        return kNoBlock;
    }

    void note(Block block, bool is_stored) {
        if (!changes_) return;
        const KeyStore::Bytes key = keys_.of(block);
        changes_->push_back({std::string(reinterpret_cast<const char*>(key.data()), key.size()), is_stored});
    }

    // The block to use instead of one that was evicted.
    Block put_aside(Block evicted) {
        Block instead;
        if (!spare_.empty()) {
            instead = spare_.back();
            spare_.pop_back();
        } else if (!fresh_aside_.empty()) {
            instead = fresh_aside_.front();
            fresh_aside_.pop_front();
        } else {
            return evicted;
        }
        states_[evicted] = State::kAside;
        fresh_aside_.push_back(evicted);
        return instead;
    }

    // The policy has forgotten it.
    void drop(Block block) {
        index_.remove(index_.key_of(block));
        if (states_[block] == State::kStored) return free(block);
        states_[block] = State::kRevoked;
    }

    void give_back(Block block) {
        if (states_[block] == State::kReserved) policy_->give_back(block);
        release(block);
    }

    // A block that is reserved or spare, which the policy does not know.
    void release(Block block) {
        if (states_[block] == State::kReserved) index_.remove(index_.key_of(block));
        --counts_.reserved;
        free(block);
    }

    // Throws if there is no memory; the block is free again then.
    void give_key(Block block, const Asked& key) {
        try {
            keys_.set(block, key.bytes);
            index_.insert(key.hash, block);
        } catch (...) {
            free(block);
            throw;
        }
    }

    // kNoBlock: there is none. Those that are pinned are free again once they are not.
    Block take_free() {
        while (!free_.empty()) {
            const Block block = free_.back();
            free_.pop_back();
            if (pins_[block] == 0) return block;
            states_[block] = State::kForgotten;
        }
        return kNoBlock;
    }

    void free(Block block) {
        if (pins_[block] > 0) {
            states_[block] = State::kForgotten;
        } else if (is_refused(block)) {
            states_[block] = State::kRetired;
            retired_.push_back(block);
        } else {
            states_[block] = State::kFree;
            free_.push_back(block);
        }
    }

    std::string name_;  // of the policy
    std::unique_ptr<TunerFeed> tuner_;
    std::unique_ptr<Policy> policy_;
    std::map<std::uint32_t, Replay> forecasts_;  // by how many blocks more
    BlockMap index_;
    KeyStore keys_;
    std::vector<State> states_;
    std::vector<std::uint32_t> pins_;
    std::vector<Admission> admissions_;  // of reserved blocks
    std::vector<Block> free_;
    std::vector<Block> spare_;
    std::vector<Block> aside_;
    std::deque<Block> retired_;  // the first of them for longest
    std::vector<bool> is_refused_;  // of each block; empty: none ever was
    std::deque<Block> fresh_aside_;  // of this call, the oldest first
    std::optional<std::vector<Change>> changes_;  // nullopt: nobody asks
    PoolStatistics counts_;
};

}  // namespace memlane::tiers
