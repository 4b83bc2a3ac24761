#include "explorer.hpp"

#include <algorithm>
#include <bit>

#include "../check.hpp"

namespace memlane::weak {

namespace {

constexpr std::size_t kStack = 256u << 10;
constexpr std::size_t kMostSteps = 5000;

constexpr std::uint32_t bit(std::size_t thread) { return 1u << thread; }

}  // namespace

Explorer Explorer::one_;

void Explorer::Clock::join(const Clock& other) {
    for (std::size_t i = 0; i < kMostThreads; ++i) last[i] = std::max(last[i], other.last[i]);
}

// Independent steps commute: no thread can observe their order. Two stores commute, because in either order each can
// take the same places in the modification order. A load and a store commute, unless the load returns the value of
// that store.
bool Explorer::depend(const Step& a, const Step& b) {
    if (a.kind == Kind::fence && b.kind == Kind::fence) return true;
    if (a.location != b.location || a.location == kNowhere) return false;
    const auto is = [&](Kind one, Kind other) {
        return (a.kind == one && b.kind == other) || (a.kind == other && b.kind == one);
    };
    return is(Kind::store, Kind::update) || is(Kind::update, Kind::update) || is(Kind::wait, Kind::store) ||
           is(Kind::wait, Kind::update) || is(Kind::wait, Kind::wake);
}

// A load before a store cannot return it; a load after it can return the store, and whatever it could before.
bool Explorer::is_missed_by(const Step& store, const Step& load) {
    return load.kind == Kind::load && (store.kind == Kind::store || store.kind == Kind::update) &&
           load.location == store.location;
}

Exploration Explorer::explore(const Scenario& scenario, const Options& options) {
    CHECK(!options.reduced || scenario.threads.size() <= 2);
    scenario_ = &scenario;
    options_ = options;
    path_.clear();
    failure_.reset();
    Exploration result;
    do {
        start_execution();
        ++result.executions;
        result.most_steps = std::max<std::uint64_t>(result.most_steps, depth_);
        if (is_complete_ && !failure_) scenario.finish();
    } while (!failure_ && next_execution());
    result.failure = failure_;
    return result;
}

void Explorer::start_execution() {
    scenario_->prepare();
    memory_.reset(scenario_->watched);
    for (const Watched& one : scenario_->atomics) memory_.location(one.begin, one.bytes);
    events_.clear();
    for (auto& location : last_)
        for (auto& thread : location) thread.fill(kNever);
    futexes_.fill({});
    depth_ = 0;
    asleep_ = 0;
    untried_from_.fill(0);
    is_complete_ = false;
    for (std::size_t i = 0; i < scenario_->threads.size(); ++i) {
        Fiber& fiber = fibers_[i];
        fiber.stack.resize(kStack);
        fiber.next = {};
        fiber.is_done = false;
        fiber.waits_for = kNowhere;
        fiber.clock.last.fill(kNever);
        fiber.place = {};
        fiber.place_used = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, &Explorer::run_fiber, 0);
    }
    const std::size_t first = pick();
    if (first == kNobody) return;
    running_ = first;
    swapcontext(&main_, &fibers_[first].context);
    running_ = kNobody;
}

void Explorer::run_fiber() {
    Explorer& explorer = instance();
    const std::size_t own = explorer.running_;
    explorer.scenario_->threads[own]();
    explorer.fibers_[own].is_done = true;
    explorer.hand_over();
}

// Advances the latest decision that has an outcome or a thread left to try, and drops all later decisions.
bool Explorer::next_execution() {
    while (!path_.empty()) {
        Decision& last = path_.back();
        if (last.way + 1 < last.ways) {
            ++last.way;
            return true;
        }
        last.tried |= bit(last.thread);
        const Threads left = last.to_try & last.enabled & ~last.tried & ~last.asleep;
        if (left != 0) {
            last.thread = static_cast<std::size_t>(std::countr_zero(left));
            last.way = 0;
            last.ways = 1;
            return true;
        }
        path_.pop_back();
    }
    return false;
}

void Explorer::arrive(Step step) {
    fibers_[running_].next = step;
    hand_over();
}

std::size_t Explorer::choose(const std::vector<std::size_t>& ways) {
    Decision& decision = path_[depth_ - 1];
    CHECK(!ways.empty() && (decision.ways == ways.size() || decision.way == 0));  // otherwise not deterministic
    decision.ways = ways.size();
    return ways[decision.way];
}

