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
