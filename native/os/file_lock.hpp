// Open-file-description locks on byte ranges: the kernel drops them when the last descriptor of the description
// goes, so at the death of a process, however it died. They work across pid namespaces and need no heartbeat.
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
        if (errno == EAGAIN) return false;  // as Linux has it; EACCES would be a refusal of the call
        if (errno != EINTR) throw_errno("cannot lock a byte of a segment");
    }
    return true;
}

// A lock that somebody else holds in the range, as he took it. 1.2 us.
inline std::optional<LockRange> find_lock(const FileDescriptor& file, LockRange range) {
    struct flock f = to_flock(LockKind::exclusive, range);
    while (::fcntl(file.get(), F_OFD_GETLK, &f) != 0)
        if (errno != EINTR) throw_errno("cannot ask for a lock of a segment");
    if (f.l_type == F_UNLCK) return std::nullopt;
    return LockRange{f.l_start, f.l_len};
}

inline bool is_locked(const FileDescriptor& file, LockRange range) { return find_lock(file, range).has_value(); }

// Of a lock that is held through this very description.
inline void unlock(const FileDescriptor& file, LockRange range) {
    struct flock f = to_flock(LockKind::exclusive, range);
    f.l_type = F_UNLCK;
    while (::fcntl(file.get(), F_OFD_SETLK, &f) != 0)
        if (errno != EINTR) throw_errno("cannot unlock a byte of a segment");
}

// Does anybody else have the file open or mapped, in whatever container? `file` must be all that the caller has open of it.
// Asked by a lease, which the kernel gives to the only one who has the file open; what a file system without leases (NFS)
// or a user who may have none does not tell counts as no. An open() that comes meanwhile waits for the lease's end, or fails
// with EAGAIN if it must not wait.
inline bool is_open_elsewhere(const FileDescriptor& file) noexcept {
    // That open() sends a signal: SIGIO would kill, SIGURG is ignored unless somebody handles it.
    if (::fcntl(file.get(), F_SETSIG, SIGURG) != 0) return false;
    while (::fcntl(file.get(), F_SETLEASE, F_WRLCK) != 0)
        if (errno != EINTR) return errno == EAGAIN;
    ::fcntl(file.get(), F_SETLEASE, F_UNLCK);
    return false;
}

}  // namespace memlane::os
