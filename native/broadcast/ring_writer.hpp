// The writer's end of the ring. One message: begin (see the chunk free, keep readers out) - fill in - publish.
//
// While nobody sleeps: no system call, no lock; n + 1 flag bytes read, n + 2 written, one descriptor line, one
// line of own counters, one reading of the clock, one full fence.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "broadcast/extents.hpp"
#include "broadcast/pool.hpp"
#include "broadcast/ring_end.hpp"

namespace memlane::broadcast {

class RingWriter : public RingEnd {
public:
    static constexpr std::size_t kSlot = kWriterSlot;
    // How often a writer that never blocks asks for the dead: a quarter of the promised second, so that the first
    // call later than a second after a death always finds it.
    static constexpr os::Nanoseconds kLookInterval = 250 * os::kMillisecond;

    static constexpr std::uint64_t kShortCopy = 4096;

    // After so long without a large message the space of those that were is given back.
    static constexpr os::Nanoseconds kIdle = 10 * os::kSecond;

    // After so long space is tried again that was refused although it is there.
    static constexpr os::Nanoseconds kAgain = 100 * os::kMillisecond;

    // `reserved_bytes` of every chunk are reserved already; the rest is when it is first used. `pool_bytes` of
    // extents are kept for the messages to come. `first`: position of the first message; the end of
    // 64 bits is reached by no ring that begins at 0 (58,000 years at 10 million messages a second), and by tests.
    RingWriter(std::shared_ptr<core::Segment> segment, const RingGeometry& geometry, std::uint64_t reserved_bytes,
               std::uint64_t pool_bytes = 0, std::uint64_t first = 0)
        : RingEnd(std::move(segment), geometry, kSlot, reserved_bytes, first),
          pool_(segment_, pool_bytes),
          extents_(pool_.begin(), pool_.bytes(), os::Mapping::page_bytes() == core::kPage ? geometry.leases() : 0),
          readers_(geometry.n_reader, Reader::expected) {
        last_look_ = os::monotonic_now();
        participants_.join(kSlot, os::own_identity());
    }

    // The next chunk, between begin() and publish(). Dropped before that, there never was a message: begin() gives it again.
    class Claim {
    public:
        Claim(Claim&&) noexcept = default;
        Claim& operator=(Claim&&) noexcept = default;

        std::byte* chunk() const noexcept { return writer_->ring_.data(writer_->ring_.chunk_at(writer_->position_)); }

        // Writes a message that does not fit the chunk behind the ring. `fill(writer)` puts its parts by an ExtentWriter and
        // returns 0 or an errno. With `lends` readers may keep it beyond its turn, if the pool has a place for that. While
        // space is short it waits for older turns; ShmExhausted if there are none to wait for.
        template <class Fill, class Look>
        core::Outcome spill(std::uint64_t bytes, os::Deadline deadline, Fill&& fill, Look&& look, bool lends = false) {
            return writer_->spill(*this, bytes, deadline, fill, look, lends);
        }

        // Makes the chunk visible to all readers at once.
        void publish(ChunkKind kind, std::uint64_t length) noexcept {
            std::exchange(writer_, nullptr)->publish(*this, kind, length);
        }

    private:
        friend class RingWriter;
        Claim(RingWriter& writer, os::Nanoseconds began) noexcept : writer_(&writer), began_(began) {}

        RingWriter* writer_;
        os::Nanoseconds began_;
        Extent extent_{};  // none of a message in the chunk
    };

    // Has the next chunk its space for so many bytes? To take it may last.
    bool has_space(std::uint64_t bytes) const noexcept { return space_.has(ring_.chunk_at(position_), bytes); }

    // Gets the next chunk ready for `bytes` bytes, if it is free and has space. Throws ShmExhausted if there is none, and
    // no older turn that could give some back.
    core::Taken<Claim> begin_nowait(std::uint64_t bytes) {
        if (is_stopping()) return {core::Status::closed};
        const os::Nanoseconds now = os::monotonic_now();
        if (now - last_look_ >= kLookInterval) look_at_readers(now);
        if (const auto dead = first_dead()) return {core::Status::peer_died, *dead};
        if (!is_free() || reserve(bytes) > 0) return {core::Status::would_block};
        return start(now);
    }

