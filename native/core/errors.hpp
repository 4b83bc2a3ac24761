// Errors of creating a segment and attaching to it. The bindings map each to one class of memlane.errors; any other
// failure of a system call remains a std::system_error and becomes an OSError.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace memlane::core {

struct SegmentMissing : std::runtime_error {
    SegmentMissing(std::string segment, const std::string& why) : runtime_error(why), name(std::move(segment)) {}
    std::string name;
};

struct SegmentExists : std::runtime_error {
    explicit SegmentExists(std::string segment) : runtime_error("the name is taken"), name(std::move(segment)) {}
    std::string name;
};

struct SegmentRefused : std::runtime_error {
    using runtime_error::runtime_error;
};

// Another user's file. The message is written in Python, which can look up the user's name.
struct SegmentForeign : SegmentRefused {
    SegmentForeign(std::string file, std::uint32_t owner_id, std::string what_to_do)
        : SegmentRefused(file + " belongs to another user"),
          path(std::move(file)),
          owner(owner_id),
          remedy(std::move(what_to_do)) {}
    std::string path;
    std::uint32_t owner;
    std::string remedy;
};

struct LayoutMismatch : std::runtime_error {
    using runtime_error::runtime_error;
};

struct RankTaken : std::runtime_error {
    using runtime_error::runtime_error;
};

// The file system lacks the space, or a limit of this process forbids it; `error` says which.
struct ShmExhausted : std::runtime_error {
    ShmExhausted(int error_number, std::uint64_t need_bytes, std::uint64_t free_bytes)
        : runtime_error("shared memory exhausted"), error(error_number), need(need_bytes), free(free_bytes) {}
    int error;
    std::uint64_t need;
    std::uint64_t free;
};

}  // namespace memlane::core
