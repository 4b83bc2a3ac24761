// Memory as a Python buffer: the one exporter. A memoryview of it keeps its owner alive; derived classes say what owns the
// memory, and have nothing else of their own.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <utility>

namespace memlane::bindings {

namespace nb = nanobind;

class Buffer {
public:
    // `owner` ends with the last buffer and memoryview that share it, in whatever thread, with the GIL held.
    Buffer(std::shared_ptr<void> owner, void* memory, std::size_t bytes, bool is_readonly)
        : owner_(std::move(owner)), memory_(memory), bytes_(bytes), is_readonly_(is_readonly) {}

    void* memory() const noexcept { return memory_; }
    std::size_t bytes() const noexcept { return bytes_; }

    static int get_buffer(PyObject* self, Py_buffer* view, int flags) noexcept {
        const auto* buffer = nb::inst_ptr<Buffer>(self);
        return PyBuffer_FillInfo(view, self, buffer->memory_, static_cast<Py_ssize_t>(buffer->bytes_), buffer->is_readonly_,
                                 flags);
    }

private:
    std::shared_ptr<void> owner_;
    void* memory_;
    std::size_t bytes_;
    bool is_readonly_;
};

inline nb::object view_of(nb::handle buffer) {
    nb::object view = nb::steal(PyMemoryView_FromObject(buffer.ptr()));
    if (!view.is_valid()) throw nb::python_error();
    return view;
}

}  // namespace memlane::bindings
