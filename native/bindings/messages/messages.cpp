// Messages for Python: Outgoing and Incoming (a message as a file for a pickler), Encoder, and what MessagePack restores.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bindings/messages/encoder.hpp"
#include "bindings/messages/incoming.hpp"
#include "bindings/messages/outgoing.hpp"
#include "bindings/messages/plain.hpp"
#include "bindings/python/systems.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using namespace nb::literals;

void bind_messages(nb::module_& m) {
    m.def("is_plain", [](nb::handle object) { return PlainObject::is_plain(object.ptr()); }, "object"_a.none(),
          "Whether MessagePack restores the object exactly.");

    m.def("beyond_message_pack", &beyond_message_pack, "object"_a.none(), "extension"_a,
          "The first part of the object that MessagePack would not restore as the same type, or None.");

    nb::class_<Outgoing>(m, "Outgoing", "A message to be sent: a file for a Pickler, and its buffer_callback.")
        .def(nb::init<>())
        .def("write", &Outgoing::write, "data"_a)
        .def("add_buffer", &Outgoing::add_buffer, "buffer"_a, "Returns True to leave the buffer in the stream.");

    nb::class_<Encoder>(m, "Encoder", "Encodes an object once for all readers.")
        .def(nb::init<const nb::object&>(), "codec"_a)
        .def("encode", [](Encoder& self, nb::handle object) { self.encode(object); return self.bytes(); }, "object"_a.none(),
             "Returns the size in bytes; until clear() the message refers to the object's memory.")
        .def("clear", [](const Encoder& self) { self.message().clear(); })
        .def("joined", &Encoder::joined, "header"_a, "The whole message, after a header.")
        .def("settled", &Encoder::settled, nb::sig("def settled(self) -> bytes | Buffer"),
             "The whole message in memory that no longer changes: one copy, none for bytes.")
        .def_prop_ro("kind", [](const Encoder& self) { return static_cast<int>(self.kind()); })
        .def_prop_ro("nbytes", &Encoder::bytes);

    nb::class_<Incoming>(m, "Incoming", "The stream of a large message, as a file for an Unpickler.")
        .def("read", &Incoming::read, "size"_a = -1)
        .def("readinto", &Incoming::read_into, "target"_a)
        .def("readline", &Incoming::read_line);
}

}  // namespace memlane::bindings
