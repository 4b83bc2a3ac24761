// Bytes of Python objects, held while they are looked at or copied.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <utility>
#include <vector>

#include "bindings/failures.hpp"
#include "bindings/gil.hpp"
#include "core/sync.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class ByteView {
public:
    enum class Access { read, write };

    explicit ByteView(nb::handle object, Access access = Access::read) {
        const int flags = access == Access::write ? PyBUF_WRITABLE : PyBUF_SIMPLE;
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) == 0) return;
        if (!PyErr_ExceptionMatches(PyExc_BufferError) && !PyErr_ExceptionMatches(PyExc_TypeError)) throw nb::python_error();
        PyErr_Clear();
        const nb::str kind = nb::str(nb::type_name(object.type()));
        raise_error("InvalidArgument", nb::str("{} is no contiguous memory that can be {}")
                                           .attr("format")(kind, access == Access::write ? "written" : "read"));
    }
    ByteView(ByteView&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
    ByteView& operator=(ByteView&&) = delete;
    ~ByteView() { PyBuffer_Release(&view_); }

    void* data() const noexcept { return view_.buf; }
    std::size_t size() const noexcept { return static_cast<std::size_t>(view_.len); }

private:
    Py_buffer view_{};
};

// Copies the parts one behind the other to `target[offset:]`, large ones without the GIL. They must be `bytes` bytes.
inline void copy_parts(nb::handle target, std::size_t offset, nb::handle parts, std::size_t bytes) {
    const ByteView to(target, ByteView::Access::write);
    std::vector<ByteView> from;
    std::size_t sum = 0;
    for (const nb::handle part : parts) sum += from.emplace_back(part).size();
    if (sum != bytes)
        raise_error("InvalidArgument", nb::str("the parts of an object have {} bytes, {} were announced")
                                           .attr("format")(sum, bytes));
    if (offset > to.size() || sum > to.size() - offset)
        raise_error("InvalidArgument", nb::str("{} bytes at {} do not fit {} bytes").attr("format")(sum, offset, to.size()));
    copying(sum, [&] {
        char* at = static_cast<char*>(to.data()) + offset;
        for (const ByteView& part : from) {
            SYNC_STEP(fill);
            std::memcpy(at, part.data(), part.size());
            at += part.size();
        }
    });
}

}  // namespace memlane::bindings
