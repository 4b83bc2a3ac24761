// The disk tier: which block is in which slot, what is under way, and what to report. One thread at a time, which never
// waits: the threads of DiskIo do the work.
//
// A slot that is being written is reserved in the pool, one that is being read is pinned, until the system is done with
// it, which may be later than the report.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "os/clock.hpp"
#include "tiers/block_jobs.hpp"
#include "tiers/block_pool.hpp"
#include "tiers/disk_io.hpp"

namespace memlane::tiers {

struct DiskCounts {
    std::uint64_t recovered = 0, stored = 0, loaded = 0, missed = 0, declined = 0;
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

    // `pool` has as many blocks as there are slots, and is empty.
    DiskTier(DiskIo& io, BlockPool& pool) : io_(io), pool_(pool) {}

    // What an earlier life has left, in the order in which it was stored.
    void restore(Keys keys, std::span<const Block> slots, std::span<const Block> last) {
        pool_.restore(keys, slots, last);
        counts_.recovered = pool_.statistics().used;
    }

    bool has(const BlockPool::Asked& key) const noexcept { return !is_stalled() && pool_.stored(key) != kNoBlock; }

    // Pins what is there; kNoBlock for the others.
    std::vector<Block> hold(Keys keys) {
        if (is_stalled()) return std::vector<Block>(keys.size(), kNoBlock);
        return pool_.pin_each(keys, false);
    }
    void release(std::span<const Block> blocks) { pool_.unpin(blocks); }

    // What the policy throws has changed nothing.
    Ticket store(Keys keys, std::span<const Block> rows, os::Deadline deadline) {
        const auto job = begin(keys.size(), true);
        if (is_stalled()) return refuse(job);
        const std::vector<Block> blocks = pool_.reserve(keys, [](KeyStore::Bytes) {});
        for (std::size_t at = 0; at < keys.size(); ++at) {
            if (blocks[at] != kNoBlock) continue;
            if (pool_.stored(keys[at]) != kNoBlock) {
                job->ok[at] = true;
            } else if (const auto earlier = storing_.find(digest_of(keys[at])); earlier != storing_.end()) {
                earlier->second->followers.push_back({earlier->first, job, at});
                ++job->awaited;
            } else {
                ++counts_.declined;  // by the policy, or all slots are held
            }
        }
        try {
            submit(job, keys, blocks, rows, deadline);
        } catch (...) {
            pool_.give_back(job->slots);
            throw;
        }
        for (const Digest& digest : job->digests) storing_[digest] = job;
        return job->ticket;
    }

    Ticket load(Keys keys, std::span<const Block> rows, os::Deadline deadline) {
        const auto job = begin(keys.size(), false);
        if (is_stalled()) return refuse(job);
        const std::vector<Block> blocks = pool_.pin_each(keys, true);
        counts_.missed += static_cast<std::uint64_t>(std::ranges::count(blocks, kNoBlock));
        try {
            submit(job, keys, blocks, rows, deadline);
        } catch (...) {
            pool_.unpin(job->slots);
            throw;
        }
        return job->ticket;
    }

    void touch(Keys keys) { pool_.touch(keys); }

    // 0 or an errno.
    int forget(Keys keys) {
        int error = 0;
        for (const BlockPool::Asked& key : keys) {
            const Block slot = pool_.stored(key);
            if (slot == kNoBlock) continue;
            if (const int failed = io_.file().erase(slot); failed != 0) error = failed;
        }
        pool_.forget(keys);
        has_forgotten_ = true;
        return error;
    }

    // Throws system_error, and then nothing has changed.
    void clear() {
        io_.file().clear();
        pool_.clear();
        has_forgotten_ = true;
    }

    // Takes in what the threads have done.
    void collect() {
        for (const BlockJobs::Event& event : io_.work().poll()) {
            const std::shared_ptr<Job> job = jobs_.at(event.id);
            if (event.is_report) decide(job, event);
            if (event.is_over) {
                late_.erase(event.id);
                jobs_.erase(event.id);
                release_late(*job);
            } else {
                late_.emplace(event.id, os::monotonic_now());
            }
        }
    }
    std::vector<Done> take_done() { return std::exchange(done_, {}); }
    bool has_done() const noexcept { return !done_.empty(); }
    bool is_idle() const noexcept { return jobs_.empty(); }

