// Sleeping on a 32-bit word that several processes map. Shared futexes: the kernel finds the sleepers by file
// and offset, so the mappings may lie at different addresses (FUTEX_PRIVATE_FLAG would find nobody).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
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

// One system call, however many processes sleep.
inline void futex_wake_all(std::uint32_t* word) noexcept {
    ::syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace memlane::os
