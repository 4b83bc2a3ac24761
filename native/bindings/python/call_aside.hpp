// A call that no signal handler interrupts: Python runs handlers in the main thread only, and not while that is in native code.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>

#include "bindings/python/gil.hpp"
#include "os/threads.hpp"

namespace memlane::bindings {

// Raises what the call raises. Returns false without calling if the system has no thread for it.
inline bool call_aside(const nanobind::callable& call) {
    std::exception_ptr raised;
    const bool has_run = without_gil([&] {
        return os::run_aside([&] {
            const WithGil gil;
            try {
                call();
            } catch (...) {
                raised = std::current_exception();
            }
        });
    });
    if (raised) std::rethrow_exception(raised);
    return has_run;
}

}  // namespace memlane::bindings
