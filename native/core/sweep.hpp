// Removes what killed processes left behind and no survivor removed: names of segments that nobody holds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "core/liveness.hpp"
#include "core/segment.hpp"
#include "core/sync.hpp"
#include "os/clock.hpp"

namespace memlane::core {

// For a name that a caller chose. True if it is free, or was left by a dead process and has now been removed. Removes
// only segments that belong to this user and that no live process uses.
inline bool free_name(const std::string& name) {
    const std::string path = std::string(kDirectory) + "/" + name;
    os::FileDescriptor file;
    try {
        file = os::open_existing(path);
    } catch (const std::system_error& error) {
        const int why = error.code().value();
        if (why == ENOENT) return true;
        // A link, a directory, a socket, a device, or another user's file.
        if (why == ELOOP || why == EISDIR || why == ENXIO || why == ENODEV || why == EACCES || why == EPERM) return false;
        throw;
    }
    const os::FileFacts facts = os::facts_of(file);
    if (!facts.is_regular() || facts.owner != ::geteuid()) return false;
    LivenessLock lock(file);
    if (!lock.take_all() || !find_header(file)) return false;
    os::unlink_if_same(file, path);
    return true;
}

// Names that a creation looks at: another user's cost as much as one's own, and may be any number.
constexpr std::size_t kMostPerCreation = 1024;

// Every segment is locked before it has a name, so no live process uses one that can be locked as a whole, whatever its
// age and pids. Returns the names that were removed. Costs a few microseconds per segment of this user. Removes nothing
// where this user may create files, but not list them (a directory of mode 1733). Looks at `most` names at most, from
// another one on each time, so that all have their turn.
inline std::vector<std::string> sweep_dead_segments(std::size_t most = SIZE_MAX) {
    std::vector<std::string> removed, all, candidates;
    try {
        all = os::names_in(kDirectory);
    } catch (const std::system_error& error) {
        if (error.code().value() != EACCES) throw;
    }
    for (const std::string& name : all)
        if (is_segment_name(name)) candidates.push_back(name);
    if (candidates.size() > most) {
        const auto first = candidates.begin() + static_cast<std::size_t>(os::monotonic_now(CLOCK_MONOTONIC)) % candidates.size();
        std::rotate(candidates.begin(), first, candidates.end());
        candidates.resize(most);
    }
    for (const std::string& name : candidates) {
        const std::string path = std::string(kDirectory) + "/" + name;
        try {
            const os::FileDescriptor file = os::open_existing(path);
            const os::FileFacts facts = os::facts_of(file);
            if (!facts.is_regular() || facts.owner != ::geteuid()) continue;
            LivenessLock lock(file);
            if (!lock.take_all()) continue;
            SYNC_STEP(sweep);
            // A name of something else: another user may have made it, where the kernel allows that.
            if (facts.links > 1 && !find_header(file)) continue;
            if (facts.links > 1)  // the name that its caller chose first: this one leads to it
                for (const std::string& other : all)
                    if (other != name) os::unlink_if_same(file, std::string(kDirectory) + "/" + other);
            os::unlink_if_same(file, path);
            removed.push_back(name);
        } catch (const std::system_error&) {
            continue;  // gone meanwhile, or another user's: no reason to fail a creation
        }
    }
    return removed;
}

}  // namespace memlane::core
