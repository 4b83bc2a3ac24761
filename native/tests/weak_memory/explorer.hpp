// Runs a few threads on a weak memory, in every order that can make a difference, and with every outcome that this
// memory allows for every access.
//
// The threads are fibers of one thread: each stops before every atomic access, fence and futex call, and the explorer
// chooses which one continues. It runs executions from the start, depth first, until no order or outcome is untried.
// Nothing is random, so every failure is reproducible.
//
// Orders that differ only in steps that commute are tried once (dynamic partial-order reduction with sleep sets:
// Flanagan and Godefroid, POPL 2005; Godefroid, 1996). A load commutes with a store that it does not return, because
// the model lets it return older values anyway. The reduction works for two threads only, where the one to try first
// is always the other one. litmus.cpp compares the reduction with trying everything.
#pragma once

#include <ucontext.h>

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "memory.hpp"

namespace memlane::weak {

struct Failure {
    std::string what;  // one of: data race, lost wake-up, or what the scenario says
    std::string detail;
    std::vector<std::string> trace;
};

struct Exploration {
    std::uint64_t executions = 0;
    std::uint64_t most_steps = 0;
    std::optional<Failure> failure;
};

struct Scenario {
    std::string name;
    std::function<void()> prepare;  // before every execution, unobserved
    std::vector<std::function<void()>> threads;
    std::function<void()> finish = [] {};  // after every complete execution, unobserved
    std::vector<Watched> watched;
    std::vector<Watched> atomics;  // those in memory that the kernel reads, which must be known beforehand
    std::function<std::string(const void*)> name_of = [](const void*) { return std::string(); };
};

struct Options {
    std::string weakened;    // the place to weaken: its access becomes relaxed, a fence has no effect
    bool reduced = true;     // false: tries every order of steps
    bool named_only = true;  // every access with an order must have a name (SYNC_STORE, SYNC_LOAD)
};

class Explorer {
public:
    static Explorer& instance() { return one_; }

    Exploration explore(const Scenario& scenario, const Options& options = {});

    // The rest is called by the fibers. Report accesses only while `is_observing`.
    bool is_observing(const void* address) const { return running_ != kNobody && memory_.is_watched(address); }
    bool is_observing() const { return running_ != kNobody; }
    std::size_t running() const { return running_; }

    void come_to(const char* point);
    std::uint64_t load(const void* address, std::size_t bytes, Order order);
    void store(void* address, std::size_t bytes, std::uint64_t value, Order order);
    std::uint64_t add(void* address, std::size_t bytes, std::uint64_t amount, Order order);
    void fence(Order order);
    void plain(const void* address, std::size_t bytes, bool is_write);
    // The kernel copies from `address` to `to`. Reads the atomics there with relaxed loads.
    void read_by_kernel(const std::byte* address, std::size_t bytes, std::byte* to);
    bool futex_wait(const std::uint32_t* word, std::uint32_t expected);  // false: the word had another value
    void futex_wake(const std::uint32_t* word);

    [[noreturn]] void fail(const std::string& what, const std::string& detail);

private:
    static Explorer one_;
    static constexpr std::size_t kNobody = SIZE_MAX;
    static constexpr std::size_t kNowhere = SIZE_MAX;
    static constexpr std::int32_t kNever = -1;

    enum class Kind : std::uint8_t { local, load, store, update, fence, wait, wake };
    static constexpr std::size_t kKinds = 7;
    struct Step {
        Kind kind = Kind::local;
        std::size_t location = kNowhere;
    };
    // The marks before an access with an order.
    struct Place {
        std::array<const char*, 3> points{};
        bool is_fence = false;
        bool is_weakened = false;
    };
    using Threads = std::uint32_t;  // a set, one bit each
    // For each thread, the last of its steps that something depends on.
    struct Clock {
        std::array<std::int32_t, kMostThreads> last{};
        void join(const Clock& other);
    };

    // One decision: which thread took the next step, and with which outcome.
    struct Decision {
        std::size_t thread;
        std::size_t way = 0;
        std::size_t ways = 1;
        Threads enabled = 0;
        Threads asleep = 0;  // need not run here: their steps were tried before
        // If a thread's next load was tried at an earlier decision, it need not return again what it could return
        // there: messages with lower numbers.
        std::array<std::size_t, kMostThreads> untried_from{};
        Threads to_try = 0;
        Threads tried = 0;
        std::array<Step, kMostThreads> next{};
        Clock clock{};
    };
    struct Fiber {
        ucontext_t context{};
        std::vector<std::byte> stack;
        Step next;
        bool is_done = false;
        std::size_t waits_for = kNowhere;
        Clock clock{};
        Place place;
        bool place_used = false;
    };
    struct Event {
        std::size_t thread;
        Step step;
        std::uint64_t value;
        bool is_usual;  // as with a strong memory
        Place place;
    };

    static bool depend(const Step& a, const Step& b);
    static bool is_missed_by(const Step& store, const Step& load);
    static void run_fiber();
    void start_execution();
    bool next_execution();
    void arrive(Step step);
    std::size_t choose(const std::vector<std::size_t>& ways);
    void hand_over();
    std::size_t pick();
    std::int32_t last_of(std::size_t thread, const Step& step, bool (*relation)(const Step&, const Step&)) const;
    void note_dependencies(Decision& decision, const Step& step);
    void note_source(const Message& read);
    void pass_on_sleep(const Decision& decision, const Step& step);
    bool is_at(const Place& place, const std::string& name) const;
    Order order_here(Order asked, Place& place);
    void record(const Step& step, std::uint64_t value, bool is_usual, const Place& place);
    std::vector<std::string> trace() const;

    const Scenario* scenario_ = nullptr;
    Options options_;
    Memory memory_;
    ucontext_t main_{};
    std::array<Fiber, kMostThreads> fibers_;
    std::size_t running_ = kNobody;
    std::vector<Decision> path_;
    std::size_t depth_ = 0;
    Threads asleep_ = 0;  // for the next decision, like untried_from_
    std::array<std::size_t, kMostThreads> untried_from_{};
    std::array<std::array<std::array<std::int32_t, kKinds>, kMostThreads>, kMostLocations + 1> last_{};
    std::array<View, kMostLocations> futexes_;  // what the kernel's lock of each futex carries: the time of its word
    bool is_complete_ = false;
    std::optional<Failure> failure_;
    std::vector<Event> events_;
};

}  // namespace memlane::weak
