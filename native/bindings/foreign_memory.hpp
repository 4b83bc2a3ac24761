// Memory that a Python object keeps alive, as a flat buffer.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <utility>

#include "bindings/shared_buffer.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class ForeignMemory {
public:
    ForeignMemory(nb::object owner, void* memory, std::size_t bytes, bool is_readonly)
        : owner_(std::move(owner)), memory_(memory), bytes_(bytes), is_readonly_(is_readonly) {}

    static int get_buffer(PyObject* self, Py_buffer* view, int flags) noexcept {
        const auto* foreign = nb::inst_ptr<ForeignMemory>(self);
        return PyBuffer_FillInfo(view, self, foreign->memory_, static_cast<Py_ssize_t>(foreign->bytes_),
                                 foreign->is_readonly_, flags);
    }

private:
    nb::object owner_;
    void* memory_;
    std::size_t bytes_;
    bool is_readonly_;
};

}  // namespace memlane::bindings