    // The same, waiting for the readers. `look(reason)` is called without any lock held at least every 100 ms.
    template <class Look>
    core::Taken<Claim> begin(std::uint64_t bytes, os::Deadline deadline, Look&& look) {
        core::Outcome outcome = wait_for_readers([&] { return is_free(); }, deadline, look);
        while (outcome.status == core::Status::ok) {
            const std::uint64_t missing = reserve(bytes);
            if (missing == 0) break;
            outcome = wait_for_space(missing, deadline, look);
        }
        if (outcome.status != core::Status::ok) return outcome;
        return start(os::monotonic_now());
    }

    // Waits until every reader has finished with the message at `position`, one of those published.
    template <class Look>
    core::Outcome wait_until_read(std::uint64_t position, os::Deadline deadline, Look&& look) {
        return wait_for_readers([&] { return is_over(position); }, deadline, look);
    }

    // Is there a place for a message that is to be lent, though it would fit its chunk?
    bool can_lend(std::uint64_t bytes) const noexcept {
        return extents_.can_lend(bytes) && may_lend(bytes) && (bytes <= extents_.warm_bytes() || bytes <= os::free_bytes(segment_->file()) / 2);
    }

    // Is there space behind the ring that may be free by now, or has been for long?
    bool has_extents() const noexcept {
        return extents_.has_any() || (extents_.warm_bytes() > 0 && is_idle(os::monotonic_now()));
    }

    // To be called before every message, if has_extents(): after a large one there may never be another that would need
    // the space.
    void tend(bool is_large) {
        reclaim();
        if (!is_large && is_idle(os::monotonic_now())) extents_.trim(segment_->file());
    }

    // A death that another call has found must not be missed by the next begin_nowait().
    void look_at_next_begin() noexcept { last_look_ = 0; }

    // Nobody waits for this reader any more. True also if it had closed or was released before; false, and nothing
    // changed, while a living process is there.
    bool release_reader(std::size_t reader) {
        if (readers_[reader] == Reader::closed || readers_[reader] == Reader::released) return true;
        if (!participants_.release(1 + reader)) return false;
        readers_[reader] = Reader::released;
        return true;
    }

    // The readers that keep the next chunk from being free, or the oldest extent, by slot.
    std::vector<std::size_t> blocking_slots() {
        std::vector<std::size_t> slots;
        std::uint64_t chunk = ring_.chunk_at(position_);
        if (is_free()) {
            const auto oldest = extents_.oldest();
            if (!oldest) return slots;
            chunk = ring_.chunk_at(*oldest);
        }
        for (std::size_t r = 0; r < readers_.size(); ++r)
            if (!is_done(chunk, r)) slots.push_back(1 + r);
        return slots;
    }

private:
    enum class Reader : std::uint8_t { expected, dead, closed, released };

    bool is_done(std::uint64_t chunk, std::size_t r) noexcept {
        SYNC_LOAD(consume);
        return core::load_acquire(ring_.consumed_by(chunk, r)) != 0 || is_gone(r);
    }

    bool is_gone(std::size_t r) noexcept {
        if (readers_[r] == Reader::expected && participants_.state(1 + r) == core::SlotState::closed)
            readers_[r] = Reader::closed;
        return readers_[r] == Reader::closed || readers_[r] == Reader::released;
    }

    // Does a reader keep the extent beyond its turn? Who has closed or was released does not: its leases are copies.
    bool is_kept(std::uint64_t row) noexcept {
        for (std::size_t r = 0; r < readers_.size(); ++r) {
            SYNC_LOAD(lease);
            SYNC_LOAD(drop);
            if (core::load_acquire(ring_.lease(row, r)) != 0 && !is_gone(r)) return true;
        }
        return false;
    }

    bool is_free() noexcept {
        const std::uint64_t chunk = ring_.chunk_at(position_);
        if (core::load_relaxed(ring_.written(chunk)) == 0) return true;
        for (std::size_t r = 0; r < readers_.size(); ++r)
            if (!is_done(chunk, r)) return false;
        return true;
    }

