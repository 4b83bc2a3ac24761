// What both ends of a ring share: a participant slot, a position, and the wait until everybody has attached.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "broadcast/chunk_space.hpp"
#include "broadcast/lease.hpp"
#include "broadcast/left_file.hpp"
#include "broadcast/ring_layout.hpp"
#include "core/deaths.hpp"
#include "core/participants.hpp"
#include "core/status.hpp"
#include "core/wait.hpp"
#include "os/process.hpp"

namespace memlane::broadcast {

class RingEnd {
public:
    static constexpr std::size_t kWriterSlot = 0;

    RingEnd(const RingEnd&) = delete;
    RingEnd& operator=(const RingEnd&) = delete;

    // So many processes take turns on the cores, if those of other rings work with those of this one.
    void expect(std::size_t participants) noexcept { spinner_ = core::Spinner(participants, os::usable_cores()); }

    const Ring& ring() const noexcept { return ring_; }
    core::Segment& segment() const noexcept { return *segment_; }
    const core::Participants& participants() const noexcept { return participants_; }
    std::size_t slot() const noexcept { return slot_; }
    std::uint64_t position() const noexcept { return position_; }
    // The number of messages that this end has published or taken.
    std::uint64_t messages() const noexcept { return position_ - first_; }

    // Waits until the writer and every reader that is not late have attached, or one of them dies, or the writer closes. Looks
    // at once when one of the processes `expected` ends.
    template <class Look>
    core::Outcome wait_for_all(os::Deadline deadline, Look&& look, std::vector<std::uint64_t> expected = {}) {
        const std::size_t count = 1 + ring_.geometry().n_reader;
        std::optional<std::size_t> dead;
        const auto find_dead = [&] {
            for (std::size_t i = 0; i < count && !dead; ++i)
                if (i != slot_ && participants_.presence(i) == core::Presence::dead) dead = i;
            return dead.has_value();
        };
        const std::size_t needed = has_late_readers() ? 1 : count;
        const auto is_anybody_absent = [&] {
            for (std::size_t i = 0; i < needed; ++i)
                if (participants_.state(i) == core::SlotState::absent) return true;
            return participants_.absent_elsewhere() != 0;
        };
        const auto all_here = [&] { return is_stopping() || has_writer_closed() || !is_anybody_absent(); };
        core::Spinner spinner(count, os::usable_cores());
        const core::Waiting waiting(participants_.slot(slot_), core::SlotActivity::attaching);
        const core::PeerAlarm::Wider wider(alarm_, count, std::move(expected));
        const core::WaitResult result =
            core::wait_until({&participants_.membership(), nullptr, &alarm_}, spinner, deadline, all_here,
                             [&](core::LookReason reason) { return find_dead() || look(reason); });
        if (is_stopping()) return {core::Status::closed};
        if (find_dead()) return {core::Status::peer_died, *dead};
        if (result == core::WaitResult::timed_out) return {core::Status::timed_out};
        if (result == core::WaitResult::interrupted) return {core::Status::interrupted};
        if (is_anybody_absent()) return {core::Status::peer_closed, kWriterSlot};
        return {core::Status::ok};
    }

    bool has_late_readers() const noexcept { return participants_.has_late_readers(); }
    // For observers.
    void show(core::SlotActivity activity) noexcept { core::show(participants_.slot(slot_), activity); }
    // Not since when: for what happens with every message.
    void show_briefly(core::SlotActivity activity) noexcept {
        core::store_relaxed<std::int64_t>(participants_.slot(slot_).activity_since_ns, 0);
        core::store_relaxed(participants_.slot(slot_).activity, activity);
    }
    void show_rank(std::int64_t rank) noexcept {
        core::store_relaxed(participants_.slot(slot_).rank, 1 + static_cast<std::uint32_t>(rank));
    }

    // Ends a wait in another thread; later waits end at once.
    void stop_waiting() noexcept {
        core::store_relaxed(closing_, true);  // `wake` makes it visible
        core::wake_always(is_writer() ? &ring_.waits().consumed : &ring_.waits().published);
        core::wake_always(&segment_->header().membership);
    }
    bool is_stopping() const noexcept { return core::load_relaxed(closing_); }

