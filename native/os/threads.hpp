// Threads that help with one piece of work and are gone with it: nothing that a fork could lose, and nothing to keep.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <system_error>
#include <thread>
#include <vector>

namespace memlane::os {

class Helpers {
public:
    // Runs `work()` on so many threads beside the caller's. They take no signals: handlers run where they always did.
    // Where the system has no more threads there are fewer helpers; `missing()` says how many.
    template <class Work>
    Helpers(unsigned count, const Work& work) : owner_(::getpid()) {
        if (count == 0) return;
        sigset_t all;
        sigset_t before;
        ::sigfillset(&all);
        threads_.reserve(count);
        ::pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (unsigned i = 0; i < count; ++i) threads_.emplace_back([&work] { work(); });
        } catch (const std::system_error&) {  // those that run do the work, or the caller alone
        }
        ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
        missing_ = count - static_cast<unsigned>(threads_.size());
    }
    Helpers(const Helpers&) = delete;
    Helpers& operator=(const Helpers&) = delete;
    ~Helpers() { join(); }

    unsigned missing() const noexcept { return missing_; }

    // False in a child that was forked while they ran: it has the calling thread alone, and half of the work.
    bool are_here() const noexcept { return ::getpid() == owner_; }

    void join() noexcept {
        const bool here = threads_.empty() || are_here();
        for (std::thread& thread : threads_) here ? thread.join() : thread.detach();
        threads_.clear();
    }

private:
    std::vector<std::thread> threads_;
    pid_t owner_;
    unsigned missing_ = 0;
};

}  // namespace memlane::os
