// A part of a message that its reader keeps where it lies, as writable memory: the reader's own, because the mapping is
// private. What is shared is the lease, which ends with the last buffer of the message.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>

#include "broadcast/lease.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

// Protected by the GIL.
class LentBuffer {
public:
    LentBuffer(std::shared_ptr<broadcast::Lease> lease, std::uint64_t offset, std::uint64_t bytes)
        : lease_(std::move(lease)), offset_(offset), bytes_(bytes) {}

    static int get_buffer(PyObject* self, Py_buffer* view, int flags) noexcept {
        const auto* lent = nb::inst_ptr<LentBuffer>(self);
        return PyBuffer_FillInfo(view, self, lent->lease_->memory() + lent->offset_, static_cast<Py_ssize_t>(lent->bytes_), 0,
                                 flags);
    }

private:
    std::shared_ptr<broadcast::Lease> lease_;
    std::uint64_t offset_;
    std::uint64_t bytes_;
};

}  // namespace memlane::bindings
