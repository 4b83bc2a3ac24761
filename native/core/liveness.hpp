// The lock by which a process is known to live, on an open file description of its own.
//
// Never on the descriptor that is mapped: a mapping keeps its description open, so the lock would outlive close()
// with views, and outlive a parent whose forked child keeps the mapping. And never shared with a child: the child
// closes its copy in a pthread_atfork handler (which also sees forks that Python does not make), without
// unlocking, because unlocking in a child drops the parent's lock.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "core/layout.hpp"
#include "os/file_lock.hpp"

namespace memlane::core {

// How often this process came into being by fork; an object made under another number belongs to an ancestor.
inline std::atomic<std::uint64_t>& fork_generation() noexcept {
    static std::atomic<std::uint64_t> generation{0};
    return generation;
}

namespace detail {

struct LockDescriptors {
    std::mutex mutex;
    std::set<int> open;
};

inline LockDescriptors& lock_descriptors() {
    static auto* const all = [] {
        auto made = std::make_unique<LockDescriptors>();
        const int error = ::pthread_atfork([] { lock_descriptors().mutex.lock(); },
                                           [] { lock_descriptors().mutex.unlock(); },
                                           [] {
                                               LockDescriptors& child = lock_descriptors();
                                               for (const int fd : child.open) ::close(fd);
                                               child.open.clear();
                                               fork_generation().fetch_add(1);
                                               child.mutex.unlock();
                                           });
        // Without it a child would keep its parent's locks: nothing may be locked then.
        if (error != 0) os::throw_errno("cannot have the locks looked after at a fork", error);
        return made.release();  // never destroyed: a fork may come after static destructors
    }();
    return *all;
}

}  // namespace detail

class LivenessLock {
public:
    LivenessLock() noexcept = default;
    // Opens the description and nothing else; `take` holds bytes through it.
    explicit LivenessLock(const os::FileDescriptor& segment) {
        detail::LockDescriptors& all = detail::lock_descriptors();
        const std::lock_guard guard(all.mutex);
        file_ = os::reopen(segment);
        generation_ = fork_generation().load();
        all.open.insert(file_.get());
    }
    LivenessLock(LivenessLock&&) noexcept = default;
    LivenessLock& operator=(LivenessLock&& other) noexcept {
        release();
        file_ = std::move(other.file_);
        generation_ = other.generation_;
        return *this;
    }
    ~LivenessLock() { release(); }

    bool take_slot(std::size_t slot) { return os::try_lock(file_, os::LockKind::exclusive, byte_of(slot)); }
    bool take_user() { return os::try_lock(file_, os::LockKind::shared, {kUserLock, 1}); }
    // For removal: nobody at all uses the segment.
    bool take_all() { return os::try_lock(file_, os::LockKind::exclusive, {kLockBase, kLockSpan}); }
    // Not to be called in a forked child.
    void give_up_all() { os::unlock(file_, {kLockBase, kLockSpan}); }
    bool is_open() const noexcept { return file_.is_open(); }
    const os::FileDescriptor& file() const noexcept { return file_; }
    // Does another description hold the slot? A system call (1.2 us).
    bool is_held_by_other(std::size_t slot) const { return os::is_locked(file_, byte_of(slot)); }

    // For systems that give bytes of their own a meaning. Not to be called in a forked child.
    bool take(os::LockKind kind, os::LockRange range) { return os::try_lock(file_, kind, range); }
    void give_up(os::LockRange range) { os::unlock(file_, range); }
    std::optional<os::LockRange> held_by_other(os::LockRange range) const { return os::find_lock(file_, range); }

    // Gives up everything held through this description at once. In a forked child it is closed already, and its
    // number may belong to somebody else by now.
    void release() noexcept {
        if (!file_.is_open()) return;
        detail::LockDescriptors& all = detail::lock_descriptors();
        const std::lock_guard guard(all.mutex);
        if (generation_ != fork_generation().load()) {
            file_.release();
            return;
        }
        all.open.erase(file_.get());
        file_.close();
    }

private:
    static os::LockRange byte_of(std::size_t slot) noexcept {
        return {kLockBase + static_cast<std::int64_t>(slot), 1};
    }

    os::FileDescriptor file_;
    std::uint64_t generation_ = 0;
};

}  // namespace memlane::core
