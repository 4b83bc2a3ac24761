// What a tier has been asked for and not yet reported: pure, takes the time, and is its caller's to lock.
//
// A job is stores or loads of some blocks, with a deadline. Each block is decided exactly once:
//
//   waiting -> inside -> decided          begin(), finish(); a load copies to its row between begin_copy() and end_copy()
//   waiting -> decided                    the deadline passed before anybody began
//   waiting -> held back -> waiting       hold_back(), go_on(): nobody begins meanwhile; the deadline may pass
//   inside -> abandoned -> decided        the deadline passed: reported as failed, while the system still works on it
//
// A job is reported once all its blocks are decided or abandoned, and over once none is inside or abandoned. From its
// report on, nobody writes to its rows; until it is over, its slots are somebody's.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "os/clock.hpp"
#include "tiers/slot_file.hpp"

namespace memlane::tiers {

enum class Direction : std::uint8_t { store, load };

// Why a block was not stored or loaded.
struct Fault {
    enum class Kind : std::uint8_t { none, missing, corrupt, system, expired, stalled } kind = Kind::none;
    int error = 0;  // an errno, of `system`
};

struct BlockRequest {
    Block slot;
    std::uint32_t row;
    SlotHeader header;  // of a load: its digest
};

// Seconds by powers of two in eighths, so within 13 %.
class Latencies {
public:
    void add(os::Nanoseconds span) noexcept {
        ++counts_[bucket_of(static_cast<std::uint64_t>(std::max<os::Nanoseconds>(span, 0)))];
        ++total_;
    }
    // 0 if there is none.
    os::Nanoseconds quantile(double share) const noexcept {
        const auto wanted = static_cast<std::uint64_t>(share * static_cast<double>(total_));
        std::uint64_t seen = 0;
        for (std::size_t at = 0; at < counts_.size(); ++at) {
            seen += counts_[at];
            if (seen > wanted || (seen == total_ && total_ > 0)) return static_cast<os::Nanoseconds>(end_of(at));
        }
        return 0;
    }

private:
    static std::size_t bucket_of(std::uint64_t span) noexcept {
        if (span < 8) return span;
        const auto power = static_cast<std::size_t>(std::bit_width(span)) - 4;
        return 8 * (power + 1) + ((span >> power) & 7);
    }
    static std::uint64_t end_of(std::size_t bucket) noexcept {
        if (bucket < 8) return bucket + 1;
        const std::size_t power = bucket / 8 - 1;
        return (8 + bucket % 8 + 1) << power;
    }

    std::array<std::uint64_t, 8 * 62> counts_{};
    std::uint64_t total_ = 0;
};

// The same by powers of two, for observers: as broadcast's DeliveryTimes.
struct Spans {
    std::uint64_t total_ns = 0;
    std::array<std::uint64_t, 31> counts{};  // [i]: of those below 2^i us that are not below 2^(i-1) us; the last has the rest, too

    void add(os::Nanoseconds span) noexcept {
        const auto taken = static_cast<std::uint64_t>(std::max<os::Nanoseconds>(span, 0));
        total_ns += taken;
        ++counts[std::min<std::size_t>(std::bit_width(taken / 1000), counts.size() - 1)];
    }
};

class BlockJobs {
public:
    using Id = std::uint64_t;

private:
    enum class State : std::uint8_t { waiting, held_back, inside, copying, abandoned, decided };

    struct Job {
        Id id;
        Direction direction;
        std::vector<BlockRequest> requests;
        os::Nanoseconds submitted;
        os::Deadline deadline;
        std::vector<State> states{};
        std::vector<Fault> faults{};
        std::vector<Fault> late{};     // how blocks ended after their deadline; empty: none did
        std::vector<bool> unwanted{};  // stores that were forgotten meanwhile
        std::size_t next = 0;       // the first that nobody has begun
        std::size_t undecided = 0;
        std::size_t inside = 0;
        bool is_reported = false;
    };

public:
    // For the caller that submitted it.
    using Ref = std::shared_ptr<Job>;

