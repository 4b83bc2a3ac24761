// Open-file-description locks on byte ranges: the kernel drops them when the last descriptor of the description
// goes, so at the death of a process, however it died. They work across pid namespaces and need no heartbeat.
#pragma once

#include <fcntl.h>

#include <cerrno>
#include <cstdint>

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

// Does anybody else hold a lock in the range? 1.2 us.
inline bool is_locked(const FileDescriptor& file, LockRange range) {
    struct flock f = to_flock(LockKind::exclusive, range);
    while (::fcntl(file.get(), F_OFD_GETLK, &f) != 0)
        if (errno != EINTR) throw_errno("cannot ask for a lock of a segment");
    return f.l_type != F_UNLCK;
}

}  // namespace memlane::os
