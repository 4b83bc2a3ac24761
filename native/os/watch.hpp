// Waits for events of a file: it grows, its name is removed, somebody closes it or calls `notify_watchers`. Or for names that
// come to a folder and leave it.
#pragma once

#include <poll.h>
#include <sys/inotify.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "os/clock.hpp"
#include "os/file.hpp"
#include "os/fork.hpp"

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

// The names of a folder, also after it was moved.
class FolderWatch {
public:
    struct Event {
        std::string name;  // empty: the folder itself
        bool is_gone;      // deleted or moved away; else a file of that name was moved here, or replaced
    };

    // Throws system_error: there is no such folder, or no instance for this user any more (fs.inotify.max_user_instances).
    explicit FolderWatch(const std::string& path)
        : events_([] {
              FileDescriptor made = beyond_standard_streams(FileDescriptor(::inotify_init1(IN_CLOEXEC | IN_NONBLOCK)));
              if (!made.is_open()) throw_errno("cannot watch a folder");
              return made;
          }) {
        const std::uint32_t what = IN_MOVED_TO | IN_MOVED_FROM | IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF | IN_ONLYDIR;
        if (::inotify_add_watch(events_.file().get(), path.c_str(), what) < 0) throw_errno("cannot watch " + path);
    }

    // Readable once something has happened.
    int descriptor() const noexcept { return events_.file().get(); }

    // Waits for what happens next; nothing once `end` is readable.
    std::vector<Event> wait(const FileDescriptor& end) const noexcept {
        for (;;) {
            pollfd both[] = {{events_.file().get(), POLLIN, 0}, {end.get(), POLLIN, 0}};
            if (::poll(both, 2, -1) < 0 && errno != EINTR) return {};
            if (both[1].revents != 0) return {};
            if (std::vector<Event> seen = read(); !seen.empty()) return seen;
        }
    }

private:
    std::vector<Event> read() const noexcept {
        std::vector<Event> seen;
        alignas(inotify_event) char read[4096];
        ssize_t bytes;
        while ((bytes = ::read(events_.file().get(), read, sizeof read)) > 0) {
            for (const char* at = read; at < read + bytes;) {
                inotify_event event;
                std::memcpy(&event, at, sizeof event);
                const bool is_gone = (event.mask & (IN_MOVED_FROM | IN_DELETE | IN_DELETE_SELF | IN_MOVE_SELF)) != 0;
                if (is_gone || (event.mask & IN_MOVED_TO) != 0) seen.push_back({event.len > 0 ? at + sizeof event : "", is_gone});
                at += sizeof event + event.len;
            }
        }
        return seen;
    }

    OwnFile events_;
};

}  // namespace memlane::os
