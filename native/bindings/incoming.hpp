// The stream of a large message as a file that an Unpickler reads: a large bytes object is filled straight from
// shared memory, everything else is copied to private memory before it is parsed.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>

#include "bindings/failures.hpp"
#include "bindings/gil.hpp"
#include "broadcast/frames.hpp"
#include "broadcast/ring_reader.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class Incoming {
public:
    Incoming(broadcast::RingReader& reader, const broadcast::ChunkDescriptor& message, broadcast::Frame stream)
        : reader_(&reader), message_(message), at_(stream.offset), end_(stream.offset + stream.bytes) {}

    // The chunk is about to be given back: whoever kept this object gets the end of the file.
    void detach() noexcept { at_ = end_; }

    nb::bytes read(Py_ssize_t wanted) {
        const std::uint64_t bytes = wanted < 0 ? end_ - at_ : std::min<std::uint64_t>(wanted, end_ - at_);
        nb::object text = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(bytes)));
        if (!text.is_valid()) throw nb::python_error();
        copy(PyBytes_AS_STRING(text.ptr()), bytes);
        return nb::borrow<nb::bytes>(text);
    }

    std::uint64_t read_into(nb::handle target) {
        Py_buffer view;
        if (PyObject_GetBuffer(target.ptr(), &view, PyBUF_WRITABLE) != 0) throw nb::python_error();
        const Released released{view};
        const std::uint64_t bytes = std::min<std::uint64_t>(static_cast<std::uint64_t>(view.len), end_ - at_);
        copy(view.buf, bytes);
        return bytes;
    }

    // Only pickles of protocol 0 have lines, and no writer of memlane sends them.
    nb::bytes read_line() { return read(0); }

private:
    struct Released {
        Py_buffer& view;
        ~Released() { PyBuffer_Release(&view); }
    };

    void copy(void* to, std::uint64_t bytes) {
        if (bytes == 0) return;
        // Decoding may have forked, and then the writer no longer waits for this process.
        if (!reader_->segment().is_own())
            raise_error("WrongProcess", "the process that decodes this message was forked while it did so");
        const bool copied = copying(bytes, [&] { return reader_->copy_out(message_, at_, bytes, to); });
        if (!copied) raise_error("CorruptMessage", "the message ends before its stream does");
        at_ += bytes;
    }

    broadcast::RingReader* reader_;
    const broadcast::ChunkDescriptor message_;
    std::uint64_t at_;
    const std::uint64_t end_;
};

}  // namespace memlane::bindings
