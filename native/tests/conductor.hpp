// Runs two roles as threads, one at a time, in every order in which they can reach their sync points.
//
// A role is any callable; it reports which round of its work begins. A *spot* is the first passage of a point (by name)
// in one round. For a pair of spots and an order, both threads are brought to their spots. Then the one that is to be
// first runs alone as far as it can: to its end, or until the kernel reports that it sleeps. An order is impossible if
// the one that is to be first sleeps, or has ended, while the other is held, because then only the other could let it
// reach its spot. Nothing here depends on timing. In the end both threads must have ended. If they sleep instead, a
// wake-up was lost; this is found before the 100 ms slice of a wait would hide it.
//
// This file knows only points and threads, none of the systems: a role must check its own results.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "check.hpp"
#include "core/sync.hpp"

namespace memlane::testing {

struct Spot {
    int round;
    std::string point;
    auto operator<=>(const Spot&) const = default;
    std::string text() const { return point + " of round " + std::to_string(round); }
};

// The order that is being driven, for the message of a failure.
inline std::string& current_order() {
    static std::string order;
    return order;
}
[[noreturn]] inline void broken(const std::string& what) {
    std::fprintf(stderr, "%s\n    %s\n", what.c_str(), current_order().c_str());
    std::_Exit(1);
}

enum class Rest { paused, held, asleep, ended };

class Actor {
public:
    using Role = std::function<void(const std::function<void(int)>& begin_round)>;

    Actor(std::string name, Role role, std::optional<Spot> spot) : name_(std::move(name)), spot_(std::move(spot)) {
        thread_ = std::thread([this, role = std::move(role)] {
            self() = this;
            thread_id_ = static_cast<pid_t>(::syscall(SYS_gettid));  // glibc 2.28 has no function for it
            is_in_hook_ = true;
            is_in_hook_.notify_one();
            is_open_.wait(false);
            is_in_hook_ = false;
            role([this](int round) { round_ = round; });
            self() = nullptr;
            ended_ = true;
        });
        is_in_hook_.wait(false);
    }
    ~Actor() {
        if (thread_.joinable()) thread_.join();
    }

    const std::string& name() const noexcept { return name_; }
    const std::vector<Spot>& passed() const noexcept { return passed_; }
    bool is_at_spot() const noexcept { return rest_ == Rest::held; }
    bool came_to_spot() const noexcept { return has_come_; }
    Rest rest() const noexcept { return rest_; }

    // Lets it run as far as it can; true if it made progress. If it sleeps, it is paused at the next point it reaches.
    bool run() {
        if (rest_ == Rest::held || rest_ == Rest::ended) return false;
        const std::uint64_t before = passages_;
        is_open_ = true;
        is_open_.notify_one();
        // More and more rarely: on a busy machine it may not run for long, and each look takes system calls.
        for (int looks = 0; (rest_ = look()) == Rest::paused; ++looks)
            looks < 20 ? ::sched_yield() : ::usleep(static_cast<useconds_t>(std::min(looks, 1000)));
        is_open_ = false;
        // A thread that is still ending may hold the allocator's lock; the other, waiting for it, would look asleep.
        if (rest_ == Rest::ended) thread_.join();
        return passages_ != before || rest_ == Rest::ended;
    }
    // Lets it leave its spot, if it is there; from now on it is not held there.
    void release() {
        is_held_at_spot_ = false;
        if (rest_ == Rest::held) rest_ = Rest::paused;
    }

    std::string why_not() const {
        if (rest_ == Rest::ended) return "the " + name_ + " has ended";
        return "the " + name_ + " sleeps in " + std::string(round_ == 0 ? "its start" : "round " + std::to_string(round_));
    }

    static void hook(const char* point) {
        if (self() != nullptr) self()->pass(point);
    }

private:
    static Actor*& self() {
        thread_local Actor* actor = nullptr;
        return actor;
    }

    void pass(const char* point) {
        is_in_hook_ = true;
        const Spot here{round_, point};
        if (std::find(passed_.begin(), passed_.end(), here) == passed_.end()) {
            passed_.push_back(here);
            if (spot_ && here == *spot_) {
                has_come_ = true;
                if (is_held_at_spot_) is_open_ = false;
            }
        }
        ++passages_;
        is_open_.wait(false);
        is_in_hook_ = false;
    }

    // Its state now; `paused` stands for "still running".
    Rest look() const {
        if (ended_) return Rest::ended;
        if (is_in_hook_ && !is_open_) return Rest::held;
        const std::uint64_t before = passages_;
        for (int i = 0; i < 2; ++i)
            if (thread_id_ == 0 || is_in_hook_ || !is_sleeping() || passages_ != before || ended_) return Rest::paused;
        return Rest::asleep;
    }

    bool is_sleeping() const {
        char path[64];
        std::snprintf(path, sizeof path, "/proc/self/task/%d/stat", thread_id_.load());
        std::FILE* file = std::fopen(path, "re");
        if (file == nullptr) return false;
        char text[512]{};
        std::fread(text, 1, sizeof text - 1, file);
        std::fclose(file);
        const char* at = std::strrchr(text, ')');
        return at != nullptr && at[2] == 'S';
    }

