// Open-file-description locks on byte ranges. The kernel drops them when the last descriptor of the description is
// closed, so also when a process dies, however it dies. They work across pid namespaces and need no heartbeat.
#pragma once

#include <fcntl.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <optional>

#include "os/file.hpp"

namespace memlane::os {

enum class LockKind : short { shared = F_RDLCK, exclusive = F_WRLCK };

struct LockRange {
    std::int64_t first;
    std::int64_t count;
};

inline struct flock to_flock(LockKind kind, LockRange range) noexcept {
    struct flock f{};
    f.l_type = static_cast<short>(kind);
    f.l_whence = SEEK_SET;
    f.l_start = range.first;
    f.l_len = range.count;
    return f;
}

// True if the lock was taken (or is held already through this description), false if somebody else has it.
inline bool try_lock(const FileDescriptor& file, LockKind kind, LockRange range) {
    struct flock f = to_flock(kind, range);
    while (::fcntl(file.get(), F_OFD_SETLK, &f) != 0) {
        if (errno == EAGAIN) return false;  // a conflict, on Linux; EACCES means that the call was refused
        if (errno != EINTR) throw_errno("cannot lock a byte of a segment");
    }
    return true;
}

// A lock of another description that overlaps the range, with the bounds it was taken with. 1.2 us.
inline std::optional<LockRange> find_lock(const FileDescriptor& file, LockRange range) {
    struct flock f = to_flock(LockKind::exclusive, range);
    while (::fcntl(file.get(), F_OFD_GETLK, &f) != 0)
        if (errno != EINTR) throw_errno("cannot query a lock of a segment");
    if (f.l_type == F_UNLCK) return std::nullopt;
    return LockRange{f.l_start, f.l_len};
}

inline bool is_locked(const FileDescriptor& file, LockRange range) { return find_lock(file, range).has_value(); }

// Drops only locks that are held through this description.
inline void unlock(const FileDescriptor& file, LockRange range) {
    struct flock f = to_flock(LockKind::exclusive, range);
    f.l_type = F_UNLCK;
    while (::fcntl(file.get(), F_OFD_SETLK, &f) != 0)
        if (errno != EINTR) throw_errno("cannot unlock a byte of a segment");
}

// True if anybody else has the file open or mapped, in any container. `file` must be the caller's only descriptor of
// it. Takes a kernel lease (F_SETLEASE), which is granted only if nobody else has the file open. False also if the
// kernel grants no leases: on some file systems (NFS), or to users who may not take one. A concurrent open() waits
// until the lease ends, or fails with EAGAIN if it is non-blocking.
inline bool is_open_elsewhere(const FileDescriptor& file) noexcept {
    // A concurrent open() signals this process: SIGIO would kill it, SIGURG is ignored by default.
    if (::fcntl(file.get(), F_SETSIG, SIGURG) != 0) return false;
    while (::fcntl(file.get(), F_SETLEASE, F_WRLCK) != 0)
        if (errno != EINTR) return errno == EAGAIN;
    ::fcntl(file.get(), F_SETLEASE, F_UNLCK);
    return false;
}

}  // namespace memlane::os
