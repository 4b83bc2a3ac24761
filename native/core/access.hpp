// Checks of a segment's file: its type, owner and mode.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <string>

#include "core/errors.hpp"
#include "os/file.hpp"

namespace memlane::core {

// `remedy`: what the error about another user's file advises.
inline void check_owner(const std::string& path, const os::FileFacts& facts, const char* remedy) {
    if (!facts.is_regular()) throw SegmentRefused(path + " is not a regular file");
    if (facts.owner != ::geteuid()) throw SegmentForeign(path, facts.owner, remedy);
}
inline void check_access(const std::string& path, const os::FileFacts& facts, const char* remedy) {
    check_owner(path, facts, remedy);
    if ((facts.mode & 07777) == 0600) return;
    char mode[16];
    std::snprintf(mode, sizeof mode, "%04o", facts.mode & 07777);
    throw SegmentRefused(path + " has mode " + mode + ", but segments have 0600");
}

inline constexpr const char* kOneUser = "only processes of the same user can share a segment";

// For a descriptor of another process that may not be opened.
[[noreturn]] inline void throw_unopened_of(std::int64_t pid) {
    const std::string process = "/proc/" + std::to_string(pid);
    const std::string text = "this user may not open what process " + std::to_string(pid) + " holds";
    const auto owner = os::facts_at(process);
    if (!owner || owner->owner != ::geteuid()) throw SegmentRefused(text + "; " + kOneUser);
    throw SegmentRefused(text + ", although it is of the same user: it has changed its user without exec (os.setuid), or "
                         "has capabilities that this one lacks. Call prctl(PR_SET_DUMPABLE, 1) there after the change, or "
                         "start that process as the user that it is to be");
}

// For an existing file that could not be opened and is none of `kind` (a plural noun for the error text).
[[noreturn]] inline void throw_unopened(const std::system_error& error, const std::string& path, const char* kind,
                                        const char* remedy) {
    switch (error.code().value()) {
        case ELOOP: throw SegmentRefused(path + " is a symbolic link; " + kind + " never are");
        case EACCES:
        case EPERM:  // the kernel does not say why, but owner and mode can still be read
            if (const auto facts = os::facts_at(path)) {
                check_access(path, *facts, remedy);
                throw SegmentRefused(path + " may not be opened by this user");
            }
            throw SegmentRefused("this user may not enter " + path.substr(0, path.rfind('/')) + ", where " + path +
                                 " would be; run as its owner, or give it mode 1777");
        case EISDIR:
        case ENXIO:  // a socket
        case ENODEV: throw SegmentRefused(path + " is not a regular file");
        default: throw error;
    }
}

}  // namespace memlane::core
