// One end of a queue as Python holds it: one call at a time, close() at any time from any thread, and in a
// forked child close() only.
//
// Protected by the GIL: read and written only with the GIL held. (The extension does not declare itself
// free-threaded, so a free-threaded interpreter enables the GIL.)
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "bindings/ends/participant.hpp"
#include "bindings/python/call_guard.hpp"
#include "bindings/python/deadline.hpp"
#include "bindings/python/failures.hpp"
#include "bindings/python/gil.hpp"
#include "core/segment.hpp"
#include "core/status.hpp"
#include "core/wait.hpp"
#include "core/watcher.hpp"
#include "os/clock.hpp"

namespace memlane::bindings {

// What a wait does with the GIL between slices: runs signal handlers, checks the caller's `cancel`, and logs a
// wait that lasts. Entering Python costs more than the rest of a slice, so it happens once a
// second and not at every slice, unless there is a `cancel` to check; a signal ends the slice anyway. Python
// code may fork: the call must not go on in the child, or both would write to the same ring.
class Interruption {
public:
    // `wait`: what is waited for, as the installed `report` knows it. `is_news`: whether a wait that lasts is worth a
    // line. Asked here and not in Python, because idle readers would import logging only to log nothing.
    Interruption(nb::object end, const core::Segment& segment, const char* wait, nb::handle cancel = nb::none(),
                 std::function<bool()> is_news = [] { return true; })
        : end_(std::move(end)), segment_(segment), wait_(wait), cancel_(cancel), is_news_(std::move(is_news)) {
        if (!cancel_.is_none() && !nb::hasattr(cancel_, "is_set"))
            raise_error(Error::InvalidType, "cancel must be a threading.Event or None");
    }

    bool is_cancelled() const {
        if (cancel_.is_none()) return false;
        const nb::object set = cancel_.attr("is_set")();
        const int truth = PyObject_IsTrue(set.ptr());
        if (truth < 0) throw nb::python_error();
        return truth == 1;
    }

    // Called without the GIL; true ends the wait.
    bool operator()(core::LookReason reason) {
        const os::Nanoseconds now = os::monotonic_now();
        const bool idle = reason == core::LookReason::slice && cancel_.is_none() && segment_.is_own();
        if (idle && now < next_look_) return false;
        const WithGil gil;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        const bool cancelled = is_cancelled();
        if (now >= next_word_) speak(now);
        next_look_ = std::min(now + os::kSecond, next_word_);
        if (!segment_.is_own()) raise_failure(end_, "wrong_process");
        return cancelled;
    }

private:
    // The first call only learns when the first line is due. After that, each pause is twice the one before.
    void speak(os::Nanoseconds now) {
        if (interval_ == 0) {
            const nb::object seconds = installed(Function::warning_interval)();
            interval_ = static_cast<os::Nanoseconds>(nb::cast<double>(seconds) * 1e9);
            next_word_ = started_ + interval_;
            if (now < next_word_) return;
        }
        constexpr os::Nanoseconds kLongest = 60 * os::kSecond;
        interval_ = std::min(2 * interval_, kLongest);
        next_word_ = now + interval_;
        if (!is_news_()) return;
        const double waited = static_cast<double>(now - started_) / 1e9;
        installed(Function::report)(end_, wait_, waited);
    }

    const nb::object end_;
    const core::Segment& segment_;
    const char* const wait_;
    const nb::handle cancel_;
    const std::function<bool()> is_news_;
    const os::Nanoseconds started_ = os::monotonic_now();
    os::Nanoseconds next_word_ = started_ + core::kSlice;
    os::Nanoseconds next_look_ = next_word_;
    os::Nanoseconds interval_ = 0;
};

// `Bound` is the class that Python sees (it derives from this one). `Bound::settle_leases` makes what a reader has lent
// independent of it; `Bound::leave` ends the core and its part in the segment. `is_ready_anyway` says that a call would not
// wait, whatever the core says.
template <class Bound, class Core>
class End {
public:
    template <class... Args>
    End(std::shared_ptr<core::Segment> segment, std::vector<std::int64_t> ranks, Args&&... args)
        : segment_(std::move(segment)), ranks_(std::move(ranks)) {
        core_ = std::make_shared<Core>(segment_, std::forward<Args>(args)...);
        if (core_->slot() != Core::kWriterSlot) core_->show_rank(ranks_[core_->slot() - 1]);
    }
    End(const End&) = delete;
    End& operator=(const End&) = delete;
    ~End() { finish(false); }

