// 128 random bits from Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>

#include "bindings/failures.hpp"
#include "core/layout.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

inline core::SegmentId to_id(const nb::bytes& text) {
    core::SegmentId id{};
    if (text.size() != id.size()) raise_error("InvalidArgument", "the id of a segment has 16 bytes");
    std::memcpy(id.data(), text.c_str(), id.size());
    return id;
}

}  // namespace memlane::bindings
