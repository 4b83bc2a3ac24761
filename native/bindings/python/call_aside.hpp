// A call that no signal handler interrupts: Python runs handlers in the main thread only, and not while that is in native code.
#pragma once

#include <nanobind/nanobind.h>

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>

#include "bindings/python/gil.hpp"
#include "os/threads.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

// `start` is Python's `start_new_thread`. Raises what the call raises. Returns false without calling if the system has no
// thread for it.
//
// The thread is Python's, which makes its state with the GIL held: a fork by another thread would otherwise copy the
// interpreter's lock of all states in the middle, and the child wait for it for ever.
inline bool call_aside(const nb::callable& call, const nb::callable& start) {
    struct Aside {
        std::mutex mutex;
        std::condition_variable ended;
        bool has_ended = false;
        std::int64_t thread = 0;
        std::exception_ptr raised;
    };
    const auto aside = std::make_shared<Aside>();
    const nb::object run = nb::cpp_function([aside, call] {
        aside->thread = os::own_thread();
        try {
            call();
        } catch (...) {
            aside->raised = std::current_exception();
        }
        const std::lock_guard lock(aside->mutex);
        aside->has_ended = true;
        aside->ended.notify_all();
    });
    try {
        start(run, nb::make_tuple());
    } catch (const nb::python_error& error) {
        if (error.matches(PyExc_RuntimeError)) return false;
        throw;
    }
    without_gil([&] {
        std::unique_lock lock(aside->mutex);
        aside->ended.wait(lock, [&] { return aside->has_ended; });
        lock.unlock();
        os::until_gone(aside->thread);
    });
    if (aside->raised) std::rethrow_exception(aside->raised);
    return true;
}

}  // namespace memlane::bindings