    // Has every reader finished with the message at `position`? The flags of its chunk tell until the next message
    // in that chunk is published. By its age, so that the position may wrap.
    bool is_over(std::uint64_t position) noexcept {
        const std::uint64_t age = position_ - position;
        if (age == 0) return false;
        if (age > ring_.geometry().max_chunks) return true;
        for (std::size_t r = 0; r < readers_.size(); ++r)
            if (!is_done(ring_.chunk_at(position), r)) return false;
        return true;
    }

    // Frees the space behind the ring of the messages that everybody has read; whether there was any.
    bool reclaim() {
        return extents_.reclaim(
            segment_->file(), [this](std::uint64_t position) { return is_over(position); },
            [this](std::uint32_t lease) { return is_kept(lease - 1); });
    }

    // What is lent may be kept for ever: it takes a quarter of the file system at most, so that others always go on.
    bool may_lend(std::uint64_t bytes) const noexcept {
        const std::uint64_t most = os::total_bytes(segment_->file()) / 4;
        return bytes <= most && extents_.lent_bytes() <= most - bytes;
    }

    bool is_idle(os::Nanoseconds now) const noexcept { return now - last_spill_ >= kIdle; }

    template <class Ready, class Look>
    core::Outcome wait_for_readers(Ready&& ready, os::Deadline deadline, Look&& look) {
        const core::Waiting waiting(participants_.slot(kSlot));
        const core::WaitPoint point{&ring_.waits().consumed, &ring_.waits().writer_parked};
        const core::WaitResult result = core::wait_until(
            point, spinner_, deadline, [&] { return is_stopping() || ready(); },
            [&](core::LookReason reason) {
                const os::Nanoseconds now = os::monotonic_now();
                if (!deadline.is_poll() || now - last_look_ >= core::kPollInterval) look_at_readers(now);
                return first_dead() || look(reason);
            });
        if (is_stopping()) return {core::Status::closed};
        if (const auto dead = first_dead()) return {core::Status::peer_died, *dead};
        if (result == core::WaitResult::interrupted) return {core::Status::interrupted};
        if (result == core::WaitResult::timed_out) return {core::Status::timed_out};
        return {core::Status::ok};
    }

    // Until an older turn has given space back, or others have given enough, or no older turn is left that could. If there
    // is enough, though it was refused, somebody had taken it meanwhile, or a bound is met that nobody tells of: then not
    // for long.
    template <class Look>
    core::Outcome wait_for_space(std::uint64_t bytes, os::Deadline deadline, Look&& look) {
        const auto is_enough = [&] { return os::free_bytes(segment_->file()) >= bytes; };
        const bool was_enough = is_enough();
        const auto is_news = [&] { return reclaim() || !extents_.in_use() || (!was_enough && is_enough()); };
        const os::Deadline soon = was_enough ? std::min(deadline, os::Deadline::after(kAgain)) : deadline;
        const core::Outcome outcome = wait_for_readers(is_news, soon, look);
        return outcome.status == core::Status::timed_out && soon < deadline ? core::Outcome{core::Status::ok} : outcome;
    }

    // Could older turns give back what is missing?
    bool is_worth_waiting(int error, std::uint64_t bytes, std::uint64_t free) const noexcept {
        return extents_.in_use() && error == ENOSPC && bytes <= free + extents_.awaited_bytes();
    }

    // How much the next chunk lacks of its space for `bytes` bytes, while older turns hold so much. ShmExhausted if they
    // do not.
    std::uint64_t reserve(std::uint64_t bytes) {
        for (;;) {
            try {
                space_.ensure(*segment_, ring_.chunk_at(position_), bytes);
                return 0;
            } catch (const core::ShmExhausted& exhausted) {
                // What is kept warm for large messages must not starve small ones.
                const bool is_any_over = reclaim();
                if (extents_.trim(segment_->file()) || is_any_over) continue;
                if (!is_worth_waiting(exhausted.error, exhausted.need, os::free_bytes(segment_->file()))) throw;
                return exhausted.need;
            }
        }
    }

    core::Taken<Claim> start(os::Nanoseconds now) {
        const std::uint64_t chunk = ring_.chunk_at(position_);
        // Relaxed: the flag of every reader that may still read is 1 (or `written` is 0 anyway), which keeps it out
        // until `reset`, whose release comes after.
        SYNC_STORE(retract);
        core::store_relaxed<std::uint8_t>(ring_.written(chunk), 0);
        return Claim(*this, now);
    }

