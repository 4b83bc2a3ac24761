// What a slot says of a process, as memlane._failures.Participant takes it.
#pragma once

#include <nanobind/nanobind.h>

#include "bindings/failures.hpp"
#include "core/participants.hpp"
#include "os/process.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

inline const char* to_text(core::Presence presence, const os::ProcessIdentity& who) noexcept {
    switch (presence) {
        case core::Presence::absent: return "absent";
        case core::Presence::dead: return "dead";
        case core::Presence::closed:
        case core::Presence::released: return "closed";
        case core::Presence::attached: break;
    }
    switch (os::activity_of(who)) {
        case os::Activity::running: return "running";
        case os::Activity::stopped: return "stopped";
        default: return "unknown";
    }
}

// Of a slot: state, pid, position, last progress, is waiting, views, since when. Times in ns of the monotonic clock.
inline nb::tuple participant_of(const core::Participants& participants, std::size_t count, std::size_t own_slot,
                                std::size_t slot) {
    if (slot >= count) raise_error("InvalidArgument", "no such slot");
    const core::Presence presence = slot == own_slot ? core::Presence::attached : participants.presence(slot);
    const os::ProcessIdentity who = participants.identity(slot);
    const core::ParticipantSlot& facts = participants.slot(slot);
    return nb::make_tuple(to_text(presence, who), who.pid, core::load_relaxed(facts.position),
                          core::load_relaxed(facts.last_progress_ns),
                          core::load_relaxed(facts.activity) == core::SlotActivity::waiting,
                          core::load_relaxed(facts.views), core::load_relaxed(facts.views_since_ns));
}

}  // namespace memlane::bindings
