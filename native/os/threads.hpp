// Threads that help with one piece of work and end with it. No thread is kept, so a fork loses none.
#pragma once

#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <exception>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "os/clock.hpp"
#include "os/process.hpp"

namespace memlane::os {

// Threads that share one piece of work with the caller.
class Helpers {
public:
    // Runs a copy of `work` on `count` threads besides the caller's. They block signals, so handlers run in the same
    // threads as before. If the system has no more threads, or no memory for them, fewer are started; `missing()` says how many fewer.
    template <class Work>
    Helpers(unsigned count, const Work& work) : owner_(::getpid()) {
        if (count == 0) return;
        threads_.reserve(count);
        const SignalsBlocked blocked;
        try {
            for (unsigned i = 0; i < count; ++i) threads_.emplace_back(work);
        } catch (const std::exception&) {  // no thread, or no memory for one: those that run do the work, or the caller alone
        }
        missing_ = count - static_cast<unsigned>(threads_.size());
    }
    Helpers(const Helpers&) = delete;
    Helpers& operator=(const Helpers&) = delete;
    ~Helpers() { join(); }

    unsigned missing() const noexcept { return missing_; }
    std::size_t started() const noexcept { return threads_.size(); }

    // False in a child that was forked while they ran: the child has only the forking thread, and unfinished work.
    bool are_here() const noexcept { return ::getpid() == owner_; }

    void join() noexcept {
        if (!threads_.empty() && !are_here()) new std::vector<std::thread>(std::move(threads_));  // a child has none to join
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }

private:
    std::vector<std::thread> threads_;
    pid_t owner_;
    unsigned missing_ = 0;
};

// By numbers: glibc 2.28 has no functions for these two calls.
inline std::int64_t own_thread() noexcept { return ::syscall(SYS_gettid); }

// Waits until the system no longer counts a thread that was joined: a moment, or until it gets a processor. By yields, because
// nothing tells.
inline void until_gone(std::int64_t thread) noexcept {
    const Nanoseconds end = monotonic_now() + 100 * kMillisecond;
    while (::syscall(SYS_tgkill, ::getpid(), thread, 0) == 0 && monotonic_now() < end) ::sched_yield();
}

// Runs `work` on a detached thread that blocks signals. False if the system has no more threads.
template <class Work>
bool run_detached(Work work) {
    const SignalsBlocked blocked;
    try {
        std::thread(std::move(work)).detach();
        return true;
    } catch (const std::exception&) {  // no thread, or no memory for one
        return false;
    }
}

}  // namespace memlane::os
