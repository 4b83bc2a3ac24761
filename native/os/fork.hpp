// Fork handling: the child gets a new generation number and immediately closes what only its parent may keep open.
#pragma once

#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "os/file.hpp"

namespace memlane::os {

// Incremented in the child at each fork; an object created under another number belongs to an ancestor.
inline std::atomic<std::uint64_t>& fork_generation() noexcept {
    static std::atomic<std::uint64_t> generation{0};
    return generation;
}

// Descriptors that a forked child closes: locks, and connections of libraries. A pthread_atfork handler closes them,
// because it also sees forks that Python does not make. A number that has been reused for another file is left alone.
class ClosedInChildren {
public:
    static ClosedInChildren& all() {
        static auto* const made = [] {
            auto all = std::make_unique<ClosedInChildren>();
            const int error = ::pthread_atfork([] { ClosedInChildren::all().mutex_.lock(); },
                                               [] { ClosedInChildren::all().mutex_.unlock(); },
                                               [] { ClosedInChildren::all().close_in_child(); });
            // Without the handler a child would keep its parent's locks, so no lock may be taken.
            if (error != 0) throw_errno("cannot install a fork handler for descriptors", error);
            return all.release();  // never destroyed: a fork may come after static destructors
        }();
        return *made;
    }

    // While the lock is held, forks wait.
    std::unique_lock<std::mutex> hold() { return std::unique_lock(mutex_); }

    // Call both with the lock held. The inode distinguishes the file from later ones with the same number.
    std::uint64_t add(int fd) {
        struct stat file{};
        if (::fstat(fd, &file) != 0) throw_errno("cannot stat descriptor " + std::to_string(fd));
        open_.insert({fd, file.st_ino});
        return file.st_ino;
    }
    void remove(int fd, std::uint64_t inode) noexcept {
        if (const auto found = open_.find({fd, inode}); found != open_.end()) open_.erase(found);
    }

private:
    void close_in_child() noexcept {
        struct stat file{};
        for (const auto& [fd, inode] : open_)
            if (::fstat(fd, &file) == 0 && file.st_ino == inode) ::close(fd);
        open_.clear();
        fork_generation().fetch_add(1);
        mutex_.unlock();
    }

    std::mutex mutex_;
    std::multiset<std::pair<int, std::uint64_t>> open_;
};

}  // namespace memlane::os