    const std::shared_ptr<Core>& shared_core() const noexcept { return core_; }
    Core& core() {
        if (!core_) raise_failure(self(), "closed");
        return *core_;
    }
    // For calls that only read, also while another call waits. Raises if this end is closed or a parent process's.
    Core& readable() {
        check_own();
        return core();
    }
    // Makes system calls.
    nb::tuple participant(std::size_t slot) {
        Core& end = readable();
        return participant_of(end.participants(), 1 + end.ring().geometry().n_reader, end.slot(), slot);
    }
    nb::tuple counters() {
        const Unwatched unwatched(*this);
        const core::ParticipantSlot& own = readable().participants().slot(core().slot());
        return nb::make_tuple(core().messages(), core::load_relaxed(own.bytes), core::load_relaxed(own.waits),
                              core::load_relaxed(own.spills));
    }
    // What people call the segment; either end may change it.
    std::string label() {
        readable();
        return core::label_of(segment_->header());
    }
    bool is_closed() const noexcept { return closed_; }
    bool is_called() const noexcept { return call_.is_under_way(); }
    // What another thread has asked for meanwhile; before the next call can begin.
    void after_call() noexcept {}
    // The position it had when it was closed.
    std::uint64_t last_position() const noexcept { return last_position_; }
    // The readers' ranks, by place.
    const std::vector<std::int64_t>& ranks() const noexcept { return ranks_; }
    nb::object self() { return nb::find(static_cast<Bound&>(*this)); }

    // Called after Python code has run in the middle of a call: it may have forked.
    void check_own() {
        if (!segment_->is_own()) raise_failure(self(), "wrong_process");
    }

    // The last moment of a call at which Python code runs before its effect is seen by others: signal handlers, which may raise,
    // close or fork.
    void look_for_signals() {
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        check_own();
        if (closing_) raise_failure(self(), "closed");
    }

    // The deadline of a call. Converting `timeout` to a number runs Python code, too.
    os::Deadline deadline_of(nb::handle timeout) {
        const os::Deadline deadline = to_deadline(timeout);
        check_own();
        return deadline;
    }

    // Around every call: one at a time, and in the block of acquire_read or acquire_write only the call that ends it.
    class Call {
    public:
        explicit Call(End& end) : end_(end) {
            end_.check_own();
            if (end_.closed_ || end_.closing_) raise_failure(end_.self(), "closed");
            if (!end_.call_.begin()) raise_failure(end_.self(), "concurrent_use");
            if (!static_cast<Bound&>(end_).has_open_block()) {
                if (end_.watch_) end_.watch_->pause();
                return;
            }
            end_.call_.end();
            raise_failure(end_.self(), "block_open");
        }
        Call(const Call&) = delete;
        Call& operator=(const Call&) = delete;
        ~Call() {
            if (end_.closing_) end_.finish(end_.announce_);
            static_cast<Bound&>(end_).after_call();
            if (end_.watch_) {
                if (!end_.closed_) end_.show_awaited();
                end_.watch_->resume(static_cast<Bound&>(end_).is_ready_anyway());
            }
            end_.call_.end();
        }

    private:
        End& end_;
    };

    // Shows what a call does besides waiting. Within a `Call`.
    class Doing {
    public:
        Doing(End& end, core::SlotActivity activity) : end_(end) { end_.core_->show_briefly(activity); }
        Doing(const Doing&) = delete;
        Doing& operator=(const Doing&) = delete;
        ~Doing() {
            if (end_.segment_->is_own()) end_.core_->show_briefly(core::SlotActivity::elsewhere);
        }

    private:
        End& end_;
    };

    // Wakes a call that is blocked in another thread; it then raises Closed and frees everything on its way
    // out. With `wait`, waits for that, except in a signal handler of the thread that is in the call.
    void close(bool announce, bool wait) {
        if (closed_) return;
        announce_ |= announce;
        std::exception_ptr problem;
        try {
            if (segment_->is_own()) segment_->remove_name();  // now, whatever happens to the call under way
        } catch (const std::system_error&) {
            problem = std::current_exception();  // rethrown when the rest is done
        }
        end_or_wait(wait);
        if (problem) std::rethrow_exception(problem);
    }

    // Its descriptor is readable while a call would not wait. It stays open, and readable, for whoever keeps it when this end
    // is closed. Throws system_error.
    std::shared_ptr<core::Watch> watch() {
        Core& end = readable();
        if (closing_) raise_failure(self(), "closed");
        if (!watch_) {
            watch_ = std::make_shared<core::Watch>(end);
            if (!call_.is_under_way()) watch_->resume(static_cast<Bound&>(*this).is_ready_anyway());
        }
        return watch_;
    }

