// The disk tier: which block is in which slot, what is under way, and what to report. One thread at a time, which reads and
// writes nothing: the disk may not answer, so that is done by the threads of DiskIo.
//
// A slot that is being written is reserved in the pool, one that is being read, or whose header is being erased, is pinned,
// until the system is done with it, which may be later than the report.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "os/clock.hpp"
#include "tiers/block_jobs.hpp"
#include "tiers/block_pool.hpp"
#include "tiers/disk_io.hpp"
#include "tiers/refusals.hpp"
#include "tiers/slot_ages.hpp"

namespace memlane::tiers {

struct DiskCounts {
    std::uint64_t recovered = 0, stored = 0, loaded = 0, missed = 0, declined = 0;
    std::uint64_t lookups = 0, found = 0;
    std::uint64_t stalled = 0;   // looks that found it so,
    std::uint64_t unerased = 0;  // and that found that it does not erase
    std::map<std::pair<Direction, int>, std::uint64_t> refused{};  // blocks that the system refused to write or read, by errno
};

class DiskTier {
public:
    using Ticket = std::uint64_t;
    using Keys = std::span<const BlockPool::Asked>;  // digests, all different

    struct Done {
        Ticket ticket;
        std::vector<bool> ok;  // of each key
        Fault fault;           // the first
        std::uint64_t bytes;
        os::Nanoseconds span;
    };

    // `pool` has as many blocks as there are slots, and is empty. `oldest`: seconds after which a block is a miss; 0: none.
    DiskTier(DiskIo& io, BlockPool& pool, std::uint32_t oldest = 0)
        : io_(io), pool_(pool), ages_(pool.blocks(), oldest), emptied_(io.file().first_sequence_at_open()) {}

    // What an earlier life has left, in the order in which it was stored.
    void restore(Keys keys, std::span<const SlotFile::Slots::Kept> found, std::span<const Block> last) {
        std::vector<Block> slots;
        std::vector<BlockPool::Used> uses;
        for (const SlotFile::Slots::Kept& each : found) {
            slots.push_back(each.slot);
            uses.push_back({each.use.at, each.use.hits > 0});
            ages_.stored(each.slot, each.stored);
        }
        if (pool_.tuner() != nullptr && io_.file().tuner()) pool_.tuner()->restore(*io_.file().tuner());
        pool_.restore(keys, slots, last, uses);
        counts_.recovered = pool_.statistics().used;
        if (counts_.recovered == slots.size()) return;
        for (std::size_t at = 0; at < slots.size(); ++at)  // of a key that came twice, or that the policy declined
            if (!pool_.has(slots[at], keys[at].bytes)) erase(slots[at], digest_of(keys[at]));
    }

    // Before each call that changes something. Throws what the policy throws.
    void notice_emptied() {
        const std::uint64_t now = io_.file().first_sequence();
        if (now == emptied_) return;
        pool_.clear();
        former_.clear();
        emptied_ = now;
    }

    bool has(const BlockPool::Asked& key) const noexcept {
        if (is_stalled() || io_.file().first_sequence() != emptied_) return false;
        const Block slot = pool_.stored(key);
        const bool is_old = slot != kNoBlock && ages_.has_limit() && ages_.is_old(slot, now_in_seconds());
        return slot != kNoBlock && (!is_old || pool_.is_pinned(slot));
    }
    // A request has asked for so many keys, some of which were there.
    void count_lookups(const std::vector<bool>& there) noexcept {
        counts_.lookups += there.size();
        counts_.found += static_cast<std::uint64_t>(std::ranges::count(there, true));
    }

    // Pins what is there; kNoBlock for the others.
    std::vector<Block> hold(Keys keys) {
        if (is_stalled()) return std::vector<Block>(keys.size(), kNoBlock);
        drop_old(keys);
        return pool_.pin_each(keys, false);
    }
    void release(std::span<const Block> blocks) { pool_.unpin(blocks); }

