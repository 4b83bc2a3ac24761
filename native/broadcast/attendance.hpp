// Waiting until everybody who takes part in a ring is there.
#pragma once

#include <optional>

#include "core/participants.hpp"
#include "core/status.hpp"
#include "core/wait.hpp"
#include "os/process.hpp"

namespace memlane::broadcast {

// Until the writer and every reader have attached. A death among them, or the writer's end, ends it, too. `End`: a
// RingReader or RingWriter, which is the participant `own_slot`.
template <class End, class Look>
core::Outcome wait_for_all(End& end, std::size_t own_slot, os::Deadline deadline, Look&& look) {
    const core::Participants& participants = end.participants();
    const std::size_t count = 1 + end.ring().geometry().n_reader;
    std::optional<std::size_t> dead;
    const auto find_dead = [&] {
        for (std::size_t i = 0; i < count && !dead; ++i)
            if (i != own_slot && participants.presence(i) == core::Presence::dead) dead = i;
        return dead.has_value();
    };
    const auto is_anybody_absent = [&] {
        for (std::size_t i = 0; i < count; ++i)
            if (participants.state(i) == core::SlotState::absent) return true;
        return participants.absent_elsewhere() != 0;
    };
    const auto all_here = [&] {
        if (end.is_stopping() || participants.state(0) == core::SlotState::closed) return true;
        return !is_anybody_absent();
    };
    core::Spinner spinner(count, os::usable_cores());
    const core::WaitResult result =
        core::wait_until({&end.segment().header().membership}, spinner, deadline, all_here,
                         [&](core::LookReason reason) { return find_dead() || look(reason); });
    if (end.is_stopping()) return {core::Status::closed};
    if (find_dead()) return {core::Status::peer_died, *dead};
    if (result == core::WaitResult::timed_out) return {core::Status::timed_out};
    if (result == core::WaitResult::interrupted) return {core::Status::interrupted};
    if (is_anybody_absent()) return {core::Status::peer_closed, 0};
    return {core::Status::ok};
}

}  // namespace memlane::broadcast