    struct Work {
        std::shared_ptr<Job> job;
        std::size_t at;

        Direction direction() const noexcept { return job->direction; }
        const BlockRequest& request() const noexcept { return job->requests[at]; }
    };

    // Without faults and time: the second event of a job that was reported before it was over.
    struct Event {
        Id id;
        bool is_report;
        bool is_over;
        std::vector<Fault> faults;  // of each block
        os::Nanoseconds span;
        std::vector<Fault> late;  // once it is over: how each block ended after its deadline; empty: none did
    };

    struct Counts {
        std::uint64_t blocks = 0, faults = 0, corrupt = 0, expired = 0;
        std::uint64_t moved = 0;  // by the system, also after the deadline
        Spans spans{};
    };

    // At least one request.
    Ref submit(Direction direction, std::vector<BlockRequest> requests, os::Deadline deadline, os::Nanoseconds now) {
        const std::size_t blocks = requests.size();
        auto job = std::make_shared<Job>(Job{++last_, direction, std::move(requests), now, deadline});
        job->states.assign(blocks, State::waiting);
        job->faults.resize(blocks);
        job->undecided = blocks;
        open_.emplace(std::pair(deadline.at(), job->id), job);
        queue_of(direction).push_back(job);
        waiting_ += blocks;
        ++alive_;
        return job;
    }

    // The next block to work on. Loads go first, because somebody waits for them, but a store is every fourth.
    std::optional<Work> begin() {
        while (!going_on_.empty()) {
            const Work work = going_on_.front();
            going_on_.pop_front();
            if (work.job->states[work.at] == State::waiting) return begun(work.job, work.at);
        }
        const bool stores_first = ++turn_ % 4 == 0;
        for (const Direction direction : {stores_first ? Direction::store : Direction::load,
                                          stores_first ? Direction::load : Direction::store}) {
            auto& queue = queue_of(direction);
            while (!queue.empty()) {
                const std::shared_ptr<Job> job = queue.front();
                if (job->next == job->requests.size()) {
                    queue.pop_front();
                    continue;
                }
                const std::size_t at = job->next++;
                if (job->states[at] == State::waiting) return begun(job, at);
            }
        }
        return std::nullopt;
    }

    // False: it was reported meanwhile; leave its row alone.
    bool begin_copy(const Work& work) noexcept {
        State& state = work.job->states[work.at];
        if (state != State::inside) return false;
        state = State::copying;
        return true;
    }
    void end_copy(const Work& work) noexcept { work.job->states[work.at] = State::inside; }

    // What is stored there must not be found, also after a restart. True: it was stored already.
    static bool forget(const Ref& job, std::size_t at) {
        job->unwanted.resize(job->requests.size());
        job->unwanted[at] = true;
        return job->states[at] == State::decided;
    }
    // Nobody begins with that block until go_on(). False: it has begun, or it is decided.
    static bool hold_back(const Ref& job, std::size_t at) noexcept {
        if (job->states[at] != State::waiting) return false;
        job->states[at] = State::held_back;
        return true;
    }
    void go_on(const Work& work) {
        State& state = work.job->states[work.at];
        if (state != State::held_back) return;
        state = State::waiting;
        going_on_.push_back(work);
    }
    // True if the deadline of that block has passed before anybody began, or while somebody was at it.
    static bool is_expired(const Ref& job, std::size_t at) noexcept {
        return job->states[at] == State::decided && job->faults[at].kind == Fault::Kind::expired;
    }
    bool is_unwanted(const Work& work) const {
        return !work.job->unwanted.empty() && work.job->unwanted[work.at];
    }
    bool is_abandoned(const Work& work) const noexcept { return work.job->states[work.at] == State::abandoned; }

