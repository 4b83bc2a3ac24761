// Descriptors that become readable: when somebody says so, at a time, or when one of several is.
#pragma once

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cstdint>

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

// The poller is readable while the other is.
inline void watch(const FileDescriptor& poller, const FileDescriptor& other) {
    epoll_event event{};
    event.events = EPOLLIN;
    if (::epoll_ctl(poller.get(), EPOLL_CTL_ADD, other.get(), &event) != 0) throw_errno("cannot watch a descriptor");
}

}  // namespace memlane::os
