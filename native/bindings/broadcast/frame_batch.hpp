// FrameBatch for Python: one native call a message, from the object to its place in the frame.
//
// Everything happens with the GIL held and without running Python code between a check and what it allows, so no lock is
// needed: whoever sends the frame takes it in the same way.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "bindings/messages/encoder.hpp"
#include "bindings/python/failures.hpp"
#include "broadcast/frame_batch.hpp"
#include "os/clock.hpp"
#include "os/event.hpp"
#include "os/fork.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

// The header of a message whose kind, sequence and bytes are still to be written.
inline std::string checked_header(const nb::bytes& header) {
    if (header.size() != broadcast::MessageFrame::kHeaderBytes)
        raise_error(Error::InvalidArgument, "header must be that of a message");
    return {header.c_str(), header.size()};
}

class BoundFrameBatch {
public:
    BoundFrameBatch(const nb::object& codec, const nb::bytes& header, std::size_t most)
        : encode_plain_(codec.attr("encode_plain")),
          most_(most),
          batch_(checked_header(header)),
          timer_([] { return os::make_timer(); }) {}

    // None: the message is not here, and must be sent alone. Otherwise whether to send the frame now.
    nb::object put(nb::handle object) {
        has_put_ = false;
        if (!batch_.is_stream(os::monotonic_now()) || !batch_.fits(0) || generation_ != os::fork_generation().load())
            return nb::none();
        const auto found = without_pickling(object, encode_plain_);
        if (!found) return nb::none();
        char* text = nullptr;
        Py_ssize_t size = 0;
        if (PyBytes_AsStringAndSize(found->bytes.ptr(), &text, &size) != 0) throw nb::python_error();
        const std::string_view message{text, static_cast<std::size_t>(size)};
        if (message.size() > most_) batch_.end_stream();
        // Encoding may have run a finalizer, and that anything.
        if (message.size() > most_ || !batch_.fits(message.size())) return nb::none();
        if (batch_.count() == 0 && !is_timed_) {
            os::set_timer(timer_.file(), os::Deadline::after(broadcast::FrameBatch::kLongest));
            is_timed_ = true;
        }
        const bool is_due = batch_.add(static_cast<std::uint8_t>(found->kind), message);
        has_put_ = true;
        return nb::bool_(is_due);
    }
    // True if the last call of `put` has taken its message, whatever a signal handler raised after it.
    bool has_put() const noexcept { return has_put_; }

    void open(std::uint64_t sequence, std::int64_t messages, std::int64_t bytes) noexcept {
        batch_.open(sequence, messages, bytes, os::monotonic_now());
    }
    bool shut() noexcept {
        batch_.shut();
        return batch_.count() > 0;
    }
    void clear() noexcept { batch_.clear(); }
    // Whatever was here is sent. Until then the timer goes on: a signal handler may raise in between.
    void rest() {
        if (batch_.count() == 0 && std::exchange(is_timed_, false)) os::set_timer(timer_.file(), os::Deadline::never());
    }

    void close() {
        batch_.shut();
        is_timed_ = false;
        timer_ = {};
    }

    nb::bytes frame() const { return nb::bytes(batch_.frame().data(), batch_.frame().size()); }
    const broadcast::FrameBatch& batch() const noexcept { return batch_; }
    int fd() const noexcept { return timer_.file().get(); }

private:
    const nb::object encode_plain_;
    const std::size_t most_;
    broadcast::FrameBatch batch_;
    os::OwnFile timer_;
    bool is_timed_ = false;
    bool has_put_ = false;
    const std::uint64_t generation_ = os::fork_generation().load();
};