    // For a writer: readers receive what is published, then a normal end
    // instead of a death. For a reader: the writer stops waiting for it.
    void announce_close() noexcept {
        core::store_relaxed<std::int64_t>(participants_.slot(slot_).last_progress_ns, os::tick_now());  // `leave` makes it visible
        participants_.leave(slot_);
        core::wake_always(is_writer() ? &ring_.waits().published : &ring_.waits().consumed);
    }

    // Call it before the segment is left.
    void ignore_deaths() noexcept { alarm_.leave(); }

    // Call it before the lock is dropped: shows the last end to leave what is still referred to here.
    void mark_survivors() noexcept {
        core::ParticipantSlot& own = participants_.slot(slot_);
        std::uint32_t views = core::load_relaxed(own.views);
        if (views != 0) views |= core::kViewsLeft;
        if (is_ring_kept()) views |= core::kViewsOfRing;
        core::store_relaxed(own.views, views);
    }

    // Keeps the file open for what survives this end, the last of which then closes it. Call it before the segment is left.
    void keep_file() noexcept {
        try {
            if (is_ring_kept()) segment_->mapping()->keep(left_);
            if (left_.use_count() > 1) *left_ = std::make_shared<LeftFile>(*segment_, ring_, &participants_.slot(0));
        } catch (const std::exception&) {  // no descriptor or memory: the space goes with the last of them
        }
    }
    // Call it once the segment is left.
    void note_file() noexcept {
        try {
            if (*left_) note_left_file(*left_);
        } catch (const std::exception&) {  // as above
        }
    }

    // Call it when no other process holds the segment.
    void give_back_file() noexcept {
        left_->reset();
        try {
            broadcast::give_back_file(segment_->file(), ring_, &participants_.slot(0), segment_->bytes());
        } catch (const std::exception&) {  // then it goes with the last reference
        }
    }

protected:
    // `reserved_bytes`: space that every chunk has. `first`: position of the first message. Does not join yet.
    RingEnd(std::shared_ptr<core::Segment> segment, const RingGeometry& geometry, std::size_t slot,
            std::uint64_t reserved_bytes, std::uint64_t first)
        : segment_(std::move(segment)),
          ring_(*segment_, geometry),
          participants_(*segment_),
          space_(geometry, reserved_bytes),
          spinner_(1 + geometry.n_reader, os::usable_cores()),
          first_(first),
          position_(first),
          slot_(slot),
          alarm_(participants_, slot, is_writer() ? 1 + geometry.n_reader : 1,
                 is_writer() ? ring_.waits().consumed : ring_.waits().published) {}

    bool is_writer() const noexcept { return slot_ == kWriterSlot; }
    bool is_ring_kept() const noexcept {
        std::size_t expected = 2;  // the segment and this end
        Leases& all = Leases::all();
        const std::lock_guard guard(all.mutex);
        for (const Lease* lease : all.alive) expected += lease->ring().is_same_memory(ring_) ? 1 : 0;
        return ring_.holders() > expected;
    }
    bool has_writer_closed() const noexcept { return participants_.state(kWriterSlot) == core::SlotState::closed; }

    std::shared_ptr<core::Segment> segment_;
    Ring ring_;
    core::Participants participants_;
    ChunkSpace space_;
    core::Spinner spinner_;
    os::Nanoseconds last_look_ = 0;  // when the peers' liveness was last checked
    std::uint64_t first_;  // position of the first message
    std::uint64_t position_;
    // Shared with all mappings of the file that may survive this end.
    const std::shared_ptr<std::shared_ptr<LeftFile>> left_ = std::make_shared<std::shared_ptr<LeftFile>>();

private:
    const std::size_t slot_;

protected:
    core::PeerAlarm alarm_;  // a reader waits for its writer, a writer for all

private:
    bool closing_ = false;  // atomic: set by another thread
};

}  // namespace memlane::broadcast
