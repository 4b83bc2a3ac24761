// Proves, within bounds, that the atomics of the ring suffice on a weakly ordered processor, and that none of their
// orders is there for nothing.
//
//   weak_memory           the small scenarios, and every place weakened; seconds (part of `make test`)
//   weak_memory full      the large scenarios, too; minutes (`make weak-memory`)
//   weak_memory PLACE     how things go wrong with that place weakened, step by step
//
// What is proven: for one writer and one reader, up to two laps of a ring of one chunk or two, with waiting, attaching
// and leaving, and for two readers that give a chunk back at once (scenarios.cpp): in no order of their steps, and with no value that the memory model of C++20 lets an
// access return (memory.hpp), is there a data race on a chunk, a descriptor or the header, a message repeated,
// skipped or torn, or a sleeper whom nobody wakes. It is proven of the code that ships: the compiler's instrumentation
// reports every access of native/core and native/broadcast to the explorer (accesses.cpp), which tries all orders and
// values (explorer.hpp).
//
// What is assumed: of the processor and the compiler what C++20 says, less load buffering, which the model leaves out;
// of the kernel, that a futex call compares and falls asleep in one step as seen by wake-ups, and nothing else: no lock
// and no file orders anything. Sleeps end by wake-ups alone: the 100 ms slice, which would hide a lost one, never ends.
//
// What is not proven but tested elsewhere, on x86-64 only: more readers otherwise, more laps, deaths, extents, forks, and the
// machine code. No aarch64 machine has run memlane yet: of weakly ordered processors this is all the evidence there is.
#include <cstdio>
#include <cstring>
#include <string>

#include "../check.hpp"
#include "core/sync.hpp"
#include "explorer.hpp"
#include "litmus.hpp"
#include "scenarios.hpp"

using namespace memlane;
using namespace memlane::weak;

namespace {

constexpr const char* kRelease = "release -> relaxed";
constexpr const char* kAcquire = "acquire -> relaxed";
constexpr const char* kFence = "removed";

// Every access of the protocol that has an order, by its mark in the code, and a scenario that needs the order.
// `publish.load` is `retract.load`, too: one load. So are `join.load` and `leave.load`, and their stores.
struct Place {
    const char* name;
    const char* weakened;
    const char* scenario;
};
constexpr Place kPlaces[] = {
    {"header.store", kRelease, "header"},          {"header.load", kAcquire, "header"},
    {"join.store", kRelease, "reader joins"},      {"join.load", kAcquire, "reader joins"},
    {"leave.store", kRelease, "reader leaves"},    {"leave.load", kAcquire, "writer leaves"},
    {"reset.store", kRelease, "next lap"},         {"reset.load", kAcquire, "next lap"},
    {"publish.store", kRelease, "first message"},  {"publish.load", kAcquire, "first message"},
    {"consume.store", kRelease, "next lap"},       {"consume.load", kAcquire, "next lap"},
    {"park.store fence", kFence, "first message"}, {"park.load fence", kFence, "next lap"},
    {"wake.store", kRelease, "reader joins"},      {"wake.load", kAcquire, "writer waits twice"},
};

void hook(const char* point) {
    Explorer& explorer = Explorer::instance();
    if (explorer.is_observing()) explorer.come_to(point);
}

unsigned long long number(std::uint64_t n) { return n; }

void print_trace(const Failure& failure) {
    for (const std::string& line : failure.trace) std::printf("    %s\n", line.c_str());
    std::printf("    %s: %s\n", failure.what.c_str(), failure.detail.c_str());
}

bool holds(const std::vector<Scenario>& scenarios) {
    bool all = true;
    for (const Scenario& scenario : scenarios) {
        const Exploration found = Explorer::instance().explore(scenario);
        std::printf("  %-26s %9llu  %3llu  %s\n", scenario.name.c_str(), number(found.executions),
                    number(found.most_steps), found.failure ? "FAILS" : "holds");
        std::fflush(stdout);
        if (found.failure) print_trace(*found.failure);
        all &= !found.failure;
    }
    return all;
}

Exploration weaken(const Place& place, const std::vector<Scenario>& scenarios) {
    for (const Scenario& scenario : scenarios)
        if (scenario.name == place.scenario)
            return Explorer::instance().explore(scenario, {.weakened = place.name});
    CHECK(!"a scenario of that name");
    return {};
}

bool all_are_needed(const std::vector<Scenario>& scenarios) {
    bool all = true;
    for (const Place& place : kPlaces) {
        const Exploration found = weaken(place, scenarios);
        std::printf("  %-18s %-20s %-20s %9llu  %s\n", place.name, place.weakened, place.scenario,
                    number(found.executions), found.failure ? found.failure->what.c_str() : "NOT CAUGHT");
        all &= found.failure.has_value();
    }
    return all;
}

int show(const char* name, const std::vector<Scenario>& scenarios) {
    for (const Place& place : kPlaces) {
        if (std::strcmp(place.name, name) != 0) continue;
        const Exploration found = weaken(place, scenarios);
        CHECK(found.failure.has_value());
        print_trace(*found.failure);
        return 0;
    }
    std::fprintf(stderr, "no place is called %s; the table that comes without an argument lists them\n", name);
    return 2;
}

}  // namespace

int main(int count, char** values) {
    core::sync_hook.store(hook);
    const std::vector<Scenario> small = small_scenarios();
    const bool full = count > 1 && std::strcmp(values[1], "full") == 0;
    if (count > 1 && !full) return show(values[1], small);

    std::printf("%d litmus programs turn out as they must\n", run_litmus_tests());
    std::printf("\n  scenario                  executions steps\n");
    bool right = holds(small);
    if (full) right &= holds(large_scenarios());
    std::printf("\n  place              weakened             scenario             executions caught by\n");
    right &= all_are_needed(small);
    return right ? 0 : 1;
}