    // An access of each key only if `is_access`. If the policy throws, nothing is stored; what it has evicted by then is gone.
    Ticket store(Keys keys, std::span<const Block> rows, os::Deadline deadline, bool is_access) {
        const auto job = begin(keys.size(), true);
        job->deadline = deadline;
        if (is_stalled()) return refuse(job);
        drop_old(keys);
        const std::vector<Block> blocks = reserve(keys, is_access);
        for (std::size_t at = 0; at < keys.size(); ++at) {
            if (blocks[at] != kNoBlock) continue;
            if (pool_.stored(keys[at]) != kNoBlock) {
                job->ok[at] = true;
            } else if (const auto earlier = storing_.find(digest_of(keys[at])); earlier != storing_.end()) {
                earlier->second.job->followers.push_back({earlier->second.of, job, at});
                ++job->awaited;
            } else if (pool_.knows(keys[at])) {
                job->fault = {Fault::Kind::expired};  // an earlier call was late with it, and the system is still at it
            } else {
                ++counts_.declined;  // by the policy, or all slots are held, or the disk refuses writes
                if (refusals_.is_distrusted()) job->fault = last_refusal_;
            }
        }
        try {
            submit(job, keys, blocks, rows, deadline);
        } catch (...) {
            pool_.give_back(job->slots);
            throw;
        }
        if (job->awaited > 0) {
            following_.emplace(deadline.at(), job);
            io_.work().set_also(next_of_followers());
        }
        for (std::size_t i = 0; i < job->digests.size(); ++i) storing_[job->digests[i]] = {job, i};
        return job->ticket;
    }

    Ticket load(Keys keys, std::span<const Block> rows, os::Deadline deadline) {
        const auto job = begin(keys.size(), false);
        if (is_stalled()) return refuse(job);
        drop_old(keys);
        const std::vector<Block> blocks = pool_.pin_each(keys, true);
        io_.file().note_uses(blocks, false);
        counts_.missed += static_cast<std::uint64_t>(std::ranges::count(blocks, kNoBlock));
        try {
            submit(job, keys, blocks, rows, deadline);
        } catch (...) {
            pool_.unpin(job->slots);
            throw;
        }
        return job->ticket;
    }

    void touch(Keys keys) {
        drop_old(keys);
        io_.file().note_uses(pool_.touch(keys), false);
    }

    using OrderRef = HeaderWork::OrderRef;

    // They are not found any more; once the order is done, by a restart neither, also if an earlier order was late or the disk
    // refused it. What the system is writing just now is erased by its thread.
    OrderRef forget(Keys keys) {
        collect();
        const auto order = std::make_shared<HeaderWork::Order>();
        if (!io_.headers().is_idle()) io_.headers().follow(order);
        if (io_.headers().empty_again(order)) io_.work().note_idle(false);
        forget_former(keys, order);
        for (const BlockPool::Asked& key : keys) {
            Block slot = pool_.stored(key);
            if (const auto under_way = storing_.find(digest_of(key)); under_way != storing_.end()) {
                const auto& [job, of] = under_way->second;
                if (io_.work().forget(job->work, of)) slot = job->slots[of];
            }
            if (slot != kNoBlock) erase(slot, digest_of(key), order);
        }
        pool_.forget(keys);
        return order;
    }

    // Throws what the policy throws, and then nothing has changed. Nothing is found; once the order is done, by a restart neither.
    OrderRef clear() {
        pool_.clear();
        former_.clear();
        const auto order = std::make_shared<HeaderWork::Order>();
        io_.work().note_idle(false);
        io_.headers().clear(order);
        emptied_ = io_.file().first_sequence();
        return order;
    }

