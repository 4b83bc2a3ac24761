// A segment as Python holds it: what the rings of broadcast and store have in common.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "bindings/python/buffer.hpp"
#include "bindings/python/failures.hpp"
#include "core/segment.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

// Random bytes from Python, of the length required: a core::SegmentId, a store::Secret.
template <class Array>
Array to_array(const nb::bytes& text) {
    Array array{};
    if (text.size() != array.size())
        raise_error(Error::InvalidArgument, nb::str("{} bytes are needed, not {}").attr("format")(array.size(), text.size()));
    std::memcpy(array.data(), text.c_str(), array.size());
    return array;
}

class HeldSegment {
public:
    const std::shared_ptr<core::Segment>& segment() const noexcept { return segment_; }
    std::string label() const {
        check_open();
        return core::label_of(segment_->header());
    }
    // For observers; Python has checked it.
    void set_label(const std::string& label) {
        check_open();
        core::set_label(segment_->header(), label);
    }

protected:
    explicit HeldSegment(std::shared_ptr<core::Segment> segment) : segment_(std::move(segment)) {}

    void check_open() const {
        if (!segment_->is_open()) raise_error(Error::Closed, "this ring is closed");
    }

    std::shared_ptr<core::Segment> segment_;
};

}  // namespace memlane::bindings