    // Keeps the thread that watches from this end for as long as it lives; a call under way does so already.
    class Unwatched {
    public:
        explicit Unwatched(End& end) : end_(end.watch_ && !end.call_.is_under_way() ? &end : nullptr) {
            if (end_) end_->watch_->pause();
        }
        Unwatched(const Unwatched&) = delete;
        Unwatched& operator=(const Unwatched&) = delete;
        ~Unwatched() {
            if (end_ && end_->watch_) end_->watch_->resume(static_cast<Bound*>(end_)->is_ready_anyway());
        }

    private:
        End* end_;
    };

    // For observers: somebody waits for this end, though in no call of it. `counts`: as one of its waits.
    void show_waiting(bool is_waiting, bool counts) {
        if (closed_ || !segment_->is_own()) return;
        awaited_since_ = is_waiting ? os::tick_now() : 0;
        if (call_.is_under_way()) return;  // which shows it as it ends
        if (counts) core::add_single_writer<std::uint64_t>(core_->participants().slot(core_->slot()).waits, 1);
        show_awaited();
    }

private:
    void show_awaited() noexcept {
        if (!segment_->is_own() || static_cast<Bound*>(this)->has_open_block()) return;
        core::ParticipantSlot& slot = core_->participants().slot(core_->slot());
        core::store_relaxed<std::int64_t>(slot.activity_since_ns, awaited_since_);
        core::store_relaxed(slot.activity, awaited_since_ != 0 ? core::SlotActivity::waiting : core::SlotActivity::elsewhere);
    }

protected:
    [[noreturn]] void raise_outcome(const core::Outcome& outcome) {
        switch (outcome.status) {
            case core::Status::interrupted: raise_failure(self(), "cancelled");
            case core::Status::closed: raise_failure(self(), "closed");
            case core::Status::peer_closed: raise_failure(self(), "writer_closed");
            case core::Status::peer_died:
                // The writer died before all had attached. Nobody can join a queue without one, so its name is of no use.
                if (outcome.slot == 0) core().segment().remove_name_as_peer();
                raise_failure(self(), "peer_died", outcome.slot);
            default: raise_failure(self(), "unexpected");
        }
    }

    // True if the call has succeeded. For a timeout the Python error is set and not thrown: a throw takes longer
    // than all the rest of a poll that finds nothing. Other failures throw.
    [[nodiscard]] bool is_ok(const core::Outcome& outcome, nb::handle timeout) {
        if (outcome.status == core::Status::ok) return true;
        if (outcome.status != core::Status::timed_out) raise_outcome(outcome);
        set_failure(self(), "timed_out", 0, timeout);
        return false;
    }

    // `watch` is checked like a `cancel`, so that it can raise what else ends the wait; at once when one of its `pids` ends.
    void wait_for_everybody(nb::handle timeout, nb::handle watch) {
        std::vector<std::uint64_t> pids;
        if (!watch.is_none()) pids = nb::cast<std::vector<std::uint64_t>>(watch.attr("pids"));
        const os::Deadline deadline = deadline_of(timeout);
        Interruption look(self(), core().segment(), "ready", watch);
        const core::Outcome outcome = without_gil([&, &end = core()] { return end.wait_for_all(deadline, look, pids); });
        if (outcome.status == core::Status::ok) return;
        if (outcome.status == core::Status::peer_closed) raise_failure(self(), "writer_left");
        if (outcome.status != core::Status::timed_out) raise_outcome(outcome);
        set_failure(self(), "not_ready", 0, timeout);
        throw nb::python_error();
    }

private:
    void end_or_wait(bool wait) {
        const bool is_callers = call_.caller() == PyThread_get_thread_ident();
        if (!call_.is_under_way() || (!segment_->is_own() && !is_callers)) {
            finish(announce_);
            return;
        }
        closing_ = true;
        core_->stop_waiting();
        if (wait && !is_callers) call_.wait(os::Deadline::never());
    }

    void finish(bool announce) noexcept {
        if (closed_) return;
        closed_ = true;
        if (const auto watch = std::exchange(watch_, nullptr)) watch->leave();
        if (segment_->is_own()) Bound::settle_leases(*core_);
        if (announce && segment_->is_own()) core_->announce_close();
        last_position_ = core_->position();
        Bound::leave(std::move(core_), *segment_);
    }

    std::shared_ptr<core::Segment> segment_;
    std::vector<std::int64_t> ranks_;
    std::shared_ptr<Core> core_;
    OneCall call_;
    std::shared_ptr<core::Watch> watch_;  // once somebody has asked for it
    os::Nanoseconds awaited_since_ = 0;  // somebody waits for this end, though in no call of it
    std::uint64_t last_position_ = 0;
    bool closing_ = false;
    bool announce_ = false;
    bool closed_ = false;
};

}  // namespace memlane::bindings