    // Writes when slots were used, for a restart, if anything is new there. Nothing is lost but that if it fails.
    OrderRef keep_uses() {
        const auto order = std::make_shared<HeaderWork::Order>();
        if (!io_.file().has_new_uses() || is_stalled() || io_.headers().is_stalled()) return order;
        io_.work().note_idle(false);
        io_.headers().keep_uses(pool_.tuner() != nullptr ? pool_.tuner()->choice()->state() : TunerState(), order);
        uses_kept_ = os::monotonic_now();
        return order;
    }

    // Takes in what the threads have done.
    void collect() {
        if (os::monotonic_now() - uses_kept_ > kKeepsUses) keep_uses();
        drop_old({});
        std::vector<Block> erased;
        for (const auto& [slot, is_erased] : io_.headers().take_back()) {
            erased.push_back(slot);
            if (const auto found = former_.find(slot); is_erased && found != former_.end() && !found->second.by.job) former_.erase(found);
        }
        pool_.unpin(erased);
        for (const BlockJobs::Event& event : io_.work().poll()) {
            const std::shared_ptr<Job> job = jobs_.at(event.id);
            if (event.is_report) decide(job, event);
            if (event.is_over) {
                late_.erase(event.id);
                jobs_.erase(event.id);
                release_late(*job, event);
            } else {
                late_.emplace(event.id, os::monotonic_now());
            }
        }
        io_.work().note_idle(is_idle());
        if (!following_.empty()) expire_followers(os::monotonic_now());
        if (is_stalled()) ++counts_.stalled;
        if (io_.headers().is_stalled()) ++counts_.unerased;
    }
    bool has_done() const noexcept { return !done_.empty(); }

    // The next report; nullopt: there is none.
    std::optional<Done> take_done() {
        if (done_.empty()) return std::nullopt;
        std::optional<Done> first(std::move(done_.front()));
        done_.pop_front();
        return first;
    }
    // One that was taken and has not reached the caller.
    void put_back(Done done) { done_.push_front(std::move(done)); }
    bool is_idle() const { return jobs_.empty() && io_.headers().is_idle(); }

    // The ticket of the latest store or load; 0: there was none.
    Ticket last() const noexcept { return last_; }

    // The system has been at some block for a second since it was reported as late.
    bool is_stalled() const noexcept {
        if (late_.empty()) return false;
        const auto longest = std::ranges::min_element(late_, {}, [](const auto& late) { return late.second; });
        return os::monotonic_now() - longest->second > kStall;
    }
    const DiskCounts& counts() const noexcept { return counts_; }

private:
    static constexpr os::Nanoseconds kStall = os::kSecond;
    static constexpr os::Nanoseconds kKeepsUses = 60 * os::kSecond;  // at most so often
    static constexpr int kLooks = 64;  // slots whose age is looked at in a call

    struct Job;
    struct Follower {
        std::size_t of;  // the block of the earlier call
        std::shared_ptr<Job> job;
        std::size_t at;
    };
    // A call, until it is reported and its slots are nobody's.
    struct Job {
        Ticket ticket;
        bool is_store;
        std::vector<bool> ok;
        std::vector<std::size_t> at{};  // of the blocks that go to the disk: the place of the key,
        std::vector<Digest> digests{};  // its digest,
        std::vector<Block> slots{};     // and its slot
        std::vector<Block> late{};      // slots of blocks that missed the deadline
        std::size_t awaited = 0;        // keys that an earlier call stores
        std::vector<Follower> followers{};
        BlockJobs::Ref work{};          // of those blocks, if there are any
        os::Nanoseconds begun = os::monotonic_now();
        os::Deadline deadline = os::Deadline::never();
        bool is_decided = false;
        Fault fault{};
        os::Nanoseconds span = 0;
    };

    struct Storing {
        std::shared_ptr<Job> job;
        std::size_t of;  // its block
    };

    // What the header of a slot may still have: of a block that was evicted or removed; and the last store that got the slot.
    struct Former {
        Digest digest;
        Storing by;
    };

