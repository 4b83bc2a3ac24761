// What the msgpack serializer may send. msgspec would silently convert many other types to one that MessagePack
// has: sets to lists, dataclasses to maps, enums, UUIDs, decimals and times to text and numbers.
#pragma once

#include <nanobind/nanobind.h>

namespace memlane::bindings {

namespace nb = nanobind;

// The first part of `object`, dict keys included, that would arrive as another type; None if there is none.
// Allowed are tuples, which may come back as lists, and mutable bytes. `extension`: msgspec's type for
// MessagePack extensions. RecursionError if `object` is nested too deeply, or contains itself.
inline nb::object beyond_message_pack(nb::handle object, nb::handle extension) {
    PyObject* const p = object.ptr();
    if (object.is_none() || PyBool_Check(p) || PyUnicode_CheckExact(p) || PyLong_CheckExact(p) || PyFloat_CheckExact(p) ||
        PyBytes_CheckExact(p) || PyByteArray_CheckExact(p) || PyMemoryView_Check(p) || object.type().is(extension))
        return nb::none();
    const bool is_dict = PyDict_Check(p);
    if (!is_dict && !PyList_Check(p) && !PyTuple_Check(p)) return nb::borrow(object);
    if (Py_EnterRecursiveCall(" while inspecting an object") != 0) throw nb::python_error();
    struct Left {
        ~Left() { Py_LeaveRecursiveCall(); }
    } const left;
    // No Python code runs in here, so nothing changes meanwhile.
    if (is_dict) {
        PyObject *key = nullptr, *value = nullptr;
        for (Py_ssize_t at = 0; PyDict_Next(p, &at, &key, &value);)
            for (PyObject* const part : {key, value})
                if (nb::object found = beyond_message_pack(part, extension); !found.is_none()) return found;
    } else {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(p); ++i)
            if (nb::object found = beyond_message_pack(PySequence_Fast_GET_ITEM(p, i), extension); !found.is_none()) return found;
    }
    return nb::none();
}

}  // namespace memlane::bindings
