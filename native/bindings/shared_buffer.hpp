// A range of shared memory as a Python buffer. It owns the mapping: whoever still holds a memoryview of it after
// close() reads and writes mapped memory. And it counts its exports: a memoryview that is released says nothing of
// its slices, casts and arrays, which keep the one export of their common origin.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "os/mapping.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

// Protected by the GIL.
class SharedBuffer {
public:
    SharedBuffer(std::shared_ptr<os::Mapping> mapping, std::size_t offset, std::size_t bytes)
        : mapping_(std::move(mapping)), offset_(offset), bytes_(bytes) {}
    // Read-only. `lease` lasts as long as any buffer that shares it, and every export keeps its buffer: it ends when
    // the last of them goes.
    SharedBuffer(std::shared_ptr<os::Mapping> mapping, std::size_t offset, std::size_t bytes, std::shared_ptr<void> lease)
        : mapping_(std::move(mapping)), offset_(offset), bytes_(bytes), is_readonly_(true), lease_(std::move(lease)) {}

    bool is_in_use() const noexcept { return exports_ > 0; }
    // To be called when the last export goes.
    void when_unused(std::function<void()> action) { when_unused_ = std::move(action); }

    static int get_buffer(PyObject* self, Py_buffer* view, int flags) noexcept {
        auto* buffer = nb::inst_ptr<SharedBuffer>(self);
        const int rc = PyBuffer_FillInfo(view, self, buffer->mapping_->base() + buffer->offset_,
                                         static_cast<Py_ssize_t>(buffer->bytes_), buffer->is_readonly_, flags);
        if (rc == 0) ++buffer->exports_;
        return rc;
    }

    static void release_buffer(PyObject* self, Py_buffer* /*view*/) noexcept {
        auto* buffer = nb::inst_ptr<SharedBuffer>(self);
        if (--buffer->exports_ == 0 && buffer->when_unused_) std::exchange(buffer->when_unused_, nullptr)();
    }

private:
    std::shared_ptr<os::Mapping> mapping_;
    std::size_t offset_;
    std::size_t bytes_;
    bool is_readonly_ = false;
    std::shared_ptr<void> lease_;
    std::size_t exports_ = 0;
    std::function<void()> when_unused_;
};

// The memory that a view was made of, and whether anything still refers to it.
class ViewLease {
public:
    ViewLease(std::weak_ptr<void> lease, const std::byte* base, std::uint64_t bytes)
        : lease_(std::move(lease)), base_(reinterpret_cast<std::uintptr_t>(base)), bytes_(bytes) {}
    bool is_held() const noexcept { return !lease_.expired(); }
    bool covers(std::uintptr_t address) const noexcept { return address >= base_ && address - base_ < bytes_; }

private:
    std::weak_ptr<void> lease_;
    std::uintptr_t base_;
    std::uint64_t bytes_;
};

inline nb::object view_of(nb::handle buffer) {
    nb::object view = nb::steal(PyMemoryView_FromObject(buffer.ptr()));
    if (!view.is_valid()) throw nb::python_error();
    return view;
}

inline void bind_shared_buffer(nb::module_& m) {
    using namespace nb::literals;
    static PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(SharedBuffer::get_buffer)},
                                  {Py_bf_releasebuffer, reinterpret_cast<void*>(SharedBuffer::release_buffer)},
                                  {0, nullptr}};
    nb::class_<SharedBuffer>(m, "SharedBuffer", nb::type_slots(slots),
                             "Owner of a range of shared memory; what its memoryviews keep alive.");

    nb::class_<ViewLease>(m, "ViewLease", "Memory that arrays alias; given back when the last of them goes.")
        .def_prop_ro("is_held", &ViewLease::is_held)
        .def("covers", &ViewLease::covers, "address"_a, "Does it lie in that memory?");
}

}  // namespace memlane::bindings
