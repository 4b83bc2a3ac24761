// Shared memory as Python buffers, which own the mapping: whoever still holds a memoryview of one after close() reads and
// writes mapped memory.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "bindings/buffer.hpp"
#include "os/mapping.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class SharedBuffer : public Buffer {
public:
    SharedBuffer(const std::shared_ptr<os::Mapping>& mapping, std::size_t offset, std::size_t bytes)
        : Buffer(mapping, mapping->base() + offset, bytes, false) {}
    // Read-only. `lease` lasts as long as any buffer that shares it.
    SharedBuffer(const std::shared_ptr<os::Mapping>& mapping, std::size_t offset, std::size_t bytes,
                 std::shared_ptr<void> lease)
        : Buffer(std::make_shared<std::pair<std::shared_ptr<os::Mapping>, std::shared_ptr<void>>>(mapping, std::move(lease)),
                 mapping->base() + offset, bytes, true) {}
};

// A part of a message that its reader keeps where it lies, as writable memory: the reader's own, because the mapping is
// private. What is shared is the lease, which ends with the last buffer of the message.
class LentBuffer : public Buffer {
public:
    LentBuffer(std::shared_ptr<void> lease, std::byte* memory, std::size_t bytes)
        : Buffer(std::move(lease), memory, bytes, false) {}
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

inline void bind_shared_buffer(nb::module_& m) {
    using namespace nb::literals;
    static PyType_Slot slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(Buffer::get_buffer)}, {0, nullptr}};
    nb::class_<Buffer>(m, "Buffer", nb::type_slots(slots), "Memory, and what keeps it; its memoryviews keep both.");
    nb::class_<SharedBuffer, Buffer>(m, "SharedBuffer", "A range of shared memory.");
    nb::class_<LentBuffer, Buffer>(m, "LentBuffer", "Memory of an array that a reader keeps where it came.");

    nb::class_<ViewLease>(m, "ViewLease", "Memory that arrays alias; given back when the last of them goes.")
        .def_prop_ro("is_held", &ViewLease::is_held)
        .def("covers", &ViewLease::covers, "address"_a, "Does it lie in that memory?");
}

}  // namespace memlane::bindings
