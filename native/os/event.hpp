// Descriptors that become readable: when somebody says so, at a time, when a process has ended, or when one of several is.
#pragma once

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <optional>
#include <string>

#include "os/clock.hpp"
#include "os/file.hpp"

namespace memlane::os {

inline FileDescriptor make_event() {
    FileDescriptor event = beyond_standard_streams(FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)));
    if (!event.is_open()) throw_errno("cannot make an eventfd");
    return event;
}

// Any number of them is one until it is taken.
inline void set_event(const FileDescriptor& event) noexcept {
    const std::uint64_t one = 1;
    // Refused only if the counter is at its end, and then it is readable anyway.
    [[maybe_unused]] const ssize_t written = ::write(event.get(), &one, sizeof one);
}

// Not readable any more.
inline void take_event(const FileDescriptor& event) noexcept {
    std::uint64_t count;
    [[maybe_unused]] const ssize_t taken = ::read(event.get(), &count, sizeof count);
}

inline FileDescriptor make_timer() {
    FileDescriptor timer =
        beyond_standard_streams(FileDescriptor(::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)));
    if (!timer.is_open()) throw_errno("cannot make a timerfd");
    return timer;
}

// Readable from then on; not at all, also if it was, with Deadline::never().
inline void set_timer(const FileDescriptor& timer, Deadline at) {
    itimerspec when{};
    if (at != Deadline::never()) {
        const Nanoseconds time = at.is_poll() ? 1 : at.at();  // 0 would disarm it
        when.it_value = {static_cast<time_t>(time / kSecond), static_cast<long>(time % kSecond)};
    }
    if (::timerfd_settime(timer.get(), TFD_TIMER_ABSTIME, &when, nullptr) != 0) throw_errno("cannot set a timerfd");
}

inline FileDescriptor make_poller() {
    FileDescriptor poller = beyond_standard_streams(FileDescriptor(::epoll_create1(EPOLL_CLOEXEC)));
    if (!poller.is_open()) throw_errno("cannot make an epoll descriptor");
    return poller;
}

// Readable once the process has ended, all its threads, and its files are closed. Throws if there is none, or if the system
// refuses (before Linux 5.3, or in a container that forbids it).
inline FileDescriptor open_process(std::uint64_t pid) {
    constexpr long kPidfdOpen = 434;  // on every architecture; older headers lack it
    const long made = ::syscall(kPidfdOpen, static_cast<pid_t>(pid), 0);
    FileDescriptor process = beyond_standard_streams(FileDescriptor(static_cast<int>(made)));
    if (!process.is_open()) throw_errno("cannot watch process " + std::to_string(pid));
    return process;
}

// False if the descriptor is among the last half of those that this process may have: they are the application's.
inline bool leaves_enough(const FileDescriptor& file) noexcept {
    rlimit most{};
    return ::getrlimit(RLIMIT_NOFILE, &most) != 0 || static_cast<rlim_t>(file.get()) < most.rlim_cur / 2;
}

// The poller is readable while the other is; wait_for_event() then returns `number`, once if it is not 0: a copy of `other`
// in another process would keep it readable after its close here.
inline void watch(const FileDescriptor& poller, const FileDescriptor& other, std::uint64_t number = 0) {
    epoll_event event{};
    event.events = number != 0 ? EPOLLIN | EPOLLONESHOT : EPOLLIN;
    event.data.u64 = number;
    if (::epoll_ctl(poller.get(), EPOLL_CTL_ADD, other.get(), &event) != 0) throw_errno("cannot watch a descriptor");
}

// Waits until something that the poller watches is readable; returns the number of one. Nothing if the poller was closed.
inline std::optional<std::uint64_t> wait_for_event(const FileDescriptor& poller) noexcept {
    epoll_event event{};
    for (;;) {
        if (::epoll_wait(poller.get(), &event, 1, -1) == 1) return std::uint64_t{event.data.u64};
        if (errno != EINTR) return std::nullopt;
    }
}

}  // namespace memlane::os
