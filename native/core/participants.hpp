// The participants of a segment: slot 0 is the writer, slot 1 + r is reader r.
#pragma once

#include <cstdint>

#include "core/segment.hpp"
#include "core/sync.hpp"
#include "core/wait.hpp"
#include "os/process.hpp"

namespace memlane::core {

// `dead` is decided by the lock alone: the slot says attached, but nobody holds its lock any more.
enum class Presence { absent, attached, dead, closed, released };

// What the slot says. `Participants::presence` also checks whether the process is still alive.
inline Presence to_presence(SlotState state) noexcept {
    switch (state) {
        case SlotState::closed: return Presence::closed;
        case SlotState::released: return Presence::released;
        case SlotState::attached: return Presence::attached;
        default: return Presence::absent;
    }
}

// A copy for observers, of a slot whose owner may write to it meanwhile.
inline ParticipantSlot copy_of(const ParticipantSlot& slot) noexcept {
    ParticipantSlot copy;
    copy.state = load_relaxed(slot.state);
    copy.rank = load_relaxed(slot.rank);
    copy.pid = load_relaxed(slot.pid);
    copy.start_ticks = load_relaxed(slot.start_ticks);
    copy.pid_namespace = load_relaxed(slot.pid_namespace);
    copy.skipped = load_relaxed(slot.skipped);
    copy.reading = load_relaxed(slot.reading);
    copy.absent_elsewhere = load_relaxed(slot.absent_elsewhere);
    copy.leased_bytes = load_relaxed(slot.leased_bytes);
    copy.admitted = load_relaxed(slot.admitted);
    copy.position = load_relaxed(slot.position);
    copy.last_progress_ns = load_relaxed(slot.last_progress_ns);
    copy.activity = load_relaxed(slot.activity);
    copy.views = load_relaxed(slot.views);
    copy.bytes = load_relaxed(slot.bytes);
    copy.waits = load_relaxed(slot.waits);
    copy.spills = load_relaxed(slot.spills);
    copy.views_since_ns = load_relaxed(slot.views_since_ns);
    copy.activity_since_ns = load_relaxed(slot.activity_since_ns);
    return copy;
}

// What the slot's owner does, for observers: two relaxed stores and a coarse clock.
inline void show(ParticipantSlot& slot, SlotActivity activity) noexcept {
    store_relaxed<std::int64_t>(slot.activity_since_ns, activity == SlotActivity::elsewhere ? 0 : os::tick_now());
    store_relaxed(slot.activity, activity);
}

// Shows a wait of the slot's owner until it ends, even if a signal handler raises.
class Waiting {
public:
    explicit Waiting(ParticipantSlot& slot, SlotActivity activity = SlotActivity::waiting) noexcept
        : Waiting(slot, activity, activity == SlotActivity::waiting) {}
    // `counts`: as a call that had to wait.
    Waiting(ParticipantSlot& slot, SlotActivity activity, bool counts) noexcept
        : slot_(slot), before_(load_relaxed(slot.activity)), before_since_(load_relaxed(slot.activity_since_ns)) {
        if (counts) add_single_writer<std::uint64_t>(slot_.waits, 1);
        show(slot_, activity);
    }
    Waiting(const Waiting&) = delete;
    Waiting& operator=(const Waiting&) = delete;
    ~Waiting() {
        store_relaxed(slot_.activity_since_ns, before_since_);
        store_relaxed(slot_.activity, before_);
    }

private:
    ParticipantSlot& slot_;
    const SlotActivity before_;
    const std::int64_t before_since_;
};

class Participants {
public:
    explicit Participants(Segment& segment)
        : Participants(segment, segment.section<ParticipantSlot>(Section::participants)) {}
    // For a system whose slots were appended to the segment later.
    Participants(Segment& segment, ParticipantSlot* slots) : segment_(segment), slots_(slots) {}

    ParticipantSlot& slot(std::size_t i) const noexcept { return slots_[i]; }
    bool has_late_readers() const noexcept { return (segment_.features() & kLateReaders) != 0; }

