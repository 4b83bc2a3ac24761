// The messages that one call of `send_many` has sent, for the exception that ends it.
//
// Both are attributes, because a signal handler may raise after any call.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>

namespace memlane::bindings {

namespace nb = nanobind;

struct Burst {
    std::size_t sent = 0;

    // Stores it as `sent` of the exception, whose class may refuse attributes.
    void end_by(nb::handle error) const {
        const nb::str name("sent");
        const nb::int_ count(sent);
        if (PyObject_GenericSetAttr(error.ptr(), name.ptr(), count.ptr()) != 0) throw nb::python_error();
    }
};

inline void bind_burst(nb::module_& m) {
    nb::class_<Burst>(m, "Burst", "How many messages one call has sent.")
        .def(nb::init<>())
        .def_rw("sent", &Burst::sent)
        .def_prop_rw("error", [](Burst&) { return nb::none(); }, [](Burst& self, nb::handle error) { self.end_by(error); },
                     nb::for_getter(nb::sig("def error(self) -> None")),
                     nb::for_setter(nb::sig("def error(self, error: BaseException, /) -> None")),
                     "Store the exception that has ended the call to give it the number as `sent`.");
}

}  // namespace memlane::bindings
