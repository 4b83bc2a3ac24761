// What both ends of a ring have in common for Python: participants, counters, waiting for everybody.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/end.hpp"
#include "bindings/participant.hpp"
#include "core/status.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

// Makes system calls.
template <class Core>
nb::tuple participant_of(Core& end, std::size_t slot) {
    return participant_of(end.participants(), 1 + end.ring().geometry().n_reader, end.slot(), slot);
}

template <class Core>
nb::tuple counters_of(Core& end) {
    const core::ParticipantSlot& slot = end.participants().slot(end.slot());
    return nb::make_tuple(core::load_relaxed(slot.position), core::load_relaxed(slot.bytes),
                          core::load_relaxed(slot.waits), core::load_relaxed(slot.spills));
}

template <class Bound, class Core>
[[noreturn]] void raise_outcome(End<Bound, Core>& end, const core::Outcome& outcome) {
    switch (outcome.status) {
        case core::Status::interrupted: raise_failure(end.self(), "cancelled");
        case core::Status::closed: raise_failure(end.self(), "closed");
        case core::Status::peer_closed: raise_failure(end.self(), "writer_closed");
        case core::Status::peer_died:
            // The writer died before all had attached. Nobody can join a queue without one, so its name is of no use.
            if (outcome.slot == 0) end.core().segment().remove_name_as_peer();
            raise_failure(end.self(), "peer_died", outcome.slot);
        default: raise_failure(end.self(), "unexpected");
    }
}

// Whether the call has succeeded. For a timeout the Python error is set and not thrown: a throw takes longer
// than all the rest of a poll that finds nothing. Other failures throw.
template <class Bound, class Core>
[[nodiscard]] bool is_ok(End<Bound, Core>& end, const core::Outcome& outcome, nb::handle timeout) {
    if (outcome.status == core::Status::ok) return true;
    if (outcome.status != core::Status::timed_out) raise_outcome(end, outcome);
    set_failure(end.self(), "timed_out", 0, timeout);
    return false;
}

template <class Bound, class Core>
void wait_for_everybody(End<Bound, Core>& end, nb::handle timeout) {
    const os::Deadline deadline = end.deadline_of(timeout);
    Core& core = end.core();
    Interruption look(end.self(), core.segment(), "ready");
    const core::Outcome outcome = [&] {
        const WithoutGil no_gil;
        return core.wait_for_all(deadline, look);
    }();
    if (outcome.status == core::Status::ok) return;
    if (outcome.status == core::Status::peer_closed) raise_failure(end.self(), "writer_left");
    if (outcome.status != core::Status::timed_out) raise_outcome(end, outcome);
    set_failure(end.self(), "not_ready", 0, timeout);
    throw nb::python_error();
}

}  // namespace memlane::bindings
