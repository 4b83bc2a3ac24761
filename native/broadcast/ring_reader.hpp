// A reader's end of the ring. One message: begin (see the chunk published) - read - finish.
//
// While messages are there: no system call, no lock; two flag bytes and one descriptor line read, one flag byte
// and one line of own counters written, one reading of the clock, one full fence.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <optional>

#include "broadcast/chunk_space.hpp"
#include "broadcast/ring_layout.hpp"
#include "core/participants.hpp"
#include "core/status.hpp"
#include "core/wait.hpp"

namespace memlane::broadcast {

class RingReader {
public:
    RingReader(std::shared_ptr<core::Segment> segment, const RingGeometry& geometry, std::size_t reader)
        : segment_(std::move(segment)),
          ring_(*segment_, geometry),
          participants_(*segment_),
          space_(geometry, 0),
          reader_(reader),
          spinner_(1 + geometry.n_reader, os::usable_cores()),
          last_look_(os::monotonic_now()) {
        const core::SlotState before = participants_.state(slot());
        if (before != core::SlotState::absent)
            throw core::RankTaken("the place was taken before by pid " +
                                  std::to_string(participants_.identity(slot()).pid) + ", which has left it");
        participants_.join(slot(), os::own_identity());
    }

    const Ring& ring() const noexcept { return ring_; }
    core::Segment& segment() const noexcept { return *segment_; }
    const core::Participants& participants() const noexcept { return participants_; }
    std::size_t slot() const noexcept { return 1 + reader_; }
    std::uint64_t position() const noexcept { return position_; }
    const std::byte* chunk() const noexcept { return ring_.data(ring_.chunk_at(position_)); }

    // Takes the next chunk if it is there.
    core::Outcome begin_nowait() {
        if (is_stopping()) return {core::Status::closed};
        return is_published() ? core::Outcome{core::Status::ok} : core::Outcome{core::Status::would_block};
    }

    // The same, waiting for the writer. What it published before it closed or died comes first. `look()` is called
    // without any lock held at least every 100 ms.
    template <class Look>
    core::Outcome begin(os::Deadline deadline, Look&& look) {
        core::ParticipantSlot& own = participants_.slot(slot());
        core::add_single_writer<std::uint64_t>(own.waits, 1);
        core::store_relaxed(own.activity, core::SlotActivity::waiting);
        bool writer_died = false;
        const core::WaitPoint point{&ring_.waits().published, &ring_.parked_readers()[reader_]};
        const core::WaitResult result = core::wait_until(
            point, spinner_, deadline,
            [&] { return is_stopping() || is_published() || has_writer_closed(); },
            [&] {
                writer_died = is_writer_dead();
                return writer_died || look();
            });
        core::store_relaxed(own.activity, core::SlotActivity::elsewhere);
        if (is_stopping()) return {core::Status::closed};
        // A poll looks, too, but not more often than a sleeper would.
        if (result == core::WaitResult::timed_out && os::monotonic_now() - last_look_ >= core::kSlice)
            writer_died = is_writer_dead();
        if (is_published()) return {core::Status::ok};
        if (has_writer_closed()) return {core::Status::peer_closed, 0};
        if (writer_died) return {core::Status::peer_died, 0};
        if (result == core::WaitResult::interrupted) return {core::Status::interrupted};
        return {core::Status::timed_out};
    }

    // What memlane's writer says of the taken chunk; none if a process filled it by the documented part alone, or
    // if what it says cannot be. A private copy: it cannot change any more.
    std::optional<ChunkDescriptor> descriptor() const {
        const ChunkDescriptor d = ring_.descriptor(ring_.chunk_at(position_));
        if (d.turn != ring_.turn_at(position_)) return std::nullopt;
        if (d.extent_bytes == 0)
            return d.length <= ring_.geometry().max_chunk_bytes ? std::optional(d) : std::nullopt;
        const os::FileFacts file = os::facts_of(segment_->file());
        const bool lies_in_the_file = d.extent_offset <= file.bytes && d.length <= file.bytes - d.extent_offset;
        // What was written has its space: nobody is made to allocate for a message that is not there.
        return lies_in_the_file && d.length <= file.allocated ? std::optional(d) : std::nullopt;
    }

    // Copies a part of the message that `d` describes; false if it is not there.
    bool copy_out(const ChunkDescriptor& d, std::uint64_t offset, std::uint64_t bytes, void* to) const noexcept {
        if (offset > d.length || bytes > d.length - offset) return false;
        if (d.extent_bytes > 0) return os::read_at(segment_->file(), to, bytes, d.extent_offset + offset);
        std::memcpy(to, chunk() + offset, bytes);
        return true;
    }

    // Whoever reads beyond what was written touches pages that may have no space yet: takes it first.
    void ensure_whole_chunk() { space_.ensure_all(*segment_, ring_.chunk_at(position_)); }

    // Gives the taken chunk back; from now on the writer may change it.
    void finish(std::uint64_t length) noexcept {
        SYNC_STORE(consume);
        core::store_release<std::uint8_t>(ring_.consumed_by(ring_.chunk_at(position_), reader_), 1);
        ++position_;
        core::ParticipantSlot& own = participants_.slot(slot());
        core::store_relaxed(own.position, position_);
        core::store_relaxed(own.last_progress_ns, os::monotonic_now());
        core::add_single_writer(own.bytes, length);
        core::wake_parked(&ring_.waits().consumed, {&ring_.waits().writer_parked, 1});
    }

    // Ends a wait in another thread; every later one ends at once.
    void stop_waiting() noexcept {
        closing_.store(true);
        core::wake_always(&ring_.waits().published);
        core::wake_always(&segment_->header().membership);
    }
    bool is_stopping() const noexcept { return closing_.load(std::memory_order_relaxed); }

    // The writer stops waiting for this reader.
    void announce_close() noexcept {
        participants_.leave(slot());
        core::wake_always(&ring_.waits().consumed);
    }

private:
    // Own flag first: once it is 0 the writer has passed `reset`, so the `written` that follows is of this turn.
    // The other order could pair the old `written` = 1 with the new flag.
    bool is_published() const noexcept {
        const std::uint64_t chunk = ring_.chunk_at(position_);
        SYNC_LOAD(reset);
        if (core::load_acquire(ring_.consumed_by(chunk, reader_)) != 0) return false;
        SYNC_LOAD(retract);
        SYNC_LOAD(publish);
        return core::load_acquire(ring_.written(chunk)) != 0;
    }

    bool has_writer_closed() const noexcept { return participants_.state(0) == core::SlotState::closed; }

    bool is_writer_dead() {
        last_look_ = os::monotonic_now();
        return participants_.presence(0) == core::Presence::dead;
    }

    std::shared_ptr<core::Segment> segment_;
    Ring ring_;
    core::Participants participants_;
    ChunkSpace space_;
    std::size_t reader_;
    core::Spinner spinner_;
    os::Nanoseconds last_look_;
    std::uint64_t position_ = 0;
    std::atomic<bool> closing_{false};
};

}  // namespace memlane::broadcast
