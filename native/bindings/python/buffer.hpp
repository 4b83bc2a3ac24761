// Memory as a Python buffer: the one exporter, and the kinds of owners. A memoryview keeps its owner alive, so
// one that is used after close() still reads and writes mapped memory.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "os/mapping.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class Buffer {
public:
    // `owner` is released with the last buffer or memoryview that shares it, on any thread, with the GIL held.
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

// The reverse: the memory that a Python object exports, which cannot be freed or moved while this is held.
class HeldBuffer {
public:
    HeldBuffer(nb::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) throw nb::python_error();
    }
    HeldBuffer(HeldBuffer&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
    HeldBuffer& operator=(HeldBuffer&&) = delete;
    ~HeldBuffer() { PyBuffer_Release(&view_); }

    void* data() const noexcept { return view_.buf; }
    std::size_t size() const noexcept { return static_cast<std::size_t>(view_.len); }
    const Py_buffer* operator->() const noexcept { return &view_; }

private:
    Py_buffer view_{};
};

// Uninitialized: fill it before anybody else sees it.
inline nb::bytes new_bytes(std::size_t size) {
    nb::bytes text = nb::steal<nb::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(size)));
    if (!text.is_valid()) throw nb::python_error();
    return text;
}

inline nb::object view_of(nb::handle buffer) {
    nb::object view = nb::steal(PyMemoryView_FromObject(buffer.ptr()));
    if (!view.is_valid()) throw nb::python_error();
    return view;
}

// Writable.
inline nb::object shared_view(const std::shared_ptr<os::Mapping>& mapping, std::size_t offset, std::size_t bytes) {
    return view_of(nb::cast(Buffer(mapping, mapping->base() + offset, bytes, false)));
}

// Read-only memory that a Python object keeps alive.
inline nb::object foreign_memory(nb::object owner, void* memory, std::size_t bytes, bool is_readonly = true) {
    return nb::cast(Buffer(std::make_shared<nb::object>(std::move(owner)), memory, bytes, is_readonly));
}

// A part of a message that its reader keeps in place, as writable memory. The mapping is private, so writes are
// the reader's own. The buffers of a message share its lease, which ends with the last of them.
class LentBuffer : public Buffer {
public:
    LentBuffer(std::shared_ptr<void> lease, std::byte* memory, std::size_t bytes)
        : Buffer(std::move(lease), memory, bytes, false) {}
};

// The memory behind a view, and whether anything still refers to it.
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

inline void bind_buffers(nb::module_& m) {
    using namespace nb::literals;
    static PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(Buffer::get_buffer)}, {0, nullptr}};
    nb::class_<Buffer>(m, "Buffer", nb::type_slots(slots), "Memory and its owner; memoryviews of it keep both.");
    nb::class_<LentBuffer, Buffer>(m, "LentBuffer", "Memory of an array that stays in its extent.");

    nb::class_<ViewLease>(m, "ViewLease", "Memory that arrays alias; freed with the last of them.")
        .def_prop_ro("is_held", &ViewLease::is_held)
        .def("covers", &ViewLease::covers, "address"_a, "Whether the address is in that memory.");
}

}  // namespace memlane::bindings