    // The caller must hold the slot's lock. Wakes peers that wait for it to attach.
    void join(std::size_t i, const os::ProcessIdentity& who) const noexcept {
        ParticipantSlot& s = slots_[i];
        store_relaxed(s.pid, who.pid);
        store_relaxed(s.start_ticks, who.start_ticks);
        store_relaxed(s.pid_namespace, who.pid_namespace);
        store_relaxed(s.last_progress_ns, os::tick_now());
        show(s, SlotActivity::elsewhere);  // a dead predecessor may have left another
        set_state(i, SlotState::attached);
    }

    void leave(std::size_t i) const noexcept { set_state(i, SlotState::closed); }

    // The number of participants without a slot here that have not attached. Only the owner of slot 0 knows of them.
    void set_absent_elsewhere(std::uint32_t count) const noexcept {
        SYNC_STORE(join);
        store_release(slots_[0].absent_elsewhere, count);
        wake_always(&segment_.header().membership);
    }
    std::uint32_t absent_elsewhere() const noexcept {
        SYNC_LOAD(join);
        return load_acquire(slots_[0].absent_elsewhere);
    }

    // Releases a slot that nobody holds: the caller keeps its lock, so nobody can attach there until it is reopened. False if a
    // live process holds it.
    bool release(std::size_t i) const {
        if (!segment_.lock().take_slot(i)) return false;
        SYNC_LOAD(leave);
        if (load_acquire(slots_[i].state) != SlotState::closed) set_state(i, SlotState::released);
        return true;
    }

    // Opens the slot of a participant that is gone to another process. The caller holds its lock, which it drops: that orders
    // what it has stored before for the process that takes it. Handles from before are refused from now on.
    void reopen(std::size_t i) const {
        ParticipantSlot& s = slots_[i];
        store_relaxed<std::uint64_t>(s.pid, 0);
        store_relaxed<std::uint64_t>(s.start_ticks, 0);
        store_relaxed<std::uint64_t>(s.pid_namespace, 0);
        store_relaxed<std::uint64_t>(s.bytes, 0);
        store_relaxed<std::uint64_t>(s.waits, 0);
        store_relaxed<std::uint32_t>(s.views, 0);
        store_relaxed<std::int64_t>(s.views_since_ns, 0);
        store_relaxed<std::int64_t>(s.last_progress_ns, 0);
        show(s, SlotActivity::elsewhere);
        store_relaxed(s.openings, load_relaxed(s.openings) + 1);
        SYNC_STEP(reopen);
        store_release(s.state, SlotState::absent);
        segment_.lock().drop_slot(i);
        wake_always(&segment_.header().membership);
    }

    SlotState state(std::size_t i) const noexcept {
        SYNC_LOAD(join);
        SYNC_LOAD(leave);
        return load_acquire(slots_[i].state);
    }

    // The futex word that tells that somebody joined or left.
    std::uint32_t& membership() const noexcept { return segment_.header().membership; }

    // The number of times that the slot was opened again; for a process that attaches only under the slot's lock.
    std::uint32_t openings(std::size_t i) const noexcept { return load_relaxed(slots_[i].openings); }

    // One system call for a slot that is attached, none otherwise.
    Presence presence(std::size_t i) const {
        switch (state(i)) {
            case SlotState::attached:
                if (segment_.lock().is_held_by_other(i)) return Presence::attached;
                // A participant stores `closed` before it drops its lock, so check the state again.
                return state(i) == SlotState::attached ? Presence::dead : to_presence(state(i));
            default: return to_presence(state(i));
        }
    }

    os::ProcessIdentity identity(std::size_t i) const noexcept {
        const ParticipantSlot& s = slots_[i];
        return {load_relaxed(s.pid), load_relaxed(s.start_ticks), load_relaxed(s.pid_namespace)};
    }

private:
    void set_state(std::size_t i, SlotState state) const noexcept {
        if (state == SlotState::attached) {
            SYNC_STORE(join);
        } else {
            SYNC_STORE(leave);
        }
        store_release(slots_[i].state, state);
        wake_always(&segment_.header().membership);
    }

    Segment& segment_;
    ParticipantSlot* slots_;
};

}  // namespace memlane::core