    // False: it was reported already, as failed. Only the first report counts.
    bool finish(const Work& work, Fault fault, os::Nanoseconds now) {
        Job& job = *work.job;
        const State before = std::exchange(job.states[work.at], State::decided);
        if (before == State::decided) return false;
        --job.inside;
        if (fault.kind == Fault::Kind::none) ++counts_[static_cast<std::size_t>(job.direction)].moved;
        if (before == State::abandoned) {
            job.late.resize(job.requests.size());
            job.late[work.at] = fault;
            if (job.inside == 0 && job.undecided == 0) settle(work.job, now);
            return false;
        }
        decide(job, work.at, fault, now);
        if (job.undecided == 0) settle(work.job, now);
        return true;
    }

    // Decides what has missed its deadline; a block that is being copied is about to be decided.
    void expire(os::Nanoseconds now) {
        for (auto next = open_.begin(); next != open_.end() && next->first.first <= now;) {
            const std::shared_ptr<Job> job = (next++)->second;  // settling erases it
            for (std::size_t at = 0; at < job->states.size(); ++at) {
                State& state = job->states[at];
                const bool is_waiting = state == State::waiting || state == State::held_back;
                if (!is_waiting && state != State::inside) continue;
                if (is_waiting) --waiting_;
                state = is_waiting ? State::decided : State::abandoned;
                decide(*job, at, {Fault::Kind::expired}, now);
            }
            if (job->undecided == 0) settle(job, now);
        }
    }

    // When expire() has something to do.
    os::Deadline next_deadline() const noexcept {
        return open_.empty() ? os::Deadline::never() : open_.begin()->second->deadline;
    }

    std::vector<Event> take_events() { return std::exchange(events_, {}); }
    bool has_events() const noexcept { return !events_.empty(); }
    bool is_idle() const noexcept { return alive_ == 0; }
    std::size_t waiting() const noexcept { return waiting_; }
    const Counts& counts(Direction direction) const noexcept { return counts_[static_cast<std::size_t>(direction)]; }
    const Latencies& latencies(Direction direction) const noexcept {
        return latencies_[static_cast<std::size_t>(direction)];
    }

private:
    std::deque<std::shared_ptr<Job>>& queue_of(Direction direction) noexcept {
        return queues_[static_cast<std::size_t>(direction)];
    }

    Work begun(const Ref& job, std::size_t at) {
        job->states[at] = State::inside;
        ++job->inside;
        --waiting_;
        return {job, at};
    }

    void decide(Job& job, std::size_t at, Fault fault, os::Nanoseconds now) noexcept {
        job.faults[at] = fault;
        --job.undecided;
        Counts& counts = counts_[static_cast<std::size_t>(job.direction)];
        ++counts.blocks;
        counts.faults += fault.kind == Fault::Kind::system ? 1 : 0;
        counts.corrupt += fault.kind == Fault::Kind::corrupt ? 1 : 0;
        counts.expired += fault.kind == Fault::Kind::expired ? 1 : 0;
        counts.spans.add(now - job.submitted);
        latencies_[static_cast<std::size_t>(job.direction)].add(now - job.submitted);
    }

    void settle(const std::shared_ptr<Job>& job, os::Nanoseconds now) {
        const bool is_report = !std::exchange(job->is_reported, true);
        const bool is_over = job->inside == 0;
        if (is_report) open_.erase({job->deadline.at(), job->id});
        if (is_over) --alive_;
        if (is_report || is_over)
            events_.push_back({job->id, is_report, is_over, is_report ? job->faults : std::vector<Fault>{},
                               now - job->submitted, is_over ? job->late : std::vector<Fault>{}});
    }

    std::map<std::pair<os::Nanoseconds, Id>, std::shared_ptr<Job>> open_;  // not reported, by deadline
    std::array<std::deque<std::shared_ptr<Job>>, 2> queues_;
    std::deque<Work> going_on_;  // were held back
    std::vector<Event> events_;
    std::array<Counts, 2> counts_;
    std::array<Latencies, 2> latencies_;
    Id last_ = 0;
    std::uint64_t turn_ = 0;
    std::size_t waiting_ = 0;
    std::size_t alive_ = 0;  // jobs that are not over
};

}  // namespace memlane::tiers
