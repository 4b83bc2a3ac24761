// One call at a time on an end that is written in Python: `with end.turn:` around each.
//
// In C++, because a signal handler may raise between any two steps of Python: then the turn would never end, and no
// other call could be made on its end.
#pragma once

#include <nanobind/nanobind.h>

#include <utility>

#include "bindings/failures.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

// Protected by the GIL.
class Turn {
public:
    // `check` may refuse the call; `finish` comes after it, while no other can begin.
    Turn(nb::object check, nb::object finish)
        : check_(std::move(check)),
          finish_(std::move(finish)),
          lock_(nb::module_::import_("threading").attr("Lock")()) {}

    void enter() {
        check_();
        if (!nb::cast<bool>(lock_.attr("acquire")(false)))
            raise_error("ConcurrentUse", nb::str("another call on this end is under way; one thread at a time may use it"));
        thread_ = PyThread_get_thread_ident();
    }

    void exit(nb::handle /*kind*/, nb::handle /*error*/, nb::handle /*traceback*/) {
        thread_ = 0;
        try {
            finish_();
        } catch (...) {
            lock_.attr("release")();
            throw;
        }
        lock_.attr("release")();
    }

    // Of the thread that is in a call; 0 if none is.
    unsigned long thread() const noexcept { return thread_; }
    // To be held by who must know that no call is under way.
    nb::object lock() const { return lock_; }

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
    nb::object check_;
    nb::object finish_;
    const nb::object lock_;
    unsigned long thread_ = 0;
};

}  // namespace memlane::bindings