// Switches to the fiber whose turn it is, which may be the same one, or back to explore() at the end.
void Explorer::hand_over() {
    const std::size_t own = running_;
    const std::size_t next = pick();
    if (next == own) return;
    running_ = next;
    swapcontext(&fibers_[own].context, next == kNobody ? &main_ : &fibers_[next].context);
}

std::size_t Explorer::pick() {
    if (depth_ == kMostSteps) {
        failure_ = Failure{"endless", "more than " + std::to_string(kMostSteps) + " steps", trace()};
        return kNobody;
    }
    if (depth_ == path_.size()) {
        Decision made{};
        bool all_done = true;
        for (std::size_t i = 0; i < scenario_->threads.size(); ++i) {
            const Fiber& fiber = fibers_[i];
            all_done &= fiber.is_done;
            if (!fiber.is_done && fiber.waits_for == kNowhere) made.enabled |= bit(i);
            made.next[i] = fiber.next;
        }
        if (made.enabled == 0) {
            is_complete_ = all_done;
            if (!all_done) failure_ = Failure{"lost wake-up", "who is left sleeps, and nobody will wake him", trace()};
            return kNobody;
        }
        if (options_.reduced) {
            made.asleep = asleep_;
            made.untried_from = untried_from_;
            for (std::size_t i = 0; i < scenario_->threads.size(); ++i)
                if (made.untried_from[i] > 0 &&
                    memory_.to_load(i, made.next[i].location, made.untried_from[i]).empty())
                    made.asleep |= bit(i);
        }
        const Threads candidates = made.enabled & ~made.asleep;
        if (candidates == 0) return kNobody;  // all that could follow was tried before
        const bool stays = running_ != kNobody && (candidates & bit(running_)) != 0;
        made.thread = stays ? running_ : static_cast<std::size_t>(std::countr_zero(candidates));
        made.to_try = options_.reduced ? bit(made.thread) : made.enabled;
        for (std::size_t i = 0; i < scenario_->threads.size(); ++i) {
            if ((candidates & bit(i)) == 0 || made.next[i].kind != Kind::local) continue;
            made.thread = i;  // independent of the other threads, so at once
            made.to_try = bit(i);
        }
        path_.push_back(made);
    }
    Decision& decision = path_[depth_];
    const Step& step = decision.next[decision.thread];
    note_dependencies(decision, step);
    pass_on_sleep(decision, step);
    ++depth_;
    return decision.thread;
}

// Computes what sleeps at the next decision, after the thread of this one has taken its step.
void Explorer::pass_on_sleep(const Decision& decision, const Step& step) {
    asleep_ = 0;
    untried_from_.fill(0);
    for (std::size_t i = 0; i < scenario_->threads.size(); ++i) {
        if (i == decision.thread) continue;
        const bool is_tried = (decision.tried & bit(i)) != 0;
        if (decision.next[i].kind == Kind::load) {
            untried_from_[i] = is_tried ? memory_.count(decision.next[i].location) : decision.untried_from[i];
        } else if ((is_tried || (decision.asleep & bit(i)) != 0) && !depend(decision.next[i], step)) {
            asleep_ |= bit(i);
        }
    }
}

// The last step of `thread` that has the relation to `step`.
std::int32_t Explorer::last_of(std::size_t thread, const Step& step, bool (*relation)(const Step&, const Step&)) const {
    const auto& at = last_[step.location == kNowhere ? kMostLocations : step.location][thread];
    std::int32_t last = kNever;
    for (std::size_t kind = 0; kind < kKinds; ++kind)
        if (relation(step, {static_cast<Kind>(kind), step.location})) last = std::max(last, at[kind]);
    return last;
}

// If the step depends on an earlier step of another thread, or is a store that an earlier load missed, and did not have
// to come after it, it is to be tried before it, too.
void Explorer::note_dependencies(Decision& decision, const Step& step) {
    const std::size_t own = decision.thread;
    Clock& clock = fibers_[own].clock;
    const Clock before = clock;
    for (std::size_t other = 0; other < scenario_->threads.size(); ++other) {
        if (other == own) continue;
        const std::int32_t dependent = last_of(other, step, depend);
        for (const std::int32_t last : {dependent, last_of(other, step, is_missed_by)}) {
            if (last <= before.last[other]) continue;
            path_[static_cast<std::size_t>(last)].to_try |= bit(own);
        }
        if (dependent != kNever) clock.join(path_[static_cast<std::size_t>(dependent)].clock);
    }
    clock.last[own] = static_cast<std::int32_t>(depth_);
    decision.clock = clock;
    last_[step.location == kNowhere ? kMostLocations : step.location][own][static_cast<std::size_t>(step.kind)] =
        clock.last[own];
}

}  // namespace memlane::weak
