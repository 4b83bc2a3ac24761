// The lock that proves that a process is alive, on an open file description of its own.
//
// That description is never mapped: a mapping keeps its description open, so the lock would outlive close() while views
// exist, and would outlive a parent whose forked child keeps the mapping. It is never shared with a child: the child
// closes its copy (`os/fork.hpp`) without unlocking, because unlocking in a child drops the parent's lock.
#pragma once

#include <cstdint>
#include <optional>

#include "core/layout.hpp"
#include "os/file_lock.hpp"
#include "os/fork.hpp"

namespace memlane::core {

class LivenessLock {
public:
    LivenessLock() noexcept = default;
    // Only opens the description; the `take` methods lock bytes through it.
    explicit LivenessLock(const os::FileDescriptor& segment) : own_([&] { return os::reopen(segment); }) {}

    bool take_slot(std::size_t slot) { return os::try_lock(file(), os::LockKind::exclusive, byte_of(slot)); }
    bool take_user() { return os::try_lock(file(), os::LockKind::shared, {kUserLock, 1}); }
    // Not to be called in a forked child.
    void drop_slot(std::size_t slot) { os::unlock(file(), byte_of(slot)); }
    // For removal: succeeds only if nobody else uses the segment.
    bool take_all() { return os::try_lock(file(), os::LockKind::exclusive, {kLockBase, kLockSpan}); }
    // Not to be called in a forked child.
    void drop_all() { os::unlock(file(), {kLockBase, kLockSpan}); }
    bool is_open() const noexcept { return file().is_open(); }
    const os::FileDescriptor& file() const noexcept { return own_.file(); }
    // Does another description hold the slot? A system call (1.2 us).
    bool is_held_by_other(std::size_t slot) const { return os::is_locked(file(), byte_of(slot)); }

    // For systems that define lock bytes of their own. Not to be called in a forked child.
    bool take(os::LockKind kind, os::LockRange range) { return os::try_lock(file(), kind, range); }
    void drop(os::LockRange range) { os::unlock(file(), range); }
    std::optional<os::LockRange> held_by_other(os::LockRange range) const { return os::find_lock(file(), range); }

    // Drops all locks of this description at once; in a forked child nothing.
    void release() noexcept { own_.close(); }

private:
    static os::LockRange byte_of(std::size_t slot) noexcept {
        return {kLockBase + static_cast<std::int64_t>(slot), 1};
    }

    os::OwnFile own_;
};

}  // namespace memlane::core