    struct DigestHash {
        std::size_t operator()(const Digest& digest) const noexcept {
            std::size_t hash;
            std::memcpy(&hash, digest.data(), sizeof hash);
            return hash;
        }
    };

    static Digest digest_of(KeyStore::Bytes key) noexcept {
        Digest digest;
        std::memcpy(digest.data(), key.data(), digest.size());
        return digest;
    }
    static Digest digest_of(const BlockPool::Asked& key) noexcept { return digest_of(key.bytes); }

    static std::uint32_t now_in_seconds() noexcept {
        return static_cast<std::uint32_t>(os::monotonic_now(CLOCK_REALTIME) / os::kSecond);
    }

    // What is too old of these keys, and of some slots in turn, is not there any more, also for a restart; but for what is
    // pinned, which goes once it is not.
    void drop_old(Keys keys) {
        if (!ages_.has_limit()) return;
        const std::uint32_t now = now_in_seconds();
        const auto drop = [&](Block slot) {
            if (slot == kNoBlock || !ages_.is_old(slot, now) || !pool_.is_stored(slot) || pool_.is_pinned(slot)) return;
            erase(slot, digest_of(pool_.key_of(slot)));
            pool_.forget(slot, pool_.key_of(slot));
        };
        for (const BlockPool::Asked& key : keys) drop(pool_.stored(key));
        for (int looks = 0; looks < kLooks; ++looks) drop(ages_.next());
    }

    std::shared_ptr<Job> begin(std::size_t keys, bool is_store) {
        return std::make_shared<Job>(Job{++last_, is_store, std::vector<bool>(keys)});
    }

    Ticket refuse(const std::shared_ptr<Job>& job) {
        job->fault = {Fault::Kind::stalled};
        finish(*job);
        return job->ticket;
    }

    void submit(const std::shared_ptr<Job>& job, Keys keys, std::span<const Block> blocks, std::span<const Block> rows,
                os::Deadline deadline) {
        std::vector<BlockRequest> requests;
        for (std::size_t at = 0; at < keys.size(); ++at) {
            if (blocks[at] == kNoBlock) continue;
            const Digest digest = digest_of(keys[at]);
            job->at.push_back(at);
            job->digests.push_back(digest);
            job->slots.push_back(blocks[at]);
            BlockRequest request{blocks[at], rows[at], {}};
            request.header.digest = digest;
            if (job->is_store) {
                request.header = io_.file().next_header(digest);
                ages_.stored(blocks[at], request.header.stored);
            }
            requests.push_back(request);
        }
        if (job->is_store) io_.file().note_uses(job->slots, true);
        if (requests.empty()) {
            job->is_decided = true;
            return settle(*job);
        }
        const Direction direction = job->is_store ? Direction::store : Direction::load;
        job->work = io_.work().submit(direction, std::move(requests), deadline);
        io_.work().note_idle(false);
        jobs_.emplace(job->work->id, job);
        if (!job->is_store || former_.empty()) return;
        for (std::size_t i = 0; i < job->slots.size(); ++i)
            if (const auto found = former_.find(job->slots[i]); found != former_.end()) found->second.by = {job, i};
    }

