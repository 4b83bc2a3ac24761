// Timeouts as callers give them, and the deadlines of calls. The installed `seconds_of` has the rule and its errors; what
// is common (None, floats, ints) does not enter Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cmath>
#include <limits>

#include "bindings/python/installed.hpp"
#include "os/clock.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

// The seconds of a timeout that is a float or an int; NaN if it is anything else.
inline double plain_seconds(nb::handle timeout) noexcept {
    if (PyFloat_CheckExact(timeout.ptr())) return PyFloat_AS_DOUBLE(timeout.ptr());
    if (!PyLong_CheckExact(timeout.ptr())) return std::numeric_limits<double>::quiet_NaN();  // a bool, too
    const double seconds = PyLong_AsDouble(timeout.ptr());
    if (seconds != -1.0 || !PyErr_Occurred()) return seconds;
    PyErr_Clear();  // it is beyond all doubles
    return std::numeric_limits<double>::quiet_NaN();
}

// None: for ever; zero or less: has passed already. Converting other numbers runs Python code.
inline os::Deadline to_deadline(nb::handle timeout) {
    constexpr double kForEver = 9e9;  // 285 years
    if (timeout.is_none()) return os::Deadline::never();
    double seconds = plain_seconds(timeout);
    if (std::isnan(seconds))
        seconds = nb::cast<double>(installed(Function::seconds_of)(timeout));
    if (seconds >= kForEver) return os::Deadline::never();
    return os::Deadline::after(seconds <= 0 ? 0 : static_cast<os::Nanoseconds>(seconds * 1e9));
}

}  // namespace memlane::bindings
