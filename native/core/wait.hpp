// The one loop that waits for peers of a segment, for every system and both sides.
//
//   check - spin a little - { register as sleeper - full fence - check again - sleep for a slice - look }
//
// Why no wake-up is lost: the sleeper stores `parked`, then (full fence) loads what it waits for; the waker stores
// that, then (full fence) loads `parked`. At least one of them sees the other. The waker clears `parked` before it
// increments the word, so a sleeper that registers in between is woken by the increment, needlessly at worst. Each
// sleeper has a byte, because a killed sleeper would leave a shared count wrong for ever.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "core/sync.hpp"
#include "os/clock.hpp"
#include "os/futex.hpp"

namespace memlane::core {

inline constexpr os::Nanoseconds kSlice = 100 * os::kMillisecond;
// The slices of a wait that may be long grow up to this, because a death must be reported within a second.
inline constexpr os::Nanoseconds kLongestSlice = 700 * os::kMillisecond;
// Calls that poll in vain check for dead peers at most once in this interval.
inline constexpr os::Nanoseconds kPollInterval = os::kMillisecond;

inline void pause() noexcept {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Spins for about as long as a sleep and a wake-up take, but less often while spinning does not pay: after a spin that
// found nothing, the next 1, 3, 7 ... 255 waits do not spin. It yields the core after every 32 pauses, because the peer
// may need this very core. With more participants than cores that is likely, so a wait that does not spin yields a few
// times before it sleeps. Otherwise writer and readers take turns sleeping, with a futex call on both sides for every
// message (with these yields, 4 readers on 2 cores got 1.3 to 1.7 times as many messages).
class Spinner {
public:
    Spinner(std::size_t participants, unsigned cores) noexcept
        : budget_(participants > cores ? 20'000 : 50'000), yields_(participants > cores ? 3 : 0) {}

    template <class Ready>
    bool spin(Ready&& ready) {
        if (skip_ > 0) {
            --skip_;
            for (int i = 0; i < yields_; ++i) {
                ::sched_yield();
                if (ready()) return true;
            }
            return false;
        }
        const os::Nanoseconds until = os::monotonic_now() + budget_;
        do {
            for (int i = 0; i < 32; ++i) {
                if (ready()) {
                    next_skip_ = 1;
                    return true;
                }
                pause();
            }
            ::sched_yield();
        } while (os::monotonic_now() < until);
        skip_ = next_skip_;
        next_skip_ = std::min(2 * next_skip_ + 1, 255u);
        return false;
    }

private:
    os::Nanoseconds budget_;
    int yields_;
    unsigned skip_ = 0;
    unsigned next_skip_ = 1;
};

// Makes a sleeper look for deaths before its slice is over (deaths.hpp).
class Alarm {
public:
    // Call it before each sleep: whoever has joined since is watched, too.
    virtual void follow() noexcept = 0;
    // True if it has rung since the last time. Call it once the sleeper has parked.
    virtual bool take() noexcept = 0;

protected:
    ~Alarm() = default;
};

// Where a participant sleeps: a futex word that several may share, and a byte of its own that says that it sleeps.
// Without that byte (`parked` null) the waker must always wake. What rings the alarm increments the word, too.
struct WaitPoint {
    std::uint32_t* word;
    std::uint8_t* parked = nullptr;
    Alarm* alarm = nullptr;

    void follow() const noexcept {
        if (alarm != nullptr) alarm->follow();
    }
    bool take_alarm() const noexcept { return alarm != nullptr && alarm->take(); }

    // Returns the word as it is before the byte is set.
    std::uint32_t park() const noexcept {
        // Acquire: a sleeper that sees a waker's increment stores `parked` after that waker has cleared it. Otherwise
        // the clear could arrive later and undo the store, and the next waker would see no sleeper.
        SYNC_LOAD(wake);
        const std::uint32_t seen = load_acquire(*word);
        SYNC_STORE(park);
        if (parked != nullptr) store_relaxed<std::uint8_t>(*parked, 1);
        return seen;
    }
    void unpark() const noexcept {
        if (parked != nullptr) store_relaxed<std::uint8_t>(*parked, 0);
    }
};

// The sleep of one participant at its point.
class SleepAtOne {
public:
    explicit SleepAtOne(WaitPoint point) noexcept : point_(point) {}

    void park() noexcept {
        point_.follow();
        seen_ = point_.park();
    }
    bool take_alarm() const noexcept { return point_.take_alarm(); }
    // True if a signal came.
    bool sleep(os::Nanoseconds until) const noexcept { return os::futex_wait(point_.word, seen_, until); }
    void unpark() const noexcept { point_.unpark(); }

private:
    const WaitPoint point_;
    std::uint32_t seen_ = 0;
};

// The sleep of one thread that is a participant at several points, at most os::kMostFutexes.
class SleepAtAll {
public:
    explicit SleepAtAll(std::vector<WaitPoint> points) : points_(std::move(points)), words_(points_.size()) {}

    void park() noexcept {
        for (std::size_t i = 0; i < points_.size(); ++i) {
            points_[i].follow();
            words_[i].word = points_[i].word;
            words_[i].expected = points_[i].park();
        }
    }
    bool take_alarm() const noexcept {
        bool any = false;
        for (const WaitPoint& point : points_) any |= point.take_alarm();
        return any;
    }
    bool sleep(os::Nanoseconds until) const noexcept {
        errno = 0;
        os::futex_wait_any(words_.data(), words_.size(), until);
        return errno == EINTR;
    }
    void unpark() const noexcept {
        for (const WaitPoint& point : points_) point.unpark();
    }

private:
    const std::vector<WaitPoint> points_;
    std::vector<os::FutexWaiter> words_;
};

enum class WaitResult { ready, timed_out, interrupted };
enum class LookReason { slice, signal, giving_up };

// Waits until ready() is true. Calls `look(reason)` after every slice and alarm, after every signal, and before the wait
// times out; if it returns true, the wait ends as `interrupted`. The first slice takes 100 ms, and each one twice as long as
// the one before as far as longest() allows. If ready() is true at once, there is no system call; if it becomes true
// during the spin, the only system calls are yields of the core.
template <class Sleep, class Ready, class Look, class Longest>
WaitResult wait_asleep(Sleep asleep, Spinner& spinner, os::Deadline deadline, Ready&& ready, Look&& look,
                       Longest longest) {
    if (ready()) return WaitResult::ready;
    if (deadline.is_poll()) {
        if (look(LookReason::giving_up)) return WaitResult::interrupted;
        return ready() ? WaitResult::ready : WaitResult::timed_out;
    }
    if (spinner.spin(ready)) return WaitResult::ready;
    os::Nanoseconds slice = kSlice;
    os::Nanoseconds next_look = os::monotonic_now() + slice;
    for (;;) {
        asleep.park();
        full_fence();
        const bool at_once = ready();
        const bool alarmed = !at_once && asleep.take_alarm();
        const bool signalled = !at_once && !alarmed && asleep.sleep(std::min(next_look, deadline.at()));
        asleep.unpark();
        if (at_once || (!alarmed && ready())) return WaitResult::ready;
        const os::Nanoseconds now = os::monotonic_now();
        const bool is_over = deadline.passed(now);
        if (is_over || signalled || alarmed || now >= next_look) {
            const LookReason reason = is_over     ? LookReason::giving_up
                                      : signalled ? LookReason::signal
                                                  : LookReason::slice;
            if (look(reason)) return WaitResult::interrupted;
            if (ready()) return WaitResult::ready;
            if (is_over) return WaitResult::timed_out;
            if (!alarmed) slice = std::min<os::Nanoseconds>(2 * slice, longest());
            next_look = now + slice;
        }
    }
}

// The same for who sleeps at one point only.
template <class Ready, class Look, class Longest = os::Nanoseconds (*)()>
WaitResult wait_until(WaitPoint point, Spinner& spinner, os::Deadline deadline, Ready&& ready, Look&& look,
                      Longest longest = [] { return kSlice; }) {
    return wait_asleep(SleepAtOne(point), spinner, deadline, ready, look, longest);
}

inline void wake_always(std::uint32_t* word) noexcept {
    SYNC_STORE(wake);
    increment_release(*word);
    os::futex_wake_all(word);
}

// Call it after the store that the sleepers wait for. Costs one fence and one scan, and one system call if anybody
// sleeps. `is_wanted` is called after the fence if anybody sleeps; false leaves them to another waker.
template <class IsWanted = bool (*)()>
void wake_parked(std::uint32_t* word, std::span<std::uint8_t> parked, IsWanted is_wanted = [] { return true; }) noexcept {
    SYNC_LOAD(park);
    full_fence();
    bool any = false;
    for (std::uint8_t& one : parked) {
        if (load_relaxed(one) == 0) continue;
        if (!any && !is_wanted()) return;
        store_relaxed<std::uint8_t>(one, 0);
        any = true;
    }
    if (any) wake_always(word);
}

}  // namespace memlane::core