    const std::string name_;
    const std::optional<Spot> spot_;
    Rest rest_ = Rest::paused;
    std::vector<Spot> passed_;  // in the order of the first passages
    std::atomic<int> round_{0};
    std::atomic<bool> has_come_{false};
    std::atomic<bool> is_held_at_spot_{true};
    std::atomic<bool> is_open_{false};  // it may pass points
    std::atomic<bool> is_in_hook_{false};
    std::atomic<bool> ended_{false};
    std::atomic<std::uint64_t> passages_{0};
    std::atomic<pid_t> thread_id_{0};
    std::thread thread_;
};

// Two roles that belong together, created anew for every order.
struct Play {
    std::array<Actor::Role, 2> roles;
};

class Conductor {
public:
    Conductor(std::string scene, std::array<std::string, 2> names, std::function<Play()> make)
        : scene_(std::move(scene)), names_(std::move(names)), make_(std::move(make)) {
        core::sync_hook.store(Actor::hook);
    }

    // Drives every pair of spots in both orders, including spots that are passed only in one of these orders.
    void drive_all() {
        for (const int ahead : {0, 1}) play({}, 0, ahead);
        std::set<std::array<Spot, 2>> done;
        for (bool any = true; any;) {
            any = false;
            const std::array<std::set<Spot>, 2> known = spots_;
            for (const Spot& one : known[0])
                for (const Spot& other : known[1])
                    if (done.insert({one, other}).second) {
                        any = true;
                        for (const int first : {0, 1}) drive({one, other}, first);
                    }
        }
        for (const int who : {0, 1})
            for (const Spot& spot : spots_[who]) points_.insert(spot.point);
        std::printf("%s: %zu x %zu spots, %zu orders driven, %zu impossible\n", scene_.c_str(), spots_[0].size(),
                    spots_[1].size(), driven_, impossible_);
    }

    const std::set<std::string>& points() const noexcept { return points_; }
    std::size_t driven() const noexcept { return driven_; }
    std::size_t impossible() const noexcept { return impossible_; }
    // By first and second point: why the order was never driven, or empty if it was driven in any round.
    using ByPoint = std::map<std::pair<std::string, std::string>, std::string>;
    const ByPoint& orders() const noexcept { return orders_; }

private:
    using Spots = std::array<std::optional<Spot>, 2>;
    struct Outcome {
        bool is_driven = false;
        std::string why_not;
    };
    // What the first reaches while the second is held at a spot, if it is not held itself, and why no more.
    struct Reach {
        std::vector<Spot> passed;
        std::string why_not;
    };

    void drive(const std::array<Spot, 2>& spots, int first) {
        Outcome outcome;
        for (const int ahead : {1 - first, first}) {
            // A play that does not come to the spot of the first is the same for all spots that it does not come to.
            const auto known = reach_.find({first, ahead, spots[1 - first]});
            if (known != reach_.end() && !std::ranges::count(known->second.passed, spots[first])) {
                outcome = {false, known->second.why_not};
                continue;
            }
            outcome = play({spots[0], spots[1]}, first, ahead);
            if (outcome.is_driven) break;
        }
        ++(outcome.is_driven ? driven_ : impossible_);
        const int second = 1 - first;
        const auto key = std::pair(names_[first] + " " + spots[first].point, names_[second] + " " + spots[second].point);
        std::string& known = orders_.try_emplace(key, outcome.why_not).first->second;
        if (outcome.is_driven) known.clear();
    }

    // Plays one order. `ahead` runs first on the way to the spots, so it rarely finds what it waits for.
    Outcome play(const Spots& spots, int first, int ahead) {
        current_order() = scene_ + ": nobody is held";
        if (spots[0])
            current_order() = scene_ + ": " + names_[first] + " at " + spots[first]->text() + " before " +
                              names_[1 - first] + " at " + spots[1 - first]->text();
        Play made = make_();
        std::array<Actor, 2> actors{Actor(names_[0], std::move(made.roles[0]), spots[0]),
                                    Actor(names_[1], std::move(made.roles[1]), spots[1])};
        const auto run_both = [&](int begin) {
            // Until two rounds are idle: the second may wake the first just before it goes to sleep itself.
            for (int idle = 0; idle < 2;) {
                const bool any = actors[begin].run() | actors[1 - begin].run();
                idle = any ? 0 : idle + 1;
            }
        };
        run_both(ahead);
        Actor& one = actors[first];
        Actor& other = actors[1 - first];
        Outcome outcome;
        const bool have_met = one.is_at_spot() && other.is_at_spot();
        if (!one.is_at_spot()) {
            outcome.why_not = one.why_not();
            if (spots[0]) reach_[{first, ahead, *spots[1 - first]}] = {one.passed(), outcome.why_not};
        }
        const bool comes_first = one.is_at_spot();
        if (have_met) {
            one.release();
            one.run();
        }
        for (Actor& actor : actors) actor.release();
        run_both(first);
        for (const Actor& actor : actors)
            if (actor.rest() != Rest::ended) broken(actor.why_not() + " for ever");
        outcome.is_driven = comes_first && other.came_to_spot();
        if (comes_first && !outcome.is_driven) outcome.why_not = "the " + other.name() + " does not pass it then";
        for (const int who : {0, 1}) spots_[who].insert(actors[who].passed().begin(), actors[who].passed().end());
        return outcome;
    }

    const std::string scene_;
    const std::array<std::string, 2> names_;
    const std::function<Play()> make_;
    std::array<std::set<Spot>, 2> spots_;
    std::set<std::string> points_;
    std::size_t driven_ = 0;
    std::size_t impossible_ = 0;
    ByPoint orders_;
    std::map<std::tuple<int, int, Spot>, Reach> reach_;  // by who is first, who runs ahead, and the spot of the second
};

}  // namespace memlane::testing
