// One call at a time: a second call is refused and does not wait; closing waits for the call under way.
//
// Everything but the futex word is read and written only with the GIL held. Written in C++, because a signal
// handler may raise between any two steps of Python: the call would then never end, and no other could begin.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "bindings/python/deadline.hpp"
#include "bindings/python/failures.hpp"
#include "bindings/python/gil.hpp"
#include "core/sync.hpp"
#include "os/clock.hpp"
#include "os/futex.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class OneCall {
public:
    bool is_under_way() const noexcept { return core::load_relaxed(busy_) != 0; }

    // Python's ident of the thread that is in the call; 0 if none is.
    unsigned long caller() const noexcept { return caller_; }

    bool begin() noexcept {
        if (is_under_way()) return false;
        core::store_relaxed(busy_, 1u);
        caller_ = PyThread_get_thread_ident();
        return true;
    }
    // From here on the call belongs to no thread, but no other can begin before end().
    void disown() noexcept { caller_ = 0; }
    void end() noexcept {
        disown();
        core::store_release(busy_, 0u);
        if (waiting_ > 0) os::futex_wake_all(&busy_);
    }

    // True if no call is under way by the deadline. The call may be in code of the user (pickling, decoding),
    // so signals are handled meanwhile.
    bool wait(os::Deadline deadline) {
        const Waiting waiting{waiting_};
        while (core::load_acquire(busy_) != 0) {
            const os::Nanoseconds now = os::monotonic_now();
            if (deadline.passed(now)) return false;
            {
                const WithoutGil no_gil;
                os::futex_wait(&busy_, 1, std::min(deadline.at(), now + kSlice));
            }
            if (PyErr_CheckSignals() != 0) throw nb::python_error();
        }
        return true;
    }

private:
    static constexpr os::Nanoseconds kSlice = 100 * os::kMillisecond;

    struct Waiting {
        std::uint32_t& count;
        explicit Waiting(std::uint32_t& waiting) noexcept : count(waiting) { ++count; }
        ~Waiting() { --count; }
    };

    std::uint32_t busy_ = 0;
    std::uint32_t waiting_ = 0;
    unsigned long caller_ = 0;
};

// For ends written in Python: `with guard:` around each call.
class CallGuard {
public:
    // `check` may refuse the call; `finish` runs after it, before another can begin. Either may be None.
    CallGuard(nb::object check, nb::object finish) : check_(std::move(check)), finish_(std::move(finish)) {}

    void enter() {
        if (!check_.is_none()) check_();
        if (!call_.begin())
            raise_error(Error::ConcurrentUse, nb::str("another call is under way; one thread at a time may call"));
    }

    void exit(nb::handle /*kind*/, nb::handle /*error*/, nb::handle /*traceback*/) { end(); }

    // The thread that is in a call; 0 if none is.
    unsigned long thread() const noexcept { return call_.caller(); }

    // Waits until no call is under way, then runs `finish`, with calls kept out. False if it has not waited long enough.
    bool finish(nb::handle timeout) {
        const os::Deadline deadline = to_deadline(timeout);
        while (!call_.begin())
            if (!call_.wait(deadline)) return false;
        end();
        return true;
    }

    static int traverse(PyObject* self, visitproc visit, void* arg) noexcept {
        Py_VISIT(Py_TYPE(self));
        if (!nb::inst_ready(self)) return 0;
        const auto* guard = nb::inst_ptr<CallGuard>(self);
        Py_VISIT(guard->check_.ptr());
        Py_VISIT(guard->finish_.ptr());
        return 0;
    }
    static int clear(PyObject* self) noexcept {
        auto* guard = nb::inst_ptr<CallGuard>(self);
        guard->check_.reset();
        guard->finish_.reset();
        return 0;
    }

private:
    struct Ended {
        CallGuard& guard;
        ~Ended() { guard.call_.end(); }
    };

    void end() {
        call_.disown();
        const Ended ended{*this};
        if (!finish_.is_none()) finish_();
    }

    nb::object check_;
    nb::object finish_;
    OneCall call_;
};

inline void bind_call_guard(nb::module_& m) {
    using namespace nb::literals;
    static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(CallGuard::traverse)},
                                  {Py_tp_clear, reinterpret_cast<void*>(CallGuard::clear)},
                                  {0, nullptr}};
    nb::class_<CallGuard>(m, "CallGuard", nb::type_slots(slots), "A `with` block around a call on an end: one at a time.")
        .def(nb::init<nb::object, nb::object>(), "check"_a = nb::none(), "finish"_a = nb::none())
        .def("__enter__", &CallGuard::enter)
        .def("__exit__", &CallGuard::exit, "kind"_a.none(), "error"_a.none(), "traceback"_a.none())
        .def_prop_ro("thread", &CallGuard::thread, "The thread that is in a call, or 0.")
        .def("finish", &CallGuard::finish, "timeout"_a.none(),
             nb::sig("def finish(self, timeout: float | None) -> bool"),
             "Runs `finish` once no call runs. False: one still does after `timeout` seconds.");
}

}  // namespace memlane::bindings
