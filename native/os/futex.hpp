// Sleeping on a 32-bit word that several processes map. Shared futexes: the kernel finds the sleepers by file
// and offset, so the mappings may lie at different addresses (FUTEX_PRIVATE_FLAG would find nobody).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <ctime>

#include "os/clock.hpp"

namespace memlane::os {

// Sleeps while *word == expected, at most until `until` on CLOCK_MONOTONIC. May wake spuriously. True if a signal came.
inline bool futex_wait(std::uint32_t* word, std::uint32_t expected, Nanoseconds until) noexcept {
    const timespec at{until / kSecond, until % kSecond};
    const long rc = ::syscall(SYS_futex, word, FUTEX_WAIT_BITSET, expected, &at, nullptr, FUTEX_BITSET_MATCH_ANY);
    return rc != 0 && errno == EINTR;
}

// For futex_wait_any, as the kernel has it (`struct futex_waitv`, Linux 5.16), which older headers lack.
struct FutexWaiter {
    std::uint64_t expected = 0;
    std::uint32_t* word = nullptr;
    std::uint32_t flags = 2;  // FUTEX_32, shared
    std::uint32_t reserved = 0;
};
static_assert(sizeof(FutexWaiter) == 24 && sizeof(void*) == 8);
inline constexpr long kFutexWaitv = 449;  // on every architecture
inline constexpr std::size_t kMostFutexes = 128;

// Sleeps while all words are as expected, at most until `until` on CLOCK_MONOTONIC. May wake spuriously. False if the system
// refuses the call.
inline bool futex_wait_any(const FutexWaiter* words, std::size_t count, Nanoseconds until) noexcept {
    const timespec at{until / kSecond, until % kSecond};
    if (::syscall(kFutexWaitv, words, count, 0, &at, CLOCK_MONOTONIC) >= 0) return true;
    return errno == EAGAIN || errno == ETIMEDOUT || errno == EINTR || errno == EFAULT;  // unmapped by now
}

// True if the system has it, and allows it.
inline bool has_futex_waitv() noexcept {
    return ::syscall(kFutexWaitv, nullptr, 0, 0, nullptr, CLOCK_MONOTONIC) != 0 && errno == EINVAL;
}

// One system call, however many processes sleep.
inline void futex_wake_all(std::uint32_t* word) noexcept {
    ::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace memlane::os
