// An exception that came after its call had taken effect is raised in the caller's code, once the call has returned: what a
// call raises has not happened.
//
// A call written in Python ends with bytecode of its own, in which signal handlers run after native code has sent a message.
// What one of them raises there is handed to the interpreter as a pending call, which runs with the main thread's next look
// at signals. Storing an attribute is no such look, and neither is returning to a caller in Python.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/python/failures.hpp"
#include "os/process.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class AfterReturn {
public:
    // Raises `error` at once where it cannot wait: signal handlers run in the main thread only, and so do pending calls.
    static void raise(nb::handle error) {
        const bool is_main_thread = PyThread_get_thread_native_id() == static_cast<unsigned long>(os::own_pid());
        if (is_main_thread && Py_AddPendingCall(raise_pending, error.inc_ref().ptr()) == 0) return;
        set_raised(nb::borrow(error));
        throw nb::python_error();
    }

private:
    static int raise_pending(void* error) {
        set_raised(nb::steal(static_cast<PyObject*>(error)));
        return -1;
    }
};

inline void bind_after_return(nb::module_& m) {
    nb::class_<AfterReturn>(m, "AfterReturn", "Raises exceptions once the call that runs has returned.")
        .def_prop_rw("error", [](AfterReturn&) { return nb::none(); },
                     [](AfterReturn&, nb::handle error) { AfterReturn::raise(error); },
                     nb::for_getter(nb::sig("def error(self) -> None")),
                     nb::for_setter(nb::sig("def error(self, error: BaseException, /) -> None")),
                     "Store an exception to have it raised after the return; no signal handler runs in between.");
    m.attr("after_return") = nb::cast(AfterReturn());
}

}  // namespace memlane::bindings
