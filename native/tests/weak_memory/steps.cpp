// The part of the explorer that fibers call: carries out their steps when it is their turn.
#include <algorithm>
#include <cstring>

#include "../check.hpp"
#include "explorer.hpp"

namespace memlane::weak {

// A load depends on the store that it returns.
void Explorer::note_source(const Message& read) {
    if (read.step == kInitial) return;
    fibers_[running_].clock.join(path_[read.step].clock);
    path_[depth_ - 1].clock = fibers_[running_].clock;
}

// Marks name the next access with an order; several in a row name the same one.
void Explorer::come_to(const char* point) {
    if (std::strchr(point, '.') == nullptr) return;  // a SYNC_STEP is no access
    Fiber& fiber = fibers_[running_];
    if (fiber.place_used) fiber.place = {};
    fiber.place_used = false;
    auto& points = fiber.place.points;
    const auto free = std::find(points.begin(), points.end(), nullptr);
    CHECK(free != points.end());
    *free = point;
}

bool Explorer::is_at(const Place& place, const std::string& name) const {
    for (const char* point : place.points)
        if (point != nullptr && name == point + std::string(place.is_fence ? " fence" : "")) return true;
    return false;
}

Order Explorer::order_here(Order asked, Place& place) {
    Fiber& fiber = fibers_[running_];
    fiber.place_used = true;
    if (asked == Order::relaxed) return asked;
    place = fiber.place;
    fiber.place = {};
    if (place.points[0] == nullptr && options_.named_only) fail("unnamed", "an access has an order but no name");
    place.is_fence = asked == Order::full;
    place.is_weakened = is_at(place, options_.weakened);
    return place.is_weakened ? Order::relaxed : asked;
}

std::uint64_t Explorer::load(const void* address, std::size_t bytes, Order order) {
    const Step step{Kind::load, memory_.location(address, bytes)};
    Place place;
    const Order here = order_here(order, place);
    arrive(step);
    const auto& ways = memory_.to_load(running_, step.location, path_[depth_ - 1].untried_from[running_]);
    const std::size_t index = choose(ways);
    const Message& read = memory_.load(running_, step.location, index, here);
    note_source(read);
    record(step, read.value, index + 1 == memory_.count(step.location), place);
    return read.value;
}

void Explorer::store(void* address, std::size_t bytes, std::uint64_t value, Order order) {
    const Step step{Kind::store, memory_.location(address, bytes)};
    Place place;
    const Order here = order_here(order, place);
    arrive(step);
    const std::size_t behind = choose(memory_.to_store(running_, step.location));
    record(step, value, behind + 1 == memory_.count(step.location), place);
    memory_.store(running_, step.location, behind, value, here, depth_ - 1);
}

std::uint64_t Explorer::add(void* address, std::size_t bytes, std::uint64_t amount, Order order) {
    const Step step{Kind::update, memory_.location(address, bytes)};
    Place place;
    const Order here = order_here(order, place);
    arrive(step);
    const std::size_t behind = choose(memory_.to_store(running_, step.location));
    const bool is_usual = behind + 1 == memory_.count(step.location);
    const std::uint64_t before = memory_.add(running_, step.location, behind, amount, here, depth_ - 1);
    record(step, before + amount, is_usual, place);
    return before;
}

void Explorer::fence(Order order) {
    Place place;
    const Order here = order_here(order, place);
    const Step step{here == Order::full ? Kind::fence : Kind::local, kNowhere};
    arrive(step);
    memory_.fence(running_, here);
    record(step, 0, true, place);
}

// Whether accesses race does not depend on which came first, so plain accesses need no decision.
void Explorer::plain(const void* address, std::size_t bytes, bool is_write) {
    if (!memory_.is_watched(address, bytes)) return;
    switch (memory_.plain(running_, address, bytes, is_write)) {
        case Memory::Verdict::fine: return;
        case Memory::Verdict::race:
            fail("data race", std::string(is_write ? "a write to " : "a read of ") + scenario_->name_of(address));
        case Memory::Verdict::mixed: fail("data race", "a plain access to the atomic " + scenario_->name_of(address));
    }
}

void Explorer::read_by_kernel(const std::byte* address, std::size_t bytes, std::byte* to) {
    for (std::size_t i = 0; i < bytes; ++i)
        if (memory_.plain(running_, address + i, 1, false) == Memory::Verdict::race)
            fail("data race", "a read of " + scenario_->name_of(address + i));
    for (const Watched& one : scenario_->atomics) {
        if (one.begin < address || one.begin + one.bytes > address + bytes) continue;
        const std::uint64_t value = load(one.begin, one.bytes, Order::relaxed);
        std::copy_n(reinterpret_cast<const std::byte*>(&value), one.bytes, to + (one.begin - address));
    }
}

// The kernel compares and falls asleep under a lock that wakers take, too. Of what this lock orders, the model assumes
// only what is promised: a sleeper that comes after a waker finds the word as the waker left it.
bool Explorer::futex_wait(const std::uint32_t* word, std::uint32_t expected) {
    const std::size_t at = memory_.location(word, sizeof *word);
    const Step step{Kind::wait, at};
    arrive(step);
    const std::size_t index = choose(memory_.to_load(running_, at, 0, futexes_[at].times[at]));
    const std::uint64_t value = memory_.load(running_, at, index, Order::relaxed).value;
    record(step, value, index + 1 == memory_.count(at), {});
    if (value != expected) return false;
    fibers_[running_].waits_for = at;
    fibers_[running_].next = {};
    hand_over();
    return true;
}

void Explorer::futex_wake(const std::uint32_t* word) {
    const std::size_t at = memory_.location(word, sizeof *word);
    arrive({Kind::wake, at});
    record({Kind::wake, at}, 0, true, {});
    futexes_[at].times[at] = std::max(futexes_[at].times[at], memory_.view_of(running_).times[at]);
    const Clock& own = fibers_[running_].clock;
    for (Fiber& fiber : fibers_) {
        if (fiber.waits_for != at) continue;
        fiber.waits_for = kNowhere;
        fiber.clock.join(own);
    }
}

void Explorer::fail(const std::string& what, const std::string& detail) {
    const std::size_t own = running_;
    failure_ = Failure{what, "thread " + std::to_string(own) + ": " + detail, trace()};
    running_ = kNobody;
    swapcontext(&fibers_[own].context, &main_);
    std::abort();  // never resumed
}

void Explorer::record(const Step& step, std::uint64_t value, bool is_usual, const Place& place) {
    events_.push_back({running_, step, value, is_usual, place});
}

std::vector<std::string> Explorer::trace() const {
    static constexpr const char* kNames[kKinds] = {"no fence", "load",       "store",     "update",
                                                   "fence",    "futex wait", "futex wake"};
    std::vector<std::string> lines;
    for (const Event& event : events_) {
        std::string line = "thread " + std::to_string(event.thread) + "  " +
                           kNames[static_cast<std::size_t>(event.step.kind)];
        if (event.step.location != kNowhere) {
            line += " " + scenario_->name_of(memory_.address_of(event.step.location));
            if (event.step.kind != Kind::wake) line += " = " + std::to_string(event.value);
            if (!event.is_usual) line += event.step.kind == Kind::store ? " (not the last)" : " (stale)";
        }
        for (const char* point : event.place.points)
            if (point != nullptr) line += std::string("  ") + point;
        if (event.place.is_weakened) line += "  WEAKENED";
        lines.push_back(line);
    }
    return lines;
}

}  // namespace memlane::weak
