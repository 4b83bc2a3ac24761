// Which objects come out of MessagePack exactly as they went in, so that nobody can tell that they were not
// pickled (except by `is`: a string that occurs twice becomes two equal ones).
//
// A scheduler's step is usually a small tree of dicts with string keys, lists, strings, bytes and numbers.
// MessagePack encodes and decodes it in half the time of pickle, which is most of the cost of a small message.
// The check costs about 5 ns per object and stops early: on tuples and every other type, on a container that
// occurs twice (pickle keeps it one object), on long strings, deep trees and many objects.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>

namespace memlane::bindings {

namespace nb = nanobind;

class PlainObject {
public:
    static bool is_plain(PyObject* object) noexcept { return PlainObject().look(object, 0); }

private:
    static constexpr int kMostObjects = 512;
    static constexpr int kDeepest = 16;
    static constexpr Py_ssize_t kLongest = 256;  // pickle stores a string that occurs many times only once

    bool look(PyObject* object, int depth) noexcept {
        if (++objects_ > kMostObjects) return false;
        const PyTypeObject* const type = Py_TYPE(object);
        if (type == &PyUnicode_Type) return is_short_text(object);
        if (type == &PyLong_Type) return is_short_number(object);
        if (type == &PyFloat_Type || type == &PyBool_Type || object == Py_None) return true;
        if (type == &PyBytes_Type) return PyBytes_GET_SIZE(object) <= kLongest;
        return look_inside(object, depth);
    }

    // Not inlined: most objects are leaves, and do not save the registers that its loops need.
    [[gnu::noinline]] bool look_inside(PyObject* object, int depth) noexcept {
        if (depth == kDeepest) return false;
        if (PyList_CheckExact(object)) return is_first(object) && look_into_list(object, depth);
        if (PyDict_CheckExact(object)) return is_first(object) && look_into_dict(object, depth);
        return false;
    }

    bool look_into_list(PyObject* list, int depth) noexcept {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i)
            if (!look(PyList_GET_ITEM(list, i), depth + 1)) return false;
        return true;
    }

    bool look_into_dict(PyObject* dict, int depth) noexcept {
        PyObject* key = nullptr;
        PyObject* value = nullptr;
        for (Py_ssize_t at = 0; PyDict_Next(dict, &at, &key, &value);)
            if (!PyUnicode_CheckExact(key) || !is_short_text(key) || !look(value, depth + 1)) return false;
        return true;
    }

    // Strings that are not ASCII may have no UTF-8: left to pickle.
    static bool is_short_text(PyObject* text) noexcept {
        return PyUnicode_IS_ASCII(text) && PyUnicode_GET_LENGTH(text) <= kLongest;
    }

    static bool is_short_number(PyObject* number) noexcept {
        int overflow = 0;
        PyLong_AsLongLongAndOverflow(number, &overflow);
        return overflow == 0;
    }

    // A container with one reference is in the tree once; the few others are remembered. The root may contain itself.
    bool is_first(PyObject* container) noexcept {
        if (Py_REFCNT(container) == 1) return true;
        for (std::size_t i = 0; i < shared_count_; ++i)
            if (shared_[i] == container) return false;
        if (shared_count_ == shared_.size()) return false;
        shared_[shared_count_++] = container;
        return true;
    }

    int objects_ = 0;
    std::array<PyObject*, 32> shared_{};
    std::size_t shared_count_ = 0;
};

// What the msgpack serializer may not send: msgspec would silently convert many other types to one that MessagePack
// has: sets to lists, dataclasses and subclasses of dict to maps, mutable bytes to bytes, enums, UUIDs, decimals and times to
// text and numbers.
//
// The first part of `object`, dict keys included, that would arrive as another type; None if there is none.
// Allowed are plain tuples, which may come back as lists. `extension`: msgspec's type for
// MessagePack extensions. RecursionError if `object` is nested too deeply, or contains itself.
inline nb::object beyond_message_pack(nb::handle object, nb::handle extension) {
    PyObject* const p = object.ptr();
    if (object.is_none() || PyBool_Check(p) || PyUnicode_CheckExact(p) || PyLong_CheckExact(p) || PyFloat_CheckExact(p) ||
        PyBytes_CheckExact(p) || object.type().is(extension))
        return nb::none();
    const bool is_dict = PyDict_CheckExact(p);
    if (!is_dict && !PyList_CheckExact(p) && !PyTuple_CheckExact(p)) return nb::borrow(object);
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
