// One descriptor for select, epoll and asyncio: readable when something is ready, or a deadline has passed.
//
// Its process's alone: a forked child closes it. One thread at a time: the caller locks.
#pragma once

#include <utility>

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

    // One system call, none while it is set already.
    void set() noexcept {
        if (!std::exchange(is_set_, true)) os::set_event(event_.file());
    }

    // By whoever looks for what is ready. Also forgets that a deadline has passed. No system call unless it was readable.
    void take() {
        if (std::exchange(is_set_, false)) os::take_event(event_.file());
        if (deadline_ != os::Deadline::never() && deadline_.passed(os::monotonic_now())) {
            set_at(os::Deadline::never());  // reading it would not: the timer itself may not have noticed yet
        }
    }

    // The previous deadline does not count any more.
    void set_at(os::Deadline deadline) {
        if (deadline == deadline_) return;
        os::set_timer(timer_.file(), deadline);
        deadline_ = deadline;
    }

private:
    os::OwnFile event_;
    os::OwnFile timer_;
    os::OwnFile poller_;
    bool is_set_ = false;
    os::Deadline deadline_ = os::Deadline::never();
};

}  // namespace memlane::core
