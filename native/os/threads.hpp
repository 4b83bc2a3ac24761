// Threads that help with one piece of work: nothing that a fork could lose, and nothing to keep.
#pragma once

#include <unistd.h>

#include <exception>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "os/process.hpp"

namespace memlane::os {

// Gone with the work.
class Helpers {
public:
    // Runs a copy of `work` on so many threads beside the caller's. They take no signals: handlers run where they always did.
    // Where the system has no more threads there are fewer helpers; `missing()` says how many.
    template <class Work>
    Helpers(unsigned count, const Work& work) : owner_(::getpid()) {
        if (count == 0) return;
        threads_.reserve(count);
        const SignalsBlocked blocked;
        try {
            for (unsigned i = 0; i < count; ++i) threads_.emplace_back(work);
        } catch (const std::system_error&) {  // those that run do the work, or the caller alone
        }
        missing_ = count - static_cast<unsigned>(threads_.size());
    }
    Helpers(const Helpers&) = delete;
    Helpers& operator=(const Helpers&) = delete;
    ~Helpers() { join(); }

    unsigned missing() const noexcept { return missing_; }

    // False in a child that was forked while they ran: it has the calling thread alone, and half of the work.
    bool are_here() const noexcept { return ::getpid() == owner_; }

    void join() noexcept {
        if (!threads_.empty() && !are_here()) new std::vector<std::thread>(std::move(threads_));  // nothing to join there
        for (std::thread& thread : threads_) thread.join();
        threads_.clear();
    }

private:
    std::vector<std::thread> threads_;
    pid_t owner_;
    unsigned missing_ = 0;
};

// Runs `work` on a thread that nobody waits for and that takes no signals. False where the system has no more threads.
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
