// Being woken when something happens to a file: it grows, its name goes, somebody closes it or calls `notify_watchers`.
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

// Register first, then look at what is waited for, then wait: what happens in between ends the wait. A user may have only
// so many watches (fs.inotify.max_user_instances); without one, a wait just lasts to its end. A death closes the file a
// moment before its locks go, so a wait for a lock is one in slices, too.
class FileWatch {
public:
    explicit FileWatch(int file) noexcept {
        char path[48];
        std::snprintf(path, sizeof path, "/proc/self/fd/%d", file);
        add(path, 0);
    }
    // Without opening it.
    explicit FileWatch(const std::string& path) noexcept { add(path.c_str(), IN_DONT_FOLLOW); }

    // Returns at an event, a signal, or when the time is over.
    void wait(Nanoseconds span) const noexcept {
        pollfd events{events_.get(), POLLIN, 0};
        ::poll(&events, events_.is_open() ? 1 : 0, static_cast<int>(std::max<Nanoseconds>(span, 0) / kMillisecond));
        char drained[4096];
        while (events_.is_open() && ::read(events_.get(), drained, sizeof drained) > 0) {
        }
    }

private:
    void add(const char* path, std::uint32_t how) noexcept {
        const std::uint32_t what = IN_MODIFY | IN_ATTRIB | IN_CLOSE_WRITE;
        if (events_.is_open() && ::inotify_add_watch(events_.get(), path, what | how) < 0) events_.close();
    }

    FileDescriptor events_{::inotify_init1(IN_CLOEXEC | IN_NONBLOCK)};
};

}  // namespace memlane::os