    void decide(const std::shared_ptr<Job>& job, const BlockJobs::Event& event) {
        std::vector<Block> decided;
        const std::unique_ptr<bool[]> good(new bool[job->slots.size()]());
        for (std::size_t i = 0; i < job->slots.size(); ++i) {
            const Fault fault = event.faults[i];
            const bool is_good = fault.kind == Fault::Kind::none;
            job->ok[job->at[i]] = is_good;
            if (!is_good && job->fault.kind == Fault::Kind::none) job->fault = fault;
            if (fault.kind == Fault::Kind::expired) {
                job->late.push_back(job->slots[i]);
                continue;
            }
            if (job->is_store) former_.erase(job->slots[i]);
            if (!job->is_store && fault.kind == Fault::Kind::missing) ++counts_.missed;  // another block's header, or none
            judge(*job, i, fault);
            if (is_good && job->is_store && pool_.is_revoked(job->slots[i])) {
                job->ok[job->at[i]] = false;  // what was forgotten while it was stored is not there, also after a restart
                erase(job->slots[i], job->digests[i]);
            }
            good[decided.size()] = job->ok[job->at[i]];
            decided.push_back(job->slots[i]);
        }
        job->span = event.span;
        job->is_decided = true;
        if (job->is_store) {
            pool_.commit(decided, {good.get(), decided.size()});
            for (const Digest& digest : job->digests) {
                const auto found = storing_.find(digest);
                if (found != storing_.end() && found->second.job == job) storing_.erase(found);
            }
            answer_followers(*job, event);
        } else {
            pool_.unpin(decided);
            for (std::size_t i = 0; i < job->slots.size(); ++i) drop_if_bad(*job, i, event.faults[i]);
        }
        (job->is_store ? counts_.stored : counts_.loaded) += moved(*job);
        settle(*job);
    }

    // A slot that the system refuses is not used again soon.
    void judge(const Job& job, std::size_t i, Fault fault) {
        const Block slot = job.slots[i];
        const bool was_refused = pool_.is_refused(slot);
        if (fault.kind == Fault::Kind::system) {
            const Direction direction = job.is_store ? Direction::store : Direction::load;
            ++counts_.refused[{direction, fault.error}];
            pool_.retire(slot);
            if (!job.is_store) return refusals_.read_refused(os::monotonic_now());
            last_refusal_ = fault;
            if (refusals_.refused(was_refused, os::monotonic_now())) pool_.retire_free();
        } else if (fault.kind == Fault::Kind::none && job.is_store) {
            refusals_.succeeded(was_refused);
            if (was_refused) pool_.bring_back();
        }
    }

    // A slot whose block was forgotten has no valid header, or a restart would find it. If the disk refuses, it may.
    void erase(Block slot, const OrderRef& order, std::optional<DiskWork::Work> held_back = std::nullopt) {
        pool_.pin(slot);
        io_.work().note_idle(false);
        io_.headers().erase(slot, order, std::move(held_back));
    }
    void erase(Block slot, const Digest& digest, const OrderRef& order = std::make_shared<HeaderWork::Order>()) {
        former_.insert_or_assign(slot, Former{digest, {}});
        erase(slot, order);
    }

    // After an eviction or a removal, a restart may still find what nobody has written over.
    void forget_former(Keys keys, const OrderRef& order) {
        if (former_.empty()) return;
        std::unordered_set<Digest, DigestHash> digests;
        for (const BlockPool::Asked& key : keys) digests.insert(digest_of(key));
        for (const auto& [slot, former] : former_) {
            if (!digests.contains(former.digest)) continue;
            using Before = DiskWork::Before;
            const auto& [job, of] = former.by;
            const Before before = job ? io_.work().hold_back(job->work, of) : Before::is_left;
            if (before == Before::is_left) erase(slot, order);
            if (before == Before::is_held_back) erase(slot, order, DiskWork::Work{job->work, of});
        }
    }

    // As the pool does; but the call evicts nothing that it asks for.
    std::vector<Block> reserve(Keys keys, bool is_access) {
        std::vector<Block> held = pool_.pin_each(keys, is_access);
        std::erase(held, kNoBlock);
        if (is_access) io_.file().note_uses(held, false);
        struct Unpin {
            BlockPool& pool;
            std::vector<Block>& blocks;
            ~Unpin() { pool.unpin(blocks); }
        } unpin{pool_, held};
        const Refusals::Trial trial = refusals_.next(os::monotonic_now());
        if (trial == Refusals::Trial::retired) pool_.bring_back_one();
        BlockPool::Limits limits;
        if (refusals_.is_distrusted()) limits = {.victims = trial == Refusals::Trial::victim, .may_use_retired = false};
        const auto evicted = [&](KeyStore::Bytes key, Block slot) { former_[slot] = {digest_of(key), {}}; };
        return pool_.reserve(keys, evicted, limits);
    }

