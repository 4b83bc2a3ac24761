// One call at a time: who comes second is refused, and does not wait; who ends something waits for the call that is under way.
//
// Protected by the GIL, and only read or written with it: everything but the word that is waited for. In C++, because a
// signal handler may raise between any two steps of Python: then the call would never end, and no other could be made.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <utility>

#include "bindings/failures.hpp"
#include "bindings/gil.hpp"
#include "core/sync.hpp"
#include "os/clock.hpp"
#include "os/futex.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class OneCall {
public:
    bool is_under_way() const noexcept { return core::load_relaxed(busy_) != 0; }

    // The thread that is in it, as Python knows it; 0: none is.
    unsigned long caller() const noexcept { return caller_; }

    bool begin() noexcept {
        if (is_under_way()) return false;
        core::store_relaxed(busy_, 1u);
        caller_ = PyThread_get_thread_ident();
        return true;
    }
    // What follows is nobody's call any more, but until end() there is no other.
    void disown() noexcept { caller_ = 0; }
    void end() noexcept {
        disown();
        core::store_release(busy_, 0u);
        if (waiting_ > 0) os::futex_wake_all(&busy_);
    }

    // Whether none is under way by then. The call may be in the caller's own code (pickling, decoding), so signals are
    // looked after.
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

// `with end.turn:` around each call on an end that is written in Python.
class Turn {
public:
    // `check` may refuse the call; `finish` comes after it, while no other can begin. None: there is nothing to do.
    Turn(nb::object check, nb::object finish) : check_(std::move(check)), finish_(std::move(finish)) {}

    void enter() {
        if (!check_.is_none()) check_();
        if (!call_.begin())
            raise_error("ConcurrentUse", nb::str("another call on this end is under way; one thread at a time may use it"));
    }

    void exit(nb::handle /*kind*/, nb::handle /*error*/, nb::handle /*traceback*/) {
        call_.disown();
        const Ended ended{*this};
        if (!finish_.is_none()) finish_();
    }

    // Of the thread that is in a call; 0 if none is.
    unsigned long thread() const noexcept { return call_.caller(); }

    // Keeps calls out until release(), when none is under way any more. A negative number of seconds: for ever.
    bool acquire(double timeout) {
        const os::Deadline deadline =
            timeout < 0 ? os::Deadline::never() : os::Deadline::after(static_cast<os::Nanoseconds>(timeout * 1e9));
        while (!call_.begin())
            if (!call_.wait(deadline)) return false;
        call_.disown();
        return true;
    }
    void release() noexcept { call_.end(); }

    static int traverse(PyObject* self, visitproc visit, void* arg) noexcept {
        Py_VISIT(Py_TYPE(self));
        if (!nb::inst_ready(self)) return 0;
        const auto* turn = nb::inst_ptr<Turn>(self);
        Py_VISIT(turn->check_.ptr());
        Py_VISIT(turn->finish_.ptr());
        return 0;
    }
    static int clear(PyObject* self) noexcept {
        auto* turn = nb::inst_ptr<Turn>(self);
        turn->check_.reset();
        turn->finish_.reset();
        return 0;
    }

private:
    struct Ended {
        Turn& turn;
        ~Ended() { turn.release(); }
    };

    nb::object check_;
    nb::object finish_;
    OneCall call_;
};

}  // namespace memlane::bindings
