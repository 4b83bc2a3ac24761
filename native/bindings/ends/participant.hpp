// A participant's slot, as Python decodes it.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "bindings/python/failures.hpp"
#include "core/participants.hpp"
#include "os/clock.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

inline const char* to_text(core::Presence presence) noexcept {
    switch (presence) {
        case core::Presence::absent: return "absent";
        case core::Presence::attached: return "attached";
        case core::Presence::dead: return "dead";
        case core::Presence::closed:
        case core::Presence::released: return "closed";
    }
    return "unknown";
}

// A slot as it was at one moment.
class Sighting {
public:
    Sighting(const core::Participants& participants, std::size_t slot, core::Presence presence)
        : slot_(slot), presence_(presence), copy_(core::copy_of(participants.slot(slot))) {}

    std::size_t slot() const noexcept { return slot_; }
    // Its liveness, the bytes of the slot, and when that was seen: Python decodes slots in one place.
    nb::tuple to_tuple(os::Nanoseconds now) const {
        return nb::make_tuple(to_text(presence_), nb::bytes(reinterpret_cast<const char*>(&copy_), sizeof copy_), now);
    }

private:
    std::size_t slot_;
    core::Presence presence_;
    core::ParticipantSlot copy_;
};

inline constexpr const char* kParticipant =
    "def participant(self, slot: int) -> tuple[str, bytes, int]";

// A slot, and whether its process lives; makes system calls.
inline nb::tuple participant_of(const core::Participants& participants, std::size_t count, std::size_t own_slot,
                                std::size_t slot) {
    if (slot >= count) raise_error(Error::InvalidArgument, "no such slot");
    const core::Presence presence = slot == own_slot ? core::Presence::attached : participants.presence(slot);
    return Sighting(participants, slot, presence).to_tuple(os::monotonic_now());
}

// The peers that a call waited for in vain, without a system call: the call has already looked for deaths.
class Sightings {
public:
    Sightings(const core::Participants& participants, const std::vector<std::size_t>& slots) {
        seen_.reserve(slots.size());
        for (const std::size_t slot : slots) seen_.emplace_back(participants, slot, core::to_presence(participants.state(slot)));
    }

    // By slot, in the form of `participant`.
    nb::dict participants() const {
        nb::dict all;
        for (const Sighting& one : seen_) all[nb::int_(one.slot())] = one.to_tuple(at_);
        return all;
    }

private:
    os::Nanoseconds at_ = os::monotonic_now();
    std::vector<Sighting> seen_;
};

}  // namespace memlane::bindings
