// A segment id for each process, because several targets may run at once, and an input more than once.
#pragma once

#include <unistd.h>

#include <cstring>

#include "core/segment.hpp"

namespace memlane::fuzz {

inline core::SegmentId own_id() {
    core::SegmentId id{};
    const pid_t pid = ::getpid();
    std::memcpy(id.data(), &pid, sizeof pid);
    return id;
}

}  // namespace memlane::fuzz
