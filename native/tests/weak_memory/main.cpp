// Proves, within bounds, that the atomics of the ring suffice on a weakly ordered processor, and that each of their
// orders is needed.
//
//   weak_memory           the small scenarios, and every place weakened; seconds (part of `make test`)
//   weak_memory full      the large scenarios, too; minutes (`make weak-memory`)
//   weak_memory PLACE     how the protocol fails with that place weakened, step by step
//
// Proven: for one writer and one reader, with up to two laps of a ring of one or two chunks, with waiting, attaching
// and leaving, for two readers that give a chunk back at once, and for a reader of the latest of three messages
// (scenarios.cpp): no order of their steps, and no value that the memory model of C++20 lets an access return (memory.hpp),
// leads to a data race on a chunk, a descriptor or the header, to a repeated or skipped message or a torn read, or to a
// sleeper that is never woken. This holds for the code that ships: the compiler's instrumentation reports every access of native/core and native/broadcast to the
// explorer (accesses.cpp), which tries all orders and values (explorer.hpp).
//
// Assumed: that processor and compiler follow C++20, without load buffering, which the model leaves out; and that a
// futex call compares and falls asleep in one step, as seen by wake-ups. Nothing else is assumed of the kernel: no lock
// and no file orders anything. Only wake-ups end sleeps: the 100 ms slice, which would hide a lost one, never ends.
//
// Not proven, but tested elsewhere, on x86-64 only: other cases of several readers, more laps, deaths, extents, forks,
// and the machine code. No aarch64 machine has run memlane yet: for weakly ordered processors this is all the evidence.
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

// Every access with an order in the scenarios, by its mark in the code, and a scenario that needs that order.
// `publish.load` and `retract.load` are one load, as are `join.load` and `leave.load`; their stores are one store. One load
// are also `take.load` and `finish.load`, and `lease.load` and `drop.load`.
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
    {"admit.load", kAcquire, "late reader"},
    {"latest.store", kRelease, "latest message"},  {"latest.load fence", kFence, "latest message"},
    {"park.load fence", kFence, "latest message"}, {"take.store", kRelease, "latest, given up"},
    {"finish.store", kRelease, "latest message"},  {"finish.load", kAcquire, "latest message"},
    {"drop.store", kRelease, "latest, kept"},      {"drop.load", kAcquire, "latest, kept"},
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
