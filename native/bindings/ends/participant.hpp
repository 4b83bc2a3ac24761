// A process as its slot describes it, as a tuple that Python names.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <vector>

#include "bindings/python/failures.hpp"
#include "core/participants.hpp"
#include "os/clock.hpp"
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

// A slot as it was at one moment. What its process is doing is read from /proc, which is slow, so only by `to_tuple`.
struct Sighting {
    std::size_t slot;
    core::Presence presence;
    os::ProcessIdentity who;
    std::uint64_t position;
    os::Nanoseconds last_progress;
    bool is_waiting;
    std::uint32_t views;
    os::Nanoseconds views_since;
    std::uint64_t skipped;
    std::uint64_t taken;  // or published

    Sighting(const core::Participants& participants, std::size_t at, core::Presence seen)
        : slot(at),
          presence(seen),
          who(participants.identity(at)),
          position(core::load_relaxed(participants.slot(at).position)),
          last_progress(core::load_relaxed(participants.slot(at).last_progress_ns)),
          is_waiting(core::load_relaxed(participants.slot(at).activity) == core::SlotActivity::waiting),
          views(core::load_relaxed(participants.slot(at).views) & ~(core::kViewsOfRing | core::kViewsLeft)),
          views_since(core::load_relaxed(participants.slot(at).views_since_ns)),
          skipped(core::load_relaxed(participants.slot(at).skipped)),
          taken(taken_at(participants, at)) {}

    // State, pid, position, last progress, is waiting, views, since when, seen when, whether the pid is of this pid
    // namespace, messages skipped and taken. Times in ns of the monotonic clock.
    nb::tuple to_tuple(os::Nanoseconds now) const {
        const bool is_pid_of_here = who.pid_namespace == 0 || who.pid_namespace == os::own_pid_namespace();
        return nb::make_tuple(to_text(presence, who), who.pid, position, last_progress, is_waiting, views, views_since, now,
                              is_pid_of_here, skipped, taken);
    }

private:
    // A reader in another's place, or a late one, has not had what came before it.
    static std::uint64_t taken_at(const core::Participants& participants, std::size_t at) noexcept {
        const core::ParticipantSlot& slot = participants.slot(at);
        const std::uint64_t position = core::load_relaxed(slot.position);
        const std::uint64_t admitted = core::load_relaxed(slot.admitted);
        if (admitted == 0 && at > 0 && participants.has_late_readers()) return 0;
        const std::uint64_t before = core::load_relaxed(slot.skipped) + (admitted == 0 ? 0 : admitted - 1);
        return position - std::min(position, before);
    }
};

inline constexpr const char* kParticipant =
    "def participant(self, slot: int) -> tuple[str, int, int, int, bool, int, int, int, bool, int, int]";

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

    // By slot, in the form of `participant`, but with what each process is doing now.
    nb::dict participants() const {
        nb::dict all;
        for (const Sighting& one : seen_) all[nb::int_(one.slot)] = one.to_tuple(at_);
        return all;
    }

private:
    os::Nanoseconds at_ = os::monotonic_now();
    std::vector<Sighting> seen_;
};

}  // namespace memlane::bindings
