// One end of a queue as Python holds it: one call at a time, close() at any time from any thread, nothing at all
// in a forked child but close().
//
// Protected by the GIL, and only read or written with it: everything but `busy_` where it is waited for.
// (The extension does not declare itself free-threaded, so an interpreter without a GIL enables it.)
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>
#include <cmath>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "bindings/failures.hpp"
#include "core/segment.hpp"
#include "os/clock.hpp"

namespace memlane::bindings {

// None: for ever; negative: over already; a number of seconds otherwise.
inline os::Deadline to_deadline(nb::handle timeout) {
    if (timeout.is_none()) return os::Deadline::never();
    const double seconds = PyFloat_AsDouble(timeout.ptr());
    if (seconds == -1.0 && PyErr_Occurred()) {
        PyErr_Clear();
        raise_error("InvalidType", "timeout must be a number of seconds or None");
    }
    if (std::isnan(seconds)) raise_error("InvalidArgument", "timeout must be a number of seconds or None, not NaN");
    if (seconds >= 9e9) return os::Deadline::never();  // 285 years
    return os::Deadline::after(static_cast<os::Nanoseconds>(seconds * 1e9));
}

// What a wait does every 100 ms with the GIL: signal handlers, then the caller's cancel.
class Interruption {
public:
    explicit Interruption(nb::handle cancel = nb::none()) : cancel_(cancel) {
        if (!cancel_.is_none() && !nb::hasattr(cancel_, "is_set"))
            raise_error("InvalidType", "cancel must be a threading.Event or None");
    }

    bool is_cancelled() const {
        if (cancel_.is_none()) return false;
        const nb::object set = cancel_.attr("is_set")();
        return PyObject_IsTrue(set.ptr()) == 1;
    }

    // Called without the GIL; true ends the wait.
    bool operator()() {
        const nb::gil_scoped_acquire gil;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        return is_cancelled();
    }

private:
    nb::handle cancel_;
};

// `Bound` is the class that Python sees (it derives from this one).
template <class Bound, class Core>
class End {
public:
    template <class... Args>
    End(std::shared_ptr<core::Segment> segment, std::vector<std::int64_t> ranks, Args&&... args)
        : segment_(std::move(segment)), ranks_(std::move(ranks)) {
        core_ = std::make_unique<Core>(segment_, std::forward<Args>(args)...);
    }
    ~End() { finish(false); }

    Core& core() {
        if (!core_) raise_failure(self(), "closed");
        return *core_;
    }
    // For calls that only look, which may come while another one waits: not closed, not a parent's.
    Core& readable() {
        if (!segment_->is_own()) raise_failure(self(), "wrong_process");
        return core();
    }
    bool is_closed() const noexcept { return closed_; }
    // By place: what callers call the readers.
    const std::vector<std::int64_t>& ranks() const noexcept { return ranks_; }
    nb::object self() { return nb::find(static_cast<Bound&>(*this)); }

    // Around every call. `ends_block`: it ends an acquire_read or acquire_write; any other needs that none is open.
    class Call {
    public:
        Call(End& end, bool ends_block) : end_(end) {
            if (!end_.segment_->is_own()) raise_failure(end_.self(), "wrong_process");
            if (end_.closed_ || end_.closing_) raise_failure(end_.self(), "closed");
            if (end_.busy_.load(std::memory_order_relaxed)) raise_failure(end_.self(), "concurrent_use");
            if (end_.holding_ != ends_block) raise_failure(end_.self(), ends_block ? "no_block" : "concurrent_use");
            end_.busy_.store(true, std::memory_order_relaxed);
            end_.busy_thread_ = std::this_thread::get_id();
        }
        Call(const Call&) = delete;
        Call& operator=(const Call&) = delete;
        ~Call() {
            end_.busy_.store(false);
            if (end_.closing_) {
                end_.finish(end_.announce_);
                end_.busy_.notify_all();
            }
        }

    private:
        End& end_;
    };

    void set_holding(bool holding) noexcept { holding_ = holding; }

    // Wakes a call that another thread is blocked in, which then raises Closed, and frees everything once it is out.
    void close(bool announce) {
        if (closed_) return;
        if (!segment_->is_own()) {
            finish(false);
            return;
        }
        announce_ = announce;
        if (busy_.load()) {
            closing_ = true;
            core_->stop_waiting();
            // A signal handler that closes the queue on which its own thread waits: the call frees it on its way out.
            if (busy_thread_ == std::this_thread::get_id()) return;
            const nb::gil_scoped_release no_gil;
            busy_.wait(true);
            return;
        }
        segment_->remove_name();
        finish(announce);
    }

private:
    void finish(bool announce) noexcept {
        if (closed_) return;
        closed_ = true;
        if (announce && segment_->is_own()) core_->announce_close();
        segment_->abandon();
        core_.reset();
    }

    std::shared_ptr<core::Segment> segment_;
    std::vector<std::int64_t> ranks_;
    std::unique_ptr<Core> core_;
    std::atomic<bool> busy_{false};
    std::thread::id busy_thread_;
    bool holding_ = false;  // a block is open: the current chunk is the caller's
    bool closing_ = false;
    bool announce_ = false;
    bool closed_ = false;
};

}  // namespace memlane::bindings
