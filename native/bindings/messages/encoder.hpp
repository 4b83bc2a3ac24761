// An object being encoded: calls the codec, and keeps the pieces of its output by reference. A message that is
// encoded once can be sent to the ring and to sockets.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>
#include <optional>
#include <utility>

#include "bindings/messages/outgoing.hpp"
#include "bindings/messages/plain.hpp"
#include "bindings/python/buffer_pool.hpp"
#include "bindings/python/gil.hpp"
#include "broadcast/ring_layout.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using broadcast::ChunkKind;

// What is sent without pickling, and so without running Python code.
struct Unpickled {
    ChunkKind kind;
    nb::object bytes;
};

// Bytes as they are, and plain objects. Nothing: the object must be pickled.
inline std::optional<Unpickled> without_pickling(nb::handle object, nb::handle encode_plain) {
    if (PyBytes_CheckExact(object.ptr()))  // callers with a format of their own pay for the two copies only
        return Unpickled{ChunkKind::bytes, nb::borrow(object)};
    if (encode_plain.is_none() || !PlainObject::is_plain(object.ptr())) return std::nullopt;
    return Unpickled{ChunkKind::plain, encode_plain(object)};
}

class Encoder {
public:
    explicit Encoder(const nb::object& codec)
        : encode_(codec.attr("encode")), encode_plain_(codec.attr("encode_plain")), outgoing_(codec.attr("outgoing")),
          message_(nb::cast<Outgoing&>(outgoing_)) {}

    // Until clear() the message refers to the memory of `object`.
    void encode(nb::handle object) {
        encode(object, [] {});
    }
    // Calls `before_pickling` if pickling is needed, which runs Python code, and may take long.
    template <class BeforePickling>
    void encode(nb::handle object, BeforePickling&& before_pickling) {
        message().clear();  // drops what a failed encoding left
        if (const auto found = without_pickling(object, encode_plain_)) {
            message().write(found->bytes);
            kind_ = found->kind;
        } else {
            before_pickling();
            encode_(object);
            kind_ = message().has_buffers() ? ChunkKind::frames : ChunkKind::object;
        }
    }

    Outgoing& message() const noexcept { return message_; }
    ChunkKind kind() const noexcept { return kind_; }
    std::uint64_t bytes() const { return kind_ == ChunkKind::frames ? message().table().total() : message().stream_bytes(); }

    // `header` and the whole message behind it, in one piece.
    nb::bytes joined(const nb::bytes& header) const {
        const std::uint64_t before = header.size();
        nb::bytes text = new_bytes(before + bytes());
        char* const to = PyBytes_AS_STRING(text.ptr());
        std::memcpy(to, header.c_str(), before);
        write(to + before);
        return text;
    }

    // The whole message in memory that nobody changes: the object itself if it is bytes, otherwise one copy.
    nb::object settled() const {
        if (kind_ == ChunkKind::bytes) return nb::borrow(message().first_piece());
        Buffer copy = pooled_buffer(bytes());
        copying(copy.bytes(), [&] { write(static_cast<char*>(copy.memory())); });
        return nb::cast(std::move(copy));
    }

private:
    void write(char* to) const {
        std::uint64_t end = 0;
        message().for_each_part(message().table(), [&](std::uint64_t at, std::uint64_t size, const void* from) {
            std::memset(to + end, 0, at - end);  // padding
            std::memcpy(to + at, from, size);
            end = at + size;
            return 0;
        });
    }

    const nb::object encode_;
    const nb::object encode_plain_;
    const nb::object outgoing_;
    Outgoing& message_;
    ChunkKind kind_ = ChunkKind::object;
};

// Drops the references to the object, whether or not the message was sent.
struct Cleared {
    const Encoder& encoder;
    ~Cleared() { encoder.message().clear(); }
};

}  // namespace memlane::bindings
