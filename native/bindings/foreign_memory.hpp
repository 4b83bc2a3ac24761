// Memory that a Python object keeps alive, as a flat buffer.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "bindings/buffer.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class ForeignMemory : public Buffer {
public:
    ForeignMemory(nb::object owner, void* memory, std::size_t bytes, bool is_readonly)
        : Buffer(std::make_shared<nb::object>(std::move(owner)), memory, bytes, is_readonly) {}
};

}  // namespace memlane::bindings