    // The system has been at some block for a second since it was reported as late.
    bool is_stalled() const noexcept {
        if (late_.empty()) return false;
        const auto longest = std::ranges::min_element(late_, {}, [](const auto& late) { return late.second; });
        return os::monotonic_now() - longest->second > kStall;
    }
    const DiskCounts& counts() const noexcept { return counts_; }
    // Of the disk: no space was left for the last store.
    bool is_full() const noexcept { return is_full_; }

private:
    static constexpr os::Nanoseconds kStall = os::kSecond;

    struct Job;
    struct Follower {
        Digest digest;
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
        bool is_decided = false;
        Fault fault{};
        os::Nanoseconds span = 0;
    };

    struct DigestHash {
        std::size_t operator()(const Digest& digest) const noexcept {
            std::size_t hash;
            std::memcpy(&hash, digest.data(), sizeof hash);
            return hash;
        }
    };

    static Digest digest_of(const BlockPool::Asked& key) noexcept {
        Digest digest;
        std::memcpy(digest.data(), key.bytes.data(), digest.size());
        return digest;
    }

    std::shared_ptr<Job> begin(std::size_t keys, bool is_store) {
        return std::make_shared<Job>(Job{++last_, is_store, std::vector<bool>(keys)});
    }

    Ticket refuse(const std::shared_ptr<Job>& job) {
        job->fault = {Fault::Kind::expired};
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
            if (job->is_store) request.header = io_.file().next_header(digest);
            requests.push_back(request);
        }
        if (requests.empty()) {
            job->is_decided = true;
            return settle(*job);
        }
        const Direction direction = job->is_store ? Direction::store : Direction::load;
        jobs_.emplace(io_.work().submit(direction, std::move(requests), deadline), job);
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
            good[decided.size()] = is_good;
            decided.push_back(job->slots[i]);
        }
        job->span = event.span;
        job->is_decided = true;
        if (job->is_store) {
            is_full_ = job->fault.kind == Fault::Kind::system && (job->fault.error == ENOSPC || job->fault.error == EDQUOT);
            pool_.commit(decided, {good.get(), decided.size()});
            if (has_forgotten_) take_back(*job);
            for (const Digest& digest : job->digests) storing_.erase(digest);
            answer_followers(*job);
        } else {
            pool_.unpin(decided);
            for (std::size_t i = 0; i < job->slots.size(); ++i) drop_if_bad(*job, i, event.faults[i]);
        }
        (job->is_store ? counts_.stored : counts_.loaded) += moved(*job);
        settle(*job);
    }

    // What was forgotten while it was stored is not there, also after a restart.
    void take_back(Job& job) {
        for (std::size_t i = 0; i < job.slots.size(); ++i) {
            if (!job.ok[job.at[i]] || pool_.has(job.slots[i], job.digests[i])) continue;
            job.ok[job.at[i]] = false;
            static_cast<void>(io_.file().erase(job.slots[i]));
        }
    }

    // What cannot be loaded must not be found again, or its user asks for ever.
    void drop_if_bad(const Job& job, std::size_t i, Fault fault) {
        if (fault.kind == Fault::Kind::none || fault.kind == Fault::Kind::expired) return;
        pool_.forget(job.slots[i], job.digests[i]);
    }

    void answer_followers(Job& job) {
        for (Follower& follower : std::exchange(job.followers, {})) {
            const auto found = std::ranges::find(job.digests, follower.digest);
            follower.job->ok[follower.at] = job.ok[job.at[static_cast<std::size_t>(found - job.digests.begin())]];
            --follower.job->awaited;
            settle(*follower.job);
        }
    }

    // The system is done with the slots that it was late with.
    void release_late(Job& job) {
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
    std::unordered_map<BlockJobs::Id, std::shared_ptr<Job>> jobs_;  // until they are over
    std::unordered_map<Digest, std::shared_ptr<Job>, DigestHash> storing_;
    std::map<BlockJobs::Id, os::Nanoseconds> late_;  // reported before they were over, and when
    std::vector<Done> done_;
    DiskCounts counts_;
    Ticket last_ = 0;
    bool has_forgotten_ = false;  // ever
    bool is_full_ = false;
};

}  // namespace memlane::tiers
