// The only place where C++ errors become Python exceptions. Texts that need facts about the peers are made by functions
// that Python installs (installed.hpp).
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <exception>
#include <string>
#include <system_error>

#include "bindings/python/installed.hpp"
#include "core/errors.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

inline void set_raised(const nb::object& error) { PyErr_SetObject(error.type().ptr(), error.ptr()); }

// Takes any bytes: a path may have some that are not UTF-8.
inline nb::object text_of(const std::string& text) {
    return nb::steal(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace"));
}

template <class... Args>
void set_error(Error error, const Args&... args) {
    const nb::handle made = Installed::instance().find(error);
    if (!made.is_valid()) Installed::instance().raise_classless(error, nb::make_tuple(args...));
    set_raised(made(args...));
}

template <class... Args>
[[noreturn]] void raise_error(Error error, const Args&... args) {
    set_error(error, args...);
    throw nb::python_error();
}

inline bool is_a(const nb::python_error& error, Error expected) noexcept {
    return error.matches(Installed::instance().find(expected));
}

inline void set_translated(const std::exception_ptr& thrown) {
    try {
        std::rethrow_exception(thrown);
    } catch (const core::SegmentMissing& e) {
        set_error(Error::SegmentMissing, e.name, text_of(e.what()));
    } catch (const core::SegmentExists& e) {
        set_error(Error::SegmentExists, e.name);
    } catch (const core::SegmentForeign& e) {
        set_raised(installed(Function::foreign_segment)(text_of(e.path), e.owner, e.remedy));
    } catch (const core::SegmentRefused& e) {
        set_error(Error::SegmentRefused, text_of(e.what()));
    } catch (const core::LayoutMismatch& e) {
        set_error(Error::LayoutMismatch, text_of(e.what()));
    } catch (const core::RankTaken& e) {
        set_error(Error::RankTaken, text_of(e.what()));
    } catch (const core::ShmExhausted& e) {
        set_error(Error::ShmExhausted, e.need, e.free, e.error);
    } catch (const std::system_error& e) {
        set_raised(installed(Function::system_fault)(e.code().value(), text_of(e.what())));
    }
}

// nanobind makes a RuntimeError of what a translator throws: errors of the installed functions are set instead.
inline void translate(const std::exception_ptr& thrown, void* /*unused*/) {
    try {
        set_translated(thrown);
    } catch (nb::python_error& error) {
        error.restore();
    }
}

// Call before reserving: where the file system does not refuse, the kernel kills a process instead.
inline void check_memory_for(std::uint64_t bytes) { installed(Function::check_memory)(bytes); }

// `end`: the endpoint object, which the installed function asks for its participants.
inline void set_failure(nb::handle end, const char* what, std::size_t slot = 0, nb::handle timeout = nb::none()) {
    set_raised(installed(Function::failure)(end, what, slot, timeout));
}
[[noreturn]] inline void raise_failure(nb::handle end, const char* what, std::size_t slot = 0) {
    set_failure(end, what, slot);
    throw nb::python_error();
}

}  // namespace memlane::bindings
