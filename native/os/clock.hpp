// Time in nanoseconds of CLOCK_MONOTONIC, which all processes of a host share.
#pragma once

#include <ctime>

#include <compare>
#include <cstdint>

namespace memlane::os {

using Nanoseconds = std::int64_t;

inline constexpr Nanoseconds kMillisecond = 1'000'000;
inline constexpr Nanoseconds kSecond = 1'000'000'000;

// No system call: the kernel answers from the vDSO (about 20 ns).
inline Nanoseconds monotonic_now(clockid_t clock = CLOCK_MONOTONIC) noexcept {
    timespec now{};
    clock_gettime(clock, &now);
    return now.tv_sec * kSecond + now.tv_nsec;
}

// As of the last tick, up to 10 ms ago (about 3 ns): for what happens with every message.
inline Nanoseconds tick_now() noexcept { return monotonic_now(CLOCK_MONOTONIC_COARSE); }

// Processor time of this thread.
inline Nanoseconds thread_time() noexcept { return monotonic_now(CLOCK_THREAD_CPUTIME_ID); }

// The absolute time at which a call times out, computed once on entry.
class Deadline {
public:
    static constexpr Deadline never() noexcept { return Deadline{INT64_MAX}; }
    static Deadline after(Nanoseconds span) noexcept {
        if (span <= 0) return Deadline{0};
        const Nanoseconds now = monotonic_now();
        return span >= INT64_MAX - now ? never() : Deadline{now + span};
    }

    constexpr Nanoseconds at() const noexcept { return at_; }
    constexpr bool passed(Nanoseconds now) const noexcept { return now >= at_; }
    // True if the deadline had passed before the call began: the call checks once and neither spins nor sleeps.
    constexpr bool is_poll() const noexcept { return at_ == 0; }
    friend constexpr auto operator<=>(const Deadline&, const Deadline&) = default;

private:
    constexpr explicit Deadline(Nanoseconds at) noexcept : at_(at) {}
    Nanoseconds at_;
};

}  // namespace memlane::os
