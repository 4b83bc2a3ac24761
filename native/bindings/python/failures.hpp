// The only place where C++ errors become Python exceptions. Texts are made in Python (memlane._base.diagnosis), where
// the facts about the peers are at hand.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <system_error>

#include "core/errors.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

inline void set_raised(const nb::object& error) { PyErr_SetObject(error.type().ptr(), error.ptr()); }

template <class... Args>
void set_error(const char* error_class, const Args&... args) {
    set_raised(nb::module_::import_("memlane.errors").attr(error_class)(args...));
}

template <class... Args>
[[noreturn]] void raise_error(const char* error_class, const Args&... args) {
    set_error(error_class, args...);
    throw nb::python_error();
}

inline void translate(const std::exception_ptr& thrown, void* /*unused*/) {
    try {
        std::rethrow_exception(thrown);
    } catch (const core::SegmentMissing& e) {
        set_error("SegmentMissing", e.name, e.what());
    } catch (const core::SegmentExists& e) {
        set_error("SegmentExists", e.name);
    } catch (const core::SegmentForeign& e) {
        set_error("foreign_segment", e.path, e.owner, e.remedy);
    } catch (const core::SegmentRefused& e) {
        set_error("SegmentRefused", e.what());
    } catch (const core::LayoutMismatch& e) {
        set_error("LayoutMismatch", e.what());
    } catch (const core::RankTaken& e) {
        set_error("RankTaken", e.what());
    } catch (const core::ShmExhausted& e) {
        set_error("ShmExhausted", e.need, e.free, e.error);
    } catch (const std::system_error& e) {
        set_error("system_fault", e.code().value(), e.what());
    }
}

// Call before reserving: where the file system does not refuse, the kernel kills a process instead.
inline void check_memory_for(std::uint64_t bytes) { nb::module_::import_("memlane._base.segments").attr("check_memory")(bytes); }

// `end`: the endpoint object, which memlane._base.diagnosis asks for its participants.
inline void set_failure(nb::handle end, const char* what, std::size_t slot = 0, nb::handle timeout = nb::none()) {
    set_raised(nb::module_::import_("memlane._base.diagnosis").attr("failure")(end, what, slot, timeout));
}
[[noreturn]] inline void raise_failure(nb::handle end, const char* what, std::size_t slot = 0) {
    set_failure(end, what, slot);
    throw nb::python_error();
}

}  // namespace memlane::bindings
