// An object on its way to bytes: the codec's work, and the pieces that it left, all by reference. Encoded once, a
// message can go to the ring and to sockets.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>

#include "bindings/outgoing.hpp"
#include "bindings/plain.hpp"
#include "broadcast/ring_layout.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using broadcast::ChunkKind;

class Encoder {
public:
    explicit Encoder(const nb::object& codec)
        : encode_(codec.attr("encode")), encode_plain_(codec.attr("encode_plain")), outgoing_(codec.attr("outgoing")) {}

    // Until clear() the message refers to the memory of `object`.
    void encode(nb::handle object) {
        message().clear();  // whatever an encoding that raised has left
        if (PyBytes_CheckExact(object.ptr())) {  // who has a format of his own pays for the two copies and nothing else
            message().write(object);
            kind_ = ChunkKind::bytes;
        } else if (!encode_plain_.is_none() && PlainObject::is_plain(object.ptr())) {
            message().write(encode_plain_(object));
            kind_ = ChunkKind::plain;
        } else {
            encode_(object);
            kind_ = message().has_buffers() ? ChunkKind::frames : ChunkKind::object;
        }
    }

    Outgoing& message() const { return nb::cast<Outgoing&>(outgoing_); }
    ChunkKind kind() const noexcept { return kind_; }
    std::uint64_t bytes() const { return kind_ == ChunkKind::frames ? message().table().total() : message().stream_bytes(); }

    // A message that goes in one piece: `header`, and the whole message behind it.
    nb::bytes joined(const nb::bytes& header) const {
        const std::uint64_t before = header.size();
        const std::uint64_t size = bytes();
        nb::object text = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(before + size)));
        if (!text.is_valid()) throw nb::python_error();
        char* const to = PyBytes_AS_STRING(text.ptr());
        std::memcpy(to, header.c_str(), before);
        std::uint64_t end = 0;
        message().for_each_part(message().table(), [&](std::uint64_t at, std::uint64_t part, const void* from) {
            std::memset(to + before + end, 0, at - end);  // padding
            std::memcpy(to + before + at, from, part);
            end = at + part;
            return 0;
        });
        return nb::borrow<nb::bytes>(text);
    }

    // (offset in the message, bytes there) of every piece, in order; views of memory that is the object's until clear().
    nb::list parts() const {
        nb::list parts;
        message().for_each_part(message().table(), [&](std::uint64_t at, std::uint64_t size, const void* from) {
            // The table of sizes is the message's own only while this runs.
            const bool is_own = kind_ == ChunkKind::frames && parts.size() < 2;
            const auto length = static_cast<Py_ssize_t>(size);
            PyObject* const part =
                is_own ? PyBytes_FromStringAndSize(static_cast<const char*>(from), length)
                       : PyMemoryView_FromMemory(const_cast<char*>(static_cast<const char*>(from)), length, PyBUF_READ);
            if (part == nullptr) throw nb::python_error();
            parts.append(nb::make_tuple(at, nb::steal(part)));
            return 0;
        });
        return parts;
    }

private:
    const nb::object encode_;
    const nb::object encode_plain_;
    const nb::object outgoing_;
    ChunkKind kind_ = ChunkKind::object;
};

// Lets go of the object when the message is sent, or was not.
struct Cleared {
    const Encoder& encoder;
    ~Cleared() { encoder.message().clear(); }
};

}  // namespace memlane::bindings