// The messages of one frame, as tuples of the given type: sequence, kind, content. Each must have this header, but for kind,
// sequence and bytes, and come right after the one before. None: it is no such frame.
inline nb::object messages_in(const nb::bytes& frame, const nb::bytes& header, std::uint64_t sequence, nb::type_object type) {
    using Header = broadcast::MessageFrame;
    std::string expected = checked_header(header);
    auto* const made = reinterpret_cast<PyTypeObject*>(type.ptr());
    if (!PyType_IsSubtype(made, &PyTuple_Type)) raise_error(Error::InvalidType, "type must be a tuple");
    std::string_view rest{frame.c_str(), frame.size()};
    if (rest.empty()) return nb::none();
    nb::list found;
    for (; !rest.empty(); ++sequence) {
        if (rest.size() < Header::kHeaderBytes) return nb::none();
        std::uint64_t bytes = 0;
        std::memcpy(&bytes, rest.data() + Header::kBytesAt, sizeof bytes);
        expected[Header::kKindAt] = rest[Header::kKindAt];
        std::memcpy(expected.data() + Header::kSequenceAt, &sequence, sizeof sequence);
        std::memcpy(expected.data() + Header::kBytesAt, &bytes, sizeof bytes);
        if (!rest.starts_with(expected) || bytes > rest.size() - Header::kHeaderBytes) return nb::none();
        const nb::object message = nb::steal(made->tp_alloc(made, 3));
        if (!message.is_valid()) throw nb::python_error();
        PyTuple_SET_ITEM(message.ptr(), 0, nb::int_(sequence).release().ptr());
        PyTuple_SET_ITEM(message.ptr(), 1, nb::int_(static_cast<unsigned char>(rest[Header::kKindAt])).release().ptr());
        PyTuple_SET_ITEM(message.ptr(), 2, nb::bytes(rest.data() + Header::kHeaderBytes, bytes).release().ptr());
        found.append(message);
        rest.remove_prefix(Header::kHeaderBytes + bytes);
    }
    return found;
}

inline void bind_frame_batch(nb::module_& m) {
    using namespace nb::literals;
    m.def("messages_in", &messages_in, "frame"_a, "header"_a, "sequence"_a, "type"_a,
          nb::sig("def messages_in(frame: bytes, header: bytes, sequence: int, type: type[typing.Any]) -> list[typing.Any] | None"),
          "The messages of a frame, from that sequence on, as tuples of `type`; None: it is no such frame.");
    nb::class_<BoundFrameBatch>(m, "FrameBatch", "Small messages that wait for each other, to share a frame.")
        .def(nb::init<const nb::object&, const nb::bytes&, std::size_t>(), "codec"_a, "header"_a, "most"_a)
        .def_prop_ro("has_put", &BoundFrameBatch::has_put, "Whether the last call of `put` has taken its message.")
        .def("put", [](BoundFrameBatch& self, nb::handle object) { return self.put(object); }, "object"_a.none(),
             nb::sig("def put(self, object: object) -> bool | None"),
             "None: it is not in it, and must be sent alone. Otherwise whether to send the frame now.")
        .def("open", &BoundFrameBatch::open, "sequence"_a, "messages"_a, "nbytes"_a,
             "So many more messages may wait, the first of which is `sequence` if none does.")
        .def("shut", &BoundFrameBatch::shut, "None may, until open(); does any?")
        .def("clear", &BoundFrameBatch::clear, "They are elsewhere, but not sent.")
        .def("rest", &BoundFrameBatch::rest, "Nothing is left to send: the descriptor is quiet.")
        .def("close", &BoundFrameBatch::close)
        .def("frame", &BoundFrameBatch::frame, nb::sig("def frame(self) -> bytes"))
        .def("fileno", &BoundFrameBatch::fd, "Readable when the frame must be sent, full or not.")
        .def_prop_ro("first", [](const BoundFrameBatch& self) { return self.batch().first(); })
        .def_prop_ro("count", [](const BoundFrameBatch& self) { return self.batch().count(); })
        .def_prop_ro("nbytes", [](const BoundFrameBatch& self) { return self.batch().size(); }, "Without headers.");
}

}  // namespace memlane::bindings
