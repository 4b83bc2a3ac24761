// A range of shared memory as a Python buffer. It owns the mapping: whoever still holds a memoryview of it after
// close() reads and writes mapped memory.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

#include "os/mapping.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

struct SharedBuffer {
    std::shared_ptr<os::Mapping> mapping;
    std::size_t offset;
    std::size_t bytes;

    static int get_buffer(PyObject* self, Py_buffer* view, int flags) noexcept {
        const auto* buffer = nb::inst_ptr<SharedBuffer>(self);
        return PyBuffer_FillInfo(view, self, buffer->mapping->base() + buffer->offset,
                                 static_cast<Py_ssize_t>(buffer->bytes), 0, flags);
    }
};

inline nb::object view(SharedBuffer buffer) {
    const nb::object owner = nb::cast(std::move(buffer));
    return nb::steal(PyMemoryView_FromObject(owner.ptr()));
}

inline void bind_shared_buffer(nb::module_& m) {
    static PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(SharedBuffer::get_buffer)}, {0, nullptr}};
    nb::class_<SharedBuffer>(m, "SharedBuffer", nb::type_slots(slots),
                             "Owner of a range of shared memory; what its memoryviews keep alive.");
}

}  // namespace memlane::bindings
