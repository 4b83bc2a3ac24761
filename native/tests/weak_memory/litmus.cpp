#include "litmus.hpp"

#include <atomic>
#include <cstdio>
#include <set>
#include <string>

#include "../check.hpp"
#include "explorer.hpp"

namespace memlane::weak {

namespace {

constexpr auto relaxed = std::memory_order_relaxed;
constexpr auto acquire = std::memory_order_acquire;
constexpr auto release = std::memory_order_release;
constexpr auto full = std::memory_order_seq_cst;

struct Shared {
    alignas(64) std::uint32_t x;
    alignas(64) std::uint32_t y;
    alignas(64) std::uint32_t plain;
};
Shared shared;

std::uint32_t load(std::uint32_t& at, std::memory_order order) { return std::atomic_ref(at).load(order); }
void store(std::uint32_t& at, std::uint32_t value, std::memory_order order) { std::atomic_ref(at).store(value, order); }
std::uint32_t add(std::uint32_t& at, std::memory_order order) { return std::atomic_ref(at).fetch_add(1, order); }
void fence(std::memory_order order) { std::atomic_thread_fence(order); }

using Registers = std::array<std::uint32_t, 4>;
using Program = std::function<void(Registers&)>;
using Outcomes = std::set<Registers>;

struct Result {
    Outcomes outcomes;
    std::string failure;
    std::uint64_t executions;
};

Result explore(const std::vector<Program>& threads, bool reduced) {
    Registers registers{};
    Result result{};
    Scenario scenario;
    scenario.name = "litmus";
    scenario.prepare = [&] {
        shared = {};
        registers = {};
    };
    scenario.finish = [&] { result.outcomes.insert(registers); };
    scenario.watched = {{reinterpret_cast<const std::byte*>(&shared), sizeof shared}};
    for (const Program& thread : threads) scenario.threads.push_back([&] { thread(registers); });
    const Exploration found =
        Explorer::instance().explore(scenario, {.weakened = {}, .reduced = reduced, .named_only = false});
    if (found.failure) result.failure = found.failure->what;
    result.executions = found.executions;
    return result;
}

int programs = 0;

// The reduction must lose no outcome.
Result run(const std::vector<Program>& threads) {
    ++programs;
    const Result all = explore(threads, false);
    if (threads.size() > 2) return all;
    const Result reduced = explore(threads, true);
    CHECK(reduced.failure == all.failure);
    CHECK(!all.failure.empty() || (reduced.outcomes == all.outcomes && reduced.executions <= all.executions));
    return reduced;
}

bool can_be(const Result& result, const Registers& outcome) { return result.outcomes.count(outcome) == 1; }

void store_buffering() {
    const auto program = [](bool first, bool second) {
        return run({[=](Registers& r) {
                        store(shared.x, 1, relaxed);
                        if (first) fence(full);
                        r[0] = load(shared.y, relaxed);
                    },
                    [=](Registers& r) {
                        store(shared.y, 1, relaxed);
                        if (second) fence(full);
                        r[1] = load(shared.x, relaxed);
                    }});
    };
    CHECK(can_be(program(false, false), {0, 0}));
    CHECK(can_be(program(true, false), {0, 0}));
    CHECK(can_be(program(false, true), {0, 0}));
    CHECK(!can_be(program(true, true), {0, 0}));
    CHECK(program(true, true).outcomes == (Outcomes{{0, 1}, {1, 0}, {1, 1}}));
}

void message_passing() {
    const auto program = [](std::memory_order stores, std::memory_order loads) {
        return run({[=](Registers&) {
                        store(shared.x, 1, relaxed);
                        store(shared.y, 1, stores);
                    },
                    [=](Registers& r) {
                        r[0] = load(shared.y, loads);
                        r[1] = load(shared.x, relaxed);
                    }});
    };
    CHECK(!can_be(program(release, acquire), {1, 0}));
    CHECK(can_be(program(release, relaxed), {1, 0}));
    CHECK(can_be(program(relaxed, acquire), {1, 0}));
    CHECK(program(release, acquire).outcomes == (Outcomes{{0, 0}, {0, 1}, {1, 1}}));
}

void message_passing_by_fences() {
    const auto program = [](std::memory_order stores, std::memory_order loads) {
        return run({[=](Registers&) {
                        store(shared.x, 1, relaxed);
                        fence(stores);
                        store(shared.y, 1, relaxed);
                    },
                    [=](Registers& r) {
                        r[0] = load(shared.y, relaxed);
                        fence(loads);
                        r[1] = load(shared.x, relaxed);
                    }});
    };
    CHECK(!can_be(program(release, acquire), {1, 0}));
    CHECK(!can_be(program(full, full), {1, 0}));
    CHECK(can_be(program(acquire, acquire), {1, 0}));
    CHECK(can_be(program(release, release), {1, 0}));
}

void plain_data() {
    const auto program = [](std::memory_order stores, std::memory_order loads) {
        return run({[=](Registers&) {
                        shared.plain = 7;
                        store(shared.y, 1, stores);
                    },
                    [=](Registers& r) {
                        r[0] = load(shared.y, loads);
                        if (r[0] == 1) r[1] = shared.plain;
                    }});
    };
    CHECK(program(release, acquire).outcomes == (Outcomes{{0, 0}, {1, 7}}));
    CHECK(program(relaxed, acquire).failure == "data race");
    CHECK(program(release, relaxed).failure == "data race");
}

// Reads of one location never go backwards, and full fences alone make no plain access safe.
void coherence() {
    const Result reads = run({[](Registers&) { store(shared.x, 1, relaxed); },
                              [](Registers& r) {
                                  r[0] = load(shared.x, relaxed);
                                  r[1] = load(shared.x, relaxed);
                              }});
    CHECK(reads.outcomes == (Outcomes{{0, 0}, {0, 1}, {1, 1}}));
    CHECK(run({[](Registers&) {
                   shared.plain = 1;
                   fence(full);
               },
               [](Registers& r) {
                   fence(full);
                   r[0] = shared.plain;
               }})
              .failure == "data race");
}

// Each thread stores to both locations, and finds its later store overwritten by the other's earlier one.
void stores_out_of_order() {
    const auto program = [](std::memory_order order) {
        return run({[=](Registers& r) {
                        store(shared.x, 1, relaxed);
                        fence(order);
                        store(shared.y, 2, relaxed);
                        r[0] = load(shared.y, relaxed);
                    },
                    [=](Registers& r) {
                        store(shared.y, 1, relaxed);
                        fence(order);
                        store(shared.x, 2, relaxed);
                        r[1] = load(shared.x, relaxed);
                    }});
    };
    CHECK(can_be(program(release), {1, 1}));
    CHECK(!can_be(program(full), {1, 1}));
}

// The stated limit of the model: no load returns a value before it is stored.
void no_load_buffering() {
    const Result result = run({[](Registers& r) {
                                   r[0] = load(shared.y, relaxed);
                                   store(shared.x, 1, relaxed);
                               },
                               [](Registers& r) {
                                   r[1] = load(shared.x, relaxed);
                                   store(shared.y, 1, relaxed);
                               }});
    CHECK(result.outcomes == (Outcomes{{0, 0}, {0, 1}, {1, 0}}));
}

void two_writers_two_readers() {
    const auto program = [](bool fenced) {
        return run({[](Registers&) { store(shared.x, 1, release); }, [](Registers&) { store(shared.y, 1, release); },
                    [=](Registers& r) {
                        r[0] = load(shared.x, acquire);
                        if (fenced) fence(full);
                        r[1] = load(shared.y, acquire);
                    },
                    [=](Registers& r) {
                        r[2] = load(shared.y, acquire);
                        if (fenced) fence(full);
                        r[3] = load(shared.x, acquire);
                    }});
    };
    CHECK(can_be(program(false), {1, 0, 1, 0}));
    CHECK(!can_be(program(true), {1, 0, 1, 0}));
}

// A second thread passes on what the first one stored, by a load and a store, or by an update that is relaxed itself.
void passing_on() {
    const auto program = [](bool update) {
        return run({[](Registers&) {
                        store(shared.plain, 1, relaxed);
                        store(shared.x, 1, release);
                    },
                    [=](Registers& r) {
                        if (update) {
                            r[0] = add(shared.x, relaxed);
                        } else {
                            r[0] = load(shared.x, acquire);
                            store(shared.y, 1, release);
                        }
                    },
                    [=](Registers& r) {
                        r[1] = update ? load(shared.x, acquire) == 2 : load(shared.y, acquire);
                        r[2] = load(shared.plain, relaxed);
                    }});
    };
    for (const bool update : {false, true}) {
        const Result result = program(update);
        CHECK(can_be(result, {1, 1, 1}));
        CHECK(!can_be(result, {1, 1, 0}));
    }
}

void updates_are_whole() {
    const Result result = run({[](Registers& r) { r[0] = add(shared.x, relaxed); },
                               [](Registers& r) { r[1] = add(shared.x, relaxed); },
                               [](Registers& r) { r[2] = add(shared.x, relaxed); }});
    CHECK(result.outcomes == (Outcomes{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}}));
    // A store comes before or after an update, never in the middle of it, which would result in {0, 1}.
    const Result with_store = run({[](Registers& r) { r[0] = add(shared.x, relaxed); },
                                   [](Registers& r) {
                                       store(shared.x, 5, relaxed);
                                       r[1] = load(shared.x, relaxed);
                                   }});
    CHECK(with_store.outcomes == (Outcomes{{0, 5}, {5, 5}, {5, 6}}));
}

// Random programs with every kind of step: the reduction must lose none of their outcomes.
void random_programs(int count) {
    std::uint32_t state = 1;
    const auto random = [&](std::uint32_t below) {
        state = state * 1664525u + 1013904223u;
        return (state >> 16) % below;
    };
    constexpr std::memory_order kOrders[] = {relaxed, relaxed, acquire, release, full};
    for (int i = 0; i < count; ++i) {
        std::vector<Program> threads;
        for (std::uint32_t t = 0; t < 2; ++t) {
            std::vector<std::function<std::uint32_t()>> steps;
            for (std::uint32_t length = 3 + random(3); length > 0; --length) {
                std::uint32_t& at = random(2) == 0 ? shared.x : shared.y;
                const std::uint32_t value = 1 + random(3);
                const std::memory_order order = kOrders[random(5)];
                switch (random(7)) {
                    case 0:
                    case 1: steps.push_back([=, &at] { return load(at, order == release ? relaxed : order); }); break;
                    case 2:
                    case 3:
                        steps.push_back([=, &at] {
                            store(at, value, order == acquire ? relaxed : order);
                            return 0u;
                        });
                        break;
                    case 4: steps.push_back([=, &at] { return add(at, order); }); break;
                    case 5:
                        steps.push_back([] {
                            fence(full);
                            return 0u;
                        });
                        break;
                    default:
                        if (random(2) == 0) {
                            steps.push_back([&at] {
                                Explorer::instance().futex_wake(&at);
                                return 0u;
                            });
                        } else {
                            const std::uint32_t expected = random(2);
                            steps.push_back([=, &at] { return 1u + Explorer::instance().futex_wait(&at, expected); });
                        }
                }
            }
            threads.push_back([steps, t](Registers& r) {
                for (const auto& step : steps) r[t] = r[t] * 8 + step();
            });
        }
        run(threads);
    }
}

}  // namespace

int run_litmus_tests() {
    store_buffering();
    message_passing();
    message_passing_by_fences();
    plain_data();
    coherence();
    stores_out_of_order();
    no_load_buffering();
    two_writers_two_readers();
    passing_on();
    updates_are_whole();
    random_programs(1000);
    return programs;
}

}  // namespace memlane::weak