    // What cannot be loaded must not be found again, or its user asks for ever.
    void drop_if_bad(const Job& job, std::size_t i, Fault fault) {
        if (fault.kind == Fault::Kind::none || fault.kind == Fault::Kind::expired) return;
        if (!pool_.has(job.slots[i], job.digests[i])) return;
        erase(job.slots[i], job.digests[i]);
        pool_.forget(job.slots[i], job.digests[i]);
    }

    os::Deadline next_of_followers() const noexcept {
        return following_.empty() ? os::Deadline::never() : following_.begin()->second->deadline;
    }

    // Those that wait for an earlier call longer than they may.
    void expire_followers(os::Nanoseconds now) {
        while (!following_.empty()) {
            const std::shared_ptr<Job> job = following_.begin()->second;
            if (job->awaited > 0 && !job->deadline.passed(now)) break;
            following_.erase(following_.begin());
            if (job->awaited == 0) continue;  // answered
            job->awaited = 0;
            if (job->fault.kind == Fault::Kind::none) job->fault = {Fault::Kind::expired};
            job->span = std::max(job->span, now - job->begun);
            settle(*job);
        }
        io_.work().set_also(next_of_followers());
    }

    void answer_followers(Job& job, const BlockJobs::Event& event) {
        for (Follower& follower : std::exchange(job.followers, {})) {
            if (follower.job->awaited == 0) continue;  // it was too late
            const bool is_stored = job.ok[job.at[follower.of]];
            follower.job->ok[follower.at] = is_stored;
            if (!is_stored && follower.job->fault.kind == Fault::Kind::none) follower.job->fault = event.faults[follower.of];
            follower.job->span = std::max(follower.job->span, os::monotonic_now() - follower.job->begun);
            --follower.job->awaited;
            settle(*follower.job);
        }
    }

    // The system is done with the slots that it was late with.
    void release_late(Job& job, const BlockJobs::Event& event) {
        for (std::size_t i = 0; i < event.late.size(); ++i)
            if (event.late[i].kind == Fault::Kind::system) judge(job, i, event.late[i]);
        const std::vector<Block> slots = std::exchange(job.late, {});
        if (job.is_store) {
            pool_.give_back(slots);
        } else {
            pool_.unpin(slots);
        }
    }

    static std::uint64_t moved(const Job& job) {
        return static_cast<std::uint64_t>(std::ranges::count_if(job.at, [&](std::size_t at) { return job.ok[at]; }));
    }

    void settle(Job& job) {
        if (job.is_decided && job.awaited == 0) finish(job);
    }

    void finish(Job& job) {
        const std::uint64_t bytes = moved(job) * io_.file().row_bytes();
        done_.push_back({job.ticket, std::move(job.ok), job.fault, bytes, job.span});
    }

    DiskIo& io_;
    BlockPool& pool_;
    SlotAges ages_;
    os::Nanoseconds uses_kept_ = os::monotonic_now();
    std::unordered_map<BlockJobs::Id, std::shared_ptr<Job>> jobs_;  // until they are over
    std::unordered_map<Digest, Storing, DigestHash> storing_;
    std::unordered_map<Block, Former> former_;  // until their headers are gone, or something was stored in their slots
    std::multimap<os::Nanoseconds, std::shared_ptr<Job>> following_;  // that wait for earlier calls, by deadline
    std::map<BlockJobs::Id, os::Nanoseconds> late_;  // reported before they were over, and when
    std::deque<Done> done_;
    DiskCounts counts_;
    Refusals refusals_;
    Fault last_refusal_{};  // of a store
    Ticket last_ = 0;
    std::uint64_t emptied_;  // slots with a lower sequence are empty, as far as the pool knows
};

}  // namespace memlane::tiers
