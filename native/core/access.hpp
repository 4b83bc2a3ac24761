// Checks of a segment's file: its type, owner and mode.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <string>

#include "core/errors.hpp"
#include "os/file.hpp"

namespace memlane::core {

inline std::string to_octal(mode_t mode) {
    char text[16];
    std::snprintf(text, sizeof text, "%04o", mode);
    return text;
}

// `remedy`: what the error about another user's file advises.
inline void check_owner(const std::string& path, const os::FileFacts& facts, const char* remedy) {
    if (!facts.is_regular()) throw SegmentRefused(path + " is not a regular file");
    if (facts.owner != ::geteuid()) throw SegmentForeign(path, facts.owner, remedy);
}
inline void check_access(const std::string& path, const os::FileFacts& facts, const char* remedy) {
    check_owner(path, facts, remedy);
    if ((facts.mode & 07777) != 0600)
        throw SegmentRefused(path + " has mode " + to_octal(facts.mode & 07777) + ", but segments have 0600");
}

// For a file that the kernel refuses to open without saying why. Its owner and mode can still be read.
[[noreturn]] inline void throw_forbidden(const std::string& path, const char* remedy) {
    if (const auto facts = os::facts_at(path)) check_access(path, *facts, remedy);
    throw SegmentRefused(path + " may not be opened by this user");
}

// For an existing file that could not be opened and is none of `kind` (a plural noun for the error text).
[[noreturn]] inline void throw_unopened(const std::system_error& error, const std::string& path, const char* kind,
                                        const char* remedy) {
    switch (error.code().value()) {
        case ELOOP: throw SegmentRefused(path + " is a symbolic link; " + kind + " never are");
        case EACCES:
        case EPERM: throw_forbidden(path, remedy);
        case EISDIR:
        case ENXIO:  // a socket
        case ENODEV: throw SegmentRefused(path + " is not a regular file");
        default: throw error;
    }
}

}  // namespace memlane::core