    template <class Fill, class Look>
    core::Outcome spill(Claim& claim, std::uint64_t bytes, os::Deadline deadline, Fill&& fill, Look&& look, bool lends) {
        const os::FileDescriptor& file = segment_->file();
        for (;;) {
            reclaim();
            // Asks before it writes: filling the file system to its brim only to fail would hurt everybody else.
            int error = ENOSPC;
            std::uint64_t free = os::free_bytes(file);
            if (bytes <= free || bytes - free <= extents_.warm_bytes()) {
                if (extents_.fits_if_trimmed(bytes)) extents_.trim(file);
                const Extent extent = extents_.take(bytes, position_, lends && may_lend(bytes));
                ExtentWriter writer = pool_.writer(extent, bytes);
                error = pool_.lengthen_file(extent);
                if (error == 0) error = fill(writer);
                if (error == 0) {
                    writer.finish();
                    if (extents_.is_in_pool(extent)) pool_.keep(extent);
                    last_spill_ = claim.began_;
                    if (free < os::total_bytes(file) / 8) extents_.trim(file);
                    claim.extent_ = extent;
                    return {core::Status::ok};
                }
                extents_.cancel(file);
                if (!core::is_exhaustion(error)) os::throw_errno("cannot write a message behind the ring", error);
            }
            if (extents_.trim(file)) continue;
            free = os::free_bytes(file);
            if (!is_worth_waiting(error, bytes, free)) throw core::ShmExhausted(error, bytes, free);
            const core::Outcome outcome = wait_for_space(bytes, deadline, look);
            if (outcome.status != core::Status::ok) return outcome;
        }
    }

    void publish(const Claim& claim, ChunkKind kind, std::uint64_t length) noexcept {
        const std::uint64_t chunk = ring_.chunk_at(position_);
        // Between begin() and here lies the copy: of a small object it is shorter than a look at the clock.
        const bool is_short = kind != ChunkKind::raw && length < kShortCopy;
        const os::Nanoseconds now = is_short ? claim.began_ : os::monotonic_now();
        ChunkDescriptor& d = ring_.descriptor(chunk);
        d.kind = kind;
        d.lease = claim.extent_.lease;
        d.length = length;
        d.extent_offset = claim.extent_.offset;
        d.extent_bytes = claim.extent_.bytes;
        d.turn = ring_.turn_at(position_);
        for (std::uint64_t r = 0; r < ring_.geometry().n_reader; ++r) {
            // Release, not relaxed: a reader that sees its flag fall must see `written` fallen before it, or it
            // takes the chunk of the turn before for a new one.
            SYNC_STORE(reset);
            core::store_release<std::uint8_t>(ring_.consumed_by(chunk, r), 0);
        }
        SYNC_STORE(publish);
        core::store_release<std::uint8_t>(ring_.written(chunk), 1);
        if (claim.extent_.bytes > 0) core::add_single_writer<std::uint64_t>(participants_.slot(kSlot).spills, 1);
        ++position_;
        count(length, now);
        core::wake_parked(&ring_.waits().published, ring_.parked_readers());
    }

    void look_at_readers(os::Nanoseconds now) {
        last_look_ = now;
        for (std::size_t r = 0; r < readers_.size(); ++r) {
            if (readers_[r] != Reader::expected) continue;
            switch (participants_.presence(1 + r)) {
                case core::Presence::dead: readers_[r] = Reader::dead; break;
                case core::Presence::closed: readers_[r] = Reader::closed; break;
                default: break;
            }
        }
    }

    std::optional<std::size_t> first_dead() const noexcept {
        const auto at = std::find(readers_.begin(), readers_.end(), Reader::dead);
        if (at == readers_.end()) return std::nullopt;
        return 1 + static_cast<std::size_t>(at - readers_.begin());
    }

    void count(std::uint64_t length, os::Nanoseconds now) noexcept {
        core::ParticipantSlot& own = participants_.slot(kSlot);
        core::store_relaxed(own.position, position_);
        core::store_relaxed(own.last_progress_ns, now);
        core::add_single_writer(own.bytes, length);
    }

    Pool pool_;
    Extents extents_;
    os::Nanoseconds last_spill_ = 0;
    std::vector<Reader> readers_;
};

}  // namespace memlane::broadcast
