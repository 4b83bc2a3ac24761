// Bytes of Python objects: held while they are looked at or copied, or made to be filled.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/python/buffer.hpp"
#include "bindings/python/failures.hpp"
#include "bindings/python/gil.hpp"
#include "core/copy_streaming.hpp"
#include "core/layout.hpp"
#include "core/sync.hpp"
#include "os/mapping.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class ByteView : public HeldBuffer {
public:
    enum class Access { read, write };

    explicit ByteView(nb::handle object, Access access = Access::read) : HeldBuffer(held(object, access)) {}

private:
    static HeldBuffer held(nb::handle object, Access access) {
        try {
            return {object, access == Access::write ? PyBUF_WRITABLE : PyBUF_SIMPLE};
        } catch (const nb::python_error& error) {
            if (!error.matches(PyExc_BufferError) && !error.matches(PyExc_TypeError)) throw;
        }
        const nb::str text("{} is not contiguous memory that can be {}");
        const char* const use = access == Access::write ? "written" : "read";
        raise_error(Error::InvalidArgument, text.attr("format")(nb::type_name(object.type()), use));
    }
};

// Buffers whose sizes add up to `bytes`; otherwise an error says how many bytes they have.
class Parts {
public:
    Parts(nb::handle parts, std::size_t bytes) : bytes_(bytes) {
        std::size_t sum = 0;
        for (const nb::handle part : parts) sum += parts_.emplace_back(part).size();
        if (sum != bytes)
            raise_error(Error::InvalidArgument,
                        nb::str("the parts of an object have {} bytes, not {} as announced").attr("format")(sum, bytes));
    }

    // Copies the parts in order; large ones without the GIL, and past the caches.
    void copy_to(std::byte* at) const {
        copying(bytes_, [&] {
            std::optional<core::StreamingCopy> streaming;
            if (bytes_ >= kStreamed) streaming.emplace();
            for (const ByteView& part : parts_) {
                SYNC_STEP(fill);
                if (streaming)
                    streaming->add(at, static_cast<const std::byte*>(part.data()), part.size());
                else
                    std::memcpy(at, part.data(), part.size());
                at += part.size();
            }
            if (streaming) streaming->finish();
        });
    }

private:
    // Measured here, 32 objects in turn, put and then read, us: 1 MiB 52 + 45 by memcpy, 39 + 48 past the
    // caches; 8 MiB 552 + 520 and 360 + 500; but 256 KiB 14 + 10 and 10 + 28.
    static constexpr std::size_t kStreamed = 512u << 10;

    std::vector<ByteView> parts_;
    std::size_t bytes_;
};

inline void copy_parts(nb::handle target, std::size_t offset, nb::handle parts, std::size_t bytes) {
    const ByteView to(target, ByteView::Access::write);
    const Parts from(parts, bytes);
    if (offset > to.size() || bytes > to.size() - offset)
        raise_error(Error::InvalidArgument,
                    nb::str("{} bytes at offset {} do not fit in {} bytes").attr("format")(bytes, offset, to.size()));
    from.copy_to(static_cast<std::byte*>(to.data()) + offset);
}

inline nb::object bytes_at(nb::object owner, std::uintptr_t address, std::size_t bytes) {
    return view_of(foreign_memory(std::move(owner), reinterpret_cast<void*>(address), bytes, false));
}

// The C library maps every allocation above this size afresh, and its pages are faulted in one by one: for 64
// MiB that took longer than the copy into them.
inline constexpr std::size_t kAlwaysMapped = 32u << 20;

inline nb::tuple blank_bytes(std::size_t nbytes) {
    if (nbytes > PY_SSIZE_T_MAX) throw std::bad_alloc();
    const nb::bytes text = new_bytes(nbytes);
    char* const memory = PyBytes_AS_STRING(text.ptr());
    if (nbytes > kAlwaysMapped) {
        char* const begin = memory + (-reinterpret_cast<std::uintptr_t>(memory) & (core::kPage - 1));
        os::prefer_huge_pages(begin, nbytes - static_cast<std::size_t>(begin - memory));
    }
    const nb::object view = nb::steal(PyMemoryView_FromMemory(memory, static_cast<Py_ssize_t>(nbytes), PyBUF_WRITE));
    if (!view.is_valid()) throw nb::python_error();
    return nb::make_tuple(text, view);
}

inline void bind_byte_views(nb::module_& m) {
    using namespace nb::literals;
    m.def("copy_parts", &copy_parts, "target"_a, "offset"_a, "parts"_a, "bytes"_a,
          "Copies `parts`, which have `bytes` in all, to `target[offset:]`; large ones without the GIL.");
    m.def("bytes_at", &bytes_at, "owner"_a, "address"_a, "nbytes"_a,
          nb::sig("def bytes_at(owner: object, address: int, nbytes: int) -> memoryview"),
          "A view of memory that `owner` keeps alive.");
    m.def("blank_bytes", &blank_bytes, "nbytes"_a, nb::sig("def blank_bytes(nbytes: int) -> tuple[bytes, memoryview]"),
          "Bytes to be filled through the view before they are shared; the view must not outlive them.");
}

}  // namespace memlane::bindings
