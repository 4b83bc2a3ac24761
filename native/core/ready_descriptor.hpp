// One descriptor for select, epoll and asyncio: readable when something is ready, or a deadline has passed.
//
// Its process's alone: a forked child closes it.
#pragma once

#include <atomic>
#include <cstdint>

#include "os/clock.hpp"
#include "os/event.hpp"
#include "os/fork.hpp"

namespace memlane::core {

class ReadyDescriptor {
public:
    ReadyDescriptor()
        : event_([] { return os::make_event(); }),
          timer_([] { return os::make_timer(); }),
          poller_([] { return os::make_poller(); }) {
        os::watch(poller_.file(), event_.file());
        os::watch(poller_.file(), timer_.file());
    }

    int fd() const noexcept { return poller_.file().get(); }

    // From any thread. One system call, none while it is set already.
    void set() noexcept {
        if (!is_set_.exchange(true)) os::set_event(event_.file());
    }

    // By whoever looks for what is ready, before looking. Also forgets that a deadline has passed. No system call
    // unless it was set.
    void take() noexcept {
        // Whoever has set it may not have written yet; then it stays set, and is readable soon.
        if (is_set_.load() && os::take_event(event_.file())) is_set_.store(false);
        if (deadline_ != os::Deadline::never() && deadline_.passed(os::monotonic_now())) {
            os::take_event(timer_.file());
            deadline_ = os::Deadline::never();
        }
    }

    // By the same thread as take(). The previous deadline does not count any more.
    void set_at(os::Deadline deadline) {
        if (deadline == deadline_) return;
        os::set_timer(timer_.file(), deadline);
        deadline_ = deadline;
    }

private:
    os::OwnFile event_;
    os::OwnFile timer_;
    os::OwnFile poller_;
    std::atomic<bool> is_set_ = false;
    os::Deadline deadline_ = os::Deadline::never();
};

}  // namespace memlane::core
