// The stream of a large message as a file that an Unpickler reads: a large bytes object is filled straight from
// shared memory, everything else is copied to private memory before it is parsed.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>

#include "bindings/python/buffer.hpp"
#include "bindings/python/failures.hpp"
#include "bindings/python/gil.hpp"
#include "broadcast/frames.hpp"
#include "broadcast/ring_reader.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

// A message being received: a sample, and the writer's description of it.
struct Message : broadcast::ChunkDescriptor {
    broadcast::RingReader::Sample sample;

    bool copy_out(const broadcast::Frame& frame, void* to) const { return sample.copy_out(*this, frame.offset, frame.bytes, to); }
    void finish() noexcept { sample.finish(length); }
};

class Incoming {
public:
    Incoming(const core::Segment& segment, const Message& message, broadcast::Frame stream)
        : segment_(&segment), message_(&message), at_(stream.offset), end_(stream.offset + stream.bytes) {}

    // Called before the chunk is given back: from then on, this file is at its end.
    void detach() noexcept { at_ = end_; }

    nb::bytes read(Py_ssize_t wanted) {
        const std::uint64_t bytes = wanted < 0 ? end_ - at_ : std::min<std::uint64_t>(wanted, end_ - at_);
        nb::bytes text = new_bytes(bytes);
        copy(PyBytes_AS_STRING(text.ptr()), bytes);
        return text;
    }

    std::uint64_t read_into(nb::handle target) {
        const HeldBuffer view(target, PyBUF_WRITABLE);
        const std::uint64_t bytes = std::min<std::uint64_t>(view.size(), end_ - at_);
        copy(view.data(), bytes);
        return bytes;
    }

    // Only pickles of protocol 0 have lines, and no writer of memlane sends them.
    nb::bytes read_line() { return read(0); }

private:
    void copy(void* to, std::uint64_t bytes) {
        if (bytes == 0) return;
        // Decoding may have forked, and the writer does not wait for the child.
        if (!segment_->is_own())
            raise_error(Error::WrongProcess, "this process was forked while it decoded this message");
        const bool copied = copying(bytes, [&] { return message_->copy_out({at_, bytes}, to); });
        if (!copied) raise_error(Error::CorruptMessage, "the message ends before its stream does");
        at_ += bytes;
    }

    const core::Segment* segment_;
    const Message* message_;
    std::uint64_t at_;
    const std::uint64_t end_;
};

}  // namespace memlane::bindings
