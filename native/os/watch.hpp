// Waits for events of a file: it grows, its name is removed, somebody closes it or calls `notify_watchers`.
#pragma once

#include <poll.h>
#include <sys/inotify.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>

#include "os/clock.hpp"
#include "os/file.hpp"

namespace memlane::os {

// Register first, then check the condition, then wait: an event in between ends the wait. A user can have only a
// limited number of instances (fs.inotify.max_user_instances); without one, a wait lasts its full span. When a process
// dies, the kernel closes its files a moment before it drops their locks, so wait for a lock in slices, too.
class FileWatch {
public:
    explicit FileWatch(int file) noexcept {
        char path[48];
        std::snprintf(path, sizeof path, "/proc/self/fd/%d", file);
        add(path, 0);
    }
    // Watches a file without opening it.
    explicit FileWatch(const std::string& path) noexcept { add(path.c_str(), IN_DONT_FOLLOW); }

    // Returns on an event, on a signal, or after `span`, rounded up: callers would spin through its last millisecond.
    void wait(Nanoseconds span) const noexcept {
        pollfd events{events_.get(), POLLIN, 0};
        const auto milliseconds = (std::max<Nanoseconds>(span, 0) + kMillisecond - 1) / kMillisecond;
        ::poll(&events, events_.is_open() ? 1 : 0, static_cast<int>(milliseconds));
        char drained[4096];
        while (events_.is_open() && ::read(events_.get(), drained, sizeof drained) > 0) {
        }
    }

private:
    void add(const char* path, std::uint32_t how) noexcept {
        const std::uint32_t what = IN_MODIFY | IN_ATTRIB | IN_CLOSE_WRITE;
        if (events_.is_open() && ::inotify_add_watch(events_.get(), path, what | how) < 0) events_.close();
    }

    FileDescriptor events_ = beyond_standard_streams(FileDescriptor(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK)));
};

}  // namespace memlane::os
