// The writer's end of the ring. One message: begin (see the chunk free, keep readers out) - fill in - publish.
//
// While nobody sleeps: no system call and no lock; reads n + 1 flag bytes, and the last tick of the clock; writes n + 2
// flag bytes, one descriptor line and one line of own counters; one full fence. latest.hpp says what differs there.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "broadcast/extents.hpp"
#include "broadcast/latest.hpp"
#include "broadcast/pool.hpp"
#include "broadcast/ring_end.hpp"
#include "core/watcher.hpp"

namespace memlane::broadcast {

class RingWriter : public RingEnd, public core::Watched {
public:
    static constexpr std::size_t kSlot = kWriterSlot;
    // How often a writer that never blocks checks for dead readers: a quarter of the promised second, so that the first
    // call later than a second after a death always finds it.
    static constexpr os::Nanoseconds kLookInterval = 250 * os::kMillisecond;

    // After this time without a large message, the space of earlier ones is freed.
    static constexpr os::Nanoseconds kIdle = 10 * os::kSecond;

    // Space that was refused although there seems to be enough is tried again after this time.
    static constexpr os::Nanoseconds kAgain = 100 * os::kMillisecond;

    // `reserved_bytes` of every chunk are reserved already; the rest is reserved on first use. `pool_bytes` of extents
    // are kept for later messages. `first`: position of the first message. Only tests reach the end of 64 bits: a ring
    // that begins at 0 takes 58,000 years at 10 million messages a second.
    RingWriter(std::shared_ptr<core::Segment> segment, const RingGeometry& geometry, std::uint64_t reserved_bytes,
               std::uint64_t pool_bytes = 0, std::uint64_t first = 0)
        : RingEnd(std::move(segment), geometry, kSlot, reserved_bytes, first),
          pool_(segment_, pool_bytes),
          extents_(pool_.begin(), pool_.bytes(), os::Mapping::page_bytes() == core::kPage ? geometry.leases() : 0),
          has_uncounted_(has_late_readers()),
          readers_(geometry.n_reader, has_late_readers() ? Reader::uncounted : Reader::expected) {
        if (ring_.is_latest()) latest_.emplace(ring_);
        last_look_ = os::monotonic_now();
        if (participants_.state(kSlot) != core::SlotState::absent)
            throw core::RankTaken("the place was already taken by pid " + std::to_string(participants_.identity(kSlot).pid) +
                                  ", which has left it");
        participants_.join(kSlot, os::own_identity());
    }

    // The next chunk, from begin() until publish(). A dropped claim sends nothing, and begin() returns the chunk again.
    class Claim {
    public:
        Claim(Claim&&) noexcept = default;
        Claim& operator=(Claim&&) noexcept = default;

        std::byte* chunk() const noexcept { return writer_->ring_.data(writer_->next_chunk()); }

        // Writes the message to an extent instead of the chunk. `fill(writer)` writes its parts with an ExtentWriter,
        // and returns 0 or an errno. With `lends`, readers may keep the extent beyond its lap, if it is in the pool
        // and half of the file system stays free. If there is no space for an extent, reserves the chunk for a message
        // that fits it: see is_spilled(). While space is short, waits for readers that have messages left to read;
        // throws ShmExhausted if there are none.
        template <class Fill, class Look>
        core::Outcome spill(std::uint64_t bytes, os::Deadline deadline, Fill&& fill, Look&& look, bool lends = false) {
            return writer_->spill(*this, bytes, deadline, fill, look, lends);
        }
        bool is_spilled() const noexcept { return extent_.bytes > 0; }

        // Makes the chunk visible to all readers at once.
        void publish(ChunkKind kind, std::uint64_t length) noexcept {
            RingWriter& writer = *std::exchange(writer_, nullptr);
            writer.publish(*this, kind, length);
            writer.wake_readers();
        }

    private:
        friend class RingWriter;
        explicit Claim(RingWriter& writer) noexcept : writer_(&writer) {}

        RingWriter* writer_;
        Extent extent_{};  // empty if the message is in the chunk
    };

    // Messages that are published one after the other; readers that sleep are woken by wake(), and at its end.
    class Burst {
    public:
        explicit Burst(RingWriter& writer) noexcept : writer_(writer) {}
        Burst(const Burst&) = delete;
        Burst& operator=(const Burst&) = delete;
        ~Burst() { wake(); }

        void publish(Claim& claim, ChunkKind kind, std::uint64_t length) noexcept {
            std::exchange(claim.writer_, nullptr)->publish(claim, kind, length);
            is_due_ = true;
        }
        // Call it before anything that takes long, or waits for readers.
        void wake() noexcept {
            if (std::exchange(is_due_, false)) writer_.wake_readers();
        }

    private:
        RingWriter& writer_;
        bool is_due_ = false;
    };

    // True if the next chunk has space for this many bytes. Otherwise reserving it may take a while.
    bool has_space(std::uint64_t bytes) noexcept { return space_.has(next_chunk(), bytes); }
    // True if a view shows the next chunk: the message must go to an extent. Only in a ring of the latest message.
    // Ask before the message is begun.
    bool is_next_kept() noexcept {
        if (!latest_) return false;
        latest_->begin();
        next_chunk();
        return latest_->is_next_kept();
    }

    // Prepares the next chunk for `bytes` bytes, if it is free and has space. Throws
    // ShmExhausted if there is no space, and no reader that could free some.
    core::Taken<Claim> begin_nowait(std::uint64_t bytes) {
        if (is_stopping()) return {core::Status::closed};
        lacks_space_ = false;
        admit_late_readers();
        if (const os::Nanoseconds now = os::tick_now(); now - last_look_ >= kLookInterval) look_at_readers(now);
        if (const auto dead = first_dead()) return {core::Status::peer_died, *dead};
        if (!is_free() || reserve(bytes) > 0) return {core::Status::would_block};
        return start();
    }

    // The same, but waits for the readers. Calls `look(reason)` at least every 100 ms, without any lock held.
    template <class Look>
    core::Taken<Claim> begin(std::uint64_t bytes, os::Deadline deadline, Look&& look) {
        admit_late_readers();
        core::Outcome outcome = wait_for_readers([&] { return is_free(); }, deadline, look);
        while (outcome.status == core::Status::ok) {
            const std::uint64_t missing = reserve(bytes);
            if (missing == 0) break;
            outcome = wait_for_space(missing, deadline, look);
        }
        if (outcome.status != core::Status::ok) return outcome;
        return start();
    }

    // Waits until every reader has finished with the message at `position`, which must have been published.
    template <class Look>
    core::Outcome wait_until_read(std::uint64_t position, os::Deadline deadline, Look&& look) {
        return wait_for_readers([&] { return is_over(position); }, deadline, look);
    }

    // True if a message that is to be lent goes to an extent even if it fits its chunk. Lent or not, the extent
    // is used again, while space for every chunk adds up.
    bool prefers_extent(std::uint64_t bytes) const noexcept { return extents_.can_lend(bytes); }

    // True if there are extents that may be free by now, or have been free for long.
    bool has_extents() const noexcept {
        return extents_.has_any() || (extents_.warm_bytes() > 0 && is_idle());
    }

    // Call it before every message, if has_extents(): another large message, which would reclaim the space of the last
    // one, may never come.
    void tend(bool is_large) {
        const bool is_any_over = reclaim();
        if (!is_large && (is_idle() || (is_any_over && !os::is_half_free(segment_->file())))) extents_.trim(segment_->file());
    }

    // True if a message of this size in an extent takes memory that the ring does not have yet.
    bool takes_memory(std::uint64_t bytes) const noexcept { return !extents_.has_warm(bytes); }

    // Gives back what this writer keeps but does not need. Returns whether there was any.
    bool give_back_unused() {
        const os::FileDescriptor& file = segment_->file();
        bool any = reclaim();
        any |= extents_.trim(file);
        const std::uint64_t next = next_chunk();
        if (space_.give_back(file, [&](std::uint64_t chunk) { return chunk != next && is_free(chunk); })) {
            any = true;
            std::uint32_t& count = ring_.waits().given_back;
            core::store_relaxed(count, core::load_relaxed(count) + 1);
        }
        return any;
    }

    // Waits until an extent is no longer in use, or none is.
    template <class Look>
    core::Outcome wait_for_extent(os::Deadline deadline, Look&& look) {
        bool is_any_over = false;
        const core::Outcome outcome =
            wait_for_readers([&] { return (is_any_over |= reclaim()) || !has_awaited(); }, deadline, look);
        lacks_space_ = outcome.status == core::Status::timed_out;
        return outcome;
    }
    bool has_awaited() const noexcept { return !latest_ && extents_.awaited_bytes() > 0; }

    // When the last reader closed, if every reader has closed or was released, as of the last look at them.
    std::optional<os::Nanoseconds> deserted_since() const noexcept {
        os::Nanoseconds latest = 0;
        for (std::size_t r = 0; r < readers_.size(); ++r) {
            if (readers_[r] != Reader::closed && readers_[r] != Reader::released) return std::nullopt;
            latest = std::max<os::Nanoseconds>(latest, core::load_relaxed(participants_.slot(1 + r).last_progress_ns));
        }
        return latest > 0 ? std::optional(latest) : std::nullopt;  // 0: none has ever attached
    }
    // True if, at the last look, all readers had been gone for a second. A writer that ends together with its readers stops
    // sending before that.
    bool is_deserted() const noexcept { return is_deserted_; }

    // For a thread that watches. A lack of space is tried again: nobody tells when others free some.
    core::WaitPoint wait_point() noexcept final {
        return {&ring_.waits().consumed, &ring_.waits().writer_parked, &alarm_};
    }
    bool is_ready() noexcept final { return is_stopping() || first_dead() || (!lacks_space_ && is_free()); }
    bool look() final {
        look_at_readers(os::monotonic_now());
        return first_dead() || lacks_space_;
    }
    bool may_be_silent() const noexcept final { return lacks_space_; }

    // Makes the next begin_nowait() check for dead readers, so that it reports a death that another call has found.
    void look_at_next_begin() noexcept { last_look_ = 0; }

    // Stops waiting for this reader. True also if it had closed or been released before; false, with nothing changed, while a
    // live process holds its slot.
    bool release_reader(std::size_t reader) {
        if (readers_[reader] == Reader::closed || readers_[reader] == Reader::released) return true;
        if (!participants_.release(1 + reader)) return false;
        readers_[reader] = Reader::released;
        return true;
    }

    // Opens the place of a reader that has closed or was released: whoever takes it gets every message from the next on, or, if
    // it is late, from its own attaching on. would_block, with nothing changed, if it is another's; `look` as for begin().
    template <class Look>
    core::Outcome readmit(std::size_t reader, Look&& look) {
        if (!is_gone(reader) || readers_[reader] == Reader::uncounted) return {core::Status::would_block};
        // One that closes in this moment drops its lock at once, unless it is stopped.
        const core::WaitResult result =
            core::wait_until({&segment_->header().membership}, spinner_, os::Deadline::after(os::kSecond),
                             [&] { return is_stopping() || segment_->lock().take_slot(1 + reader); }, look);
        if (is_stopping()) return {core::Status::closed};
        if (result == core::WaitResult::interrupted) return {core::Status::interrupted};
        if (result == core::WaitResult::timed_out) return {core::Status::would_block};
        reopen(reader, has_late_readers());
        return {core::Status::ok};
    }

    // The same without waiting, for a reader that counts from its own attaching on: no message waits for one that never comes.
    bool readmit_late(std::size_t reader) {
        if (!is_gone(reader) || readers_[reader] == Reader::uncounted) return false;
        if (!segment_->lock().take_slot(1 + reader)) return false;  // it closes in this moment
        reopen(reader, true);
        return true;
    }

    // The slots of the readers that keep the next chunk from being free; if it is free, those that have not finished
    // with the oldest message, whose space may be wanted.
    std::vector<std::size_t> blocking_slots() {
        std::vector<std::size_t> slots;
        if (latest_) return slots;
        std::uint64_t chunk = ring_.chunk_at(position_);
        if (is_free()) {
            const auto oldest = find_unfinished();
            if (!oldest) return slots;
            chunk = ring_.chunk_at(*oldest);
        }
        for (std::size_t r = 0; r < readers_.size(); ++r)
            if (!is_done(chunk, r)) slots.push_back(1 + r);
        return slots;
    }

    // What a reader keeps of messages that it has read.
    struct Kept {
        std::size_t slot;
        std::uint32_t lent_messages = 0;
        std::uint64_t lent_bytes = 0;
        std::uint32_t viewed_messages = 0;
        std::uint64_t viewed_bytes = 0;
    };
    // An entry for every reader that keeps anything.
    std::vector<Kept> kept() {
        std::vector<Kept> all;
        for (std::size_t r = 0; r < readers_.size(); ++r) {
            Kept one{1 + r};
            if (is_gone(r)) continue;
            extents_.for_each_used([&](const Extent& extent, std::uint64_t) {
                if (extent.lease == 0 || !is_kept_by(extent.lease - 1, r)) return;
                ++one.lent_messages;
                one.lent_bytes += extent.bytes;
            });
            for_each_in_ring([&](std::uint64_t position, std::uint64_t chunk) {
                if (latest_ ? core::load_relaxed(ring_.kept_by(chunk, r)) == kNotKept
                            : is_done(chunk, r) || has_left_to_read(position, r))
                    return;
                ++one.viewed_messages;
                // In a ring of the latest, the message there may be a later one, and in an extent.
                one.viewed_bytes += latest_ ? space_.bytes_of(chunk) : core::load_relaxed(ring_.descriptor(chunk).length);
            });
            if (one.lent_messages + one.viewed_messages > 0) all.push_back(one);
        }
        return all;
    }

private:
    // uncounted: a late reader that has not attached, or one in a place that readmit_late() has opened.
    enum class Reader : std::uint8_t { expected, dead, closed, released, uncounted };

    bool is_waited_for(std::size_t r) const noexcept { return readers_[r] == Reader::expected || readers_[r] == Reader::dead; }

    bool is_done(std::uint64_t chunk, std::size_t r) noexcept {
        SYNC_LOAD(consume);
        return core::load_acquire(ring_.consumed_by(chunk, r)) != 0 || is_gone(r);
    }

    bool is_gone(std::size_t r) noexcept {
        if ((readers_[r] == Reader::expected || readers_[r] == Reader::uncounted) &&
            participants_.state(1 + r) == core::SlotState::closed)
            readers_[r] = Reader::closed;
        return !is_waited_for(r);
    }

    auto is_gone_to() noexcept {
        return [this](std::size_t r) noexcept { return is_gone(r); };
    }

    // Counts the late readers that have attached since: their first message is the next.
    void admit_late_readers() noexcept {
        if (!has_uncounted_) return;
        SYNC_LOAD(wake);
        if (const std::uint32_t seen = core::load_acquire(segment_->header().membership); seen != membership_) {
            membership_ = seen;
            admit();
        }
    }
    void admit() noexcept {
        has_uncounted_ = false;
        for (std::size_t r = 0; r < readers_.size(); ++r) {
            if (readers_[r] != Reader::uncounted) continue;
            if (participants_.state(1 + r) != core::SlotState::attached) {
                has_uncounted_ = true;
                continue;
            }
            // Relaxed: the full fence at the end of every publish has come before, so that the reader sees all flags of
            // older messages, which count as read.
            SYNC_STORE(admit);
            core::store_relaxed<std::uint64_t>(participants_.slot(1 + r).admitted, 1 + position_);
            readers_[r] = Reader::expected;
        }
    }

    // The caller holds the lock of the slot, which this drops.
    void reopen(std::size_t r, bool is_late) noexcept {
        forget(r, is_late);
        readers_[r] = is_late ? Reader::uncounted : Reader::expected;
        has_uncounted_ |= is_late;
        participants_.reopen(1 + r);
    }

    // Removes what the reader has left in the ring. The caller holds the lock of its slot.
    void forget(std::size_t r, bool is_late) noexcept {
        for (std::uint64_t chunk = 0; chunk < ring_.geometry().max_chunks; ++chunk)
            core::store_relaxed<std::uint8_t>(ring_.consumed_by(chunk, r), latest_ ? kNotKept : 1);
        bool keeps_any = false;  // for good, in a process that lives on
        for (std::uint64_t row = 0; row < ring_.geometry().leases(); ++row) {
            keeps_any |= core::load_relaxed(ring_.lease(row, r)) == kKeptForGood;
            if (core::load_relaxed(ring_.lease(row, r)) == kKept) core::store_relaxed(ring_.lease(row, r), kNotKept);
        }
        core::store_relaxed<std::uint8_t>(ring_.parked_readers()[r], 0);
        DeliveryTimes& deliveries = ring_.deliveries(r);
        core::store_relaxed<std::uint64_t>(deliveries.total_ns, 0);
        for (std::uint64_t& count : deliveries.counts) core::store_relaxed<std::uint64_t>(count, 0);
        core::ParticipantSlot& slot = participants_.slot(1 + r);
        if (!keeps_any) core::store_relaxed<std::uint64_t>(slot.leased_bytes, 0);
        if ((core::load_relaxed(slot.views) & (core::kViewsOfRing | core::kViewsLeft)) != 0) {
            core::ParticipantSlot& own = participants_.slot(kSlot);  // whoever leaves last must still know
            core::store_relaxed(own.views, core::load_relaxed(own.views) | core::kViewsOfRing | core::kViewsLeft);
        }
        core::store_relaxed<std::uint32_t>(slot.reading, 0);
        core::store_relaxed<std::uint64_t>(slot.skipped, 0);
        core::store_relaxed(slot.position, position_);
        core::store_relaxed<std::uint64_t>(slot.admitted, is_late ? 0 : 1 + position_);
    }

    // True if a reader keeps the extent beyond its lap. A closed or released reader does not: its leases are copies.
    bool is_kept(std::uint64_t row) noexcept {
        for (std::size_t r = 0; r < readers_.size(); ++r)
            if (is_kept_by(row, r)) return true;
        return false;
    }
    bool is_kept_by(std::uint64_t row, std::size_t r) noexcept {
        SYNC_LOAD(lease);
        SYNC_LOAD(drop);
        const std::uint8_t mark = core::load_acquire(ring_.lease(row, r));
        return mark != kNotKept && (mark == kKeptForGood || !is_gone(r));
    }

    std::uint64_t next_chunk() noexcept {
        return latest_ ? latest_->next(is_gone_to()) : ring_.chunk_at(position_);
    }
    // What the descriptor of the next message says of its lap.
    std::uint64_t next_lap() noexcept {
        return ring_.lap_at(latest_ ? ring_.ticket_of(position_, next_chunk()) : position_);
    }

    bool is_free() noexcept { return latest_ || is_free(ring_.chunk_at(position_)); }
    bool is_free(std::uint64_t chunk) noexcept {
        if (latest_) return latest_->is_unused(chunk, is_gone_to());
        if (core::load_relaxed(ring_.written(chunk)) == 0) return true;
        for (std::size_t r = 0; r < readers_.size(); ++r)
            if (!is_done(chunk, r)) return false;
        return true;
    }

    // Calls visit(position, chunk) for the messages that are in the ring; the oldest first, unless it is one of the latest.
    template <class Visit>
    void for_each_in_ring(Visit&& visit) const {
        if (latest_) return latest_->for_each(visit);
        for (std::uint64_t age = std::min(position_ - first_, ring_.geometry().max_chunks); age > 0; --age)
            visit(position_ - age, ring_.chunk_at(position_ - age));
    }

    std::optional<std::uint64_t> find_unfinished() {
        std::optional<std::uint64_t> found;
        for_each_in_ring([&](std::uint64_t position, std::uint64_t) {
            if (!found && !is_over(position)) found = position;
        });
        return found;
    }

    // False once the reader has taken the message, even if it has not finished with it. Only readers themselves store
    // their position, so it decides nothing but what is waited for.
    bool has_left_to_read(std::uint64_t position, std::size_t r) const noexcept {
        return static_cast<std::int64_t>(core::load_relaxed(participants_.slot(1 + r).position) - position) <= 0;
    }

    // True if a reader has messages left to read.
    bool is_any_unread() noexcept {
        if (latest_ || position_ == first_) return false;
        const std::uint64_t last = position_ - 1;
        for (std::size_t r = 0; r < readers_.size(); ++r)
            if (!is_done(ring_.chunk_at(last), r) && has_left_to_read(last, r)) return true;
        return false;
    }

    // True if every reader has finished with the message at `position`. The flags of its chunk say so until the next
    // message in that chunk is published. Compares ages, so that positions may wrap.
    bool is_over(std::uint64_t position) noexcept {
        const std::uint64_t age = position_ - position;
        if (age == 0) return false;  // it is being written
        if (latest_) return latest_->is_over(position, is_gone_to());
        if (age > ring_.geometry().max_chunks) return true;
        for (std::size_t r = 0; r < readers_.size(); ++r)
            if (!is_done(ring_.chunk_at(position), r)) return false;
        return true;
    }

    // Frees the extents of the messages that everybody has read. Returns whether there were any.
    bool reclaim() {
        return extents_.reclaim(
            segment_->file(), [this](std::uint64_t position) { return is_over(position); },
            [this](std::uint32_t lease) { return is_kept(lease - 1); });
    }

    bool is_idle() const noexcept { return os::tick_now() - last_spill_ >= kIdle; }

    template <class Ready, class Look>
    core::Outcome wait_for_readers(Ready&& ready, os::Deadline deadline, Look&& look) {
        const core::Waiting waiting(participants_.slot(kSlot));
        const core::WaitResult result = core::wait_until(
            wait_point(), spinner_, deadline, [&] { return is_stopping() || ready(); },
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

    // Waits until this writer can give something back, or others have freed enough, or no reader is left that could
    // free some. If there is enough although it was refused, either somebody had taken it meanwhile or an unknown limit
    // applies: the wait is then at most kAgain.
    template <class Look>
    core::Outcome wait_for_space(std::uint64_t bytes, os::Deadline deadline, Look&& look) {
        const auto is_enough = [&] { return os::free_bytes(segment_->file()) >= bytes; };
        const bool was_enough = is_enough();
        const bool was_any_unread = is_any_unread();
        const auto is_news = [&] {
            return give_back_unused() || (was_any_unread && !is_any_unread()) || (!was_enough && is_enough());
        };
        const os::Deadline soon = was_enough ? std::min(deadline, os::Deadline::after(kAgain)) : deadline;
        const core::Outcome outcome = wait_for_readers(is_news, soon, look);
        lacks_space_ = outcome.status == core::Status::timed_out;
        return outcome.status == core::Status::timed_out && soon < deadline ? core::Outcome{core::Status::ok} : outcome;
    }

    // The bytes of extents and chunks whose lap is not over, although every reader has taken the message.
    std::uint64_t viewed_bytes() {
        std::uint64_t bytes = extents_.awaited_bytes();
        for_each_in_ring([&](std::uint64_t position, std::uint64_t chunk) {
            if (!is_over(position) && !space_.has_everywhere(space_.bytes_of(chunk))) bytes += space_.bytes_of(chunk);
        });
        return bytes;
    }

    // True if readers could free what is missing: those that have messages left to read, or views, which are likely to
    // end if they are all that is missing. What they keep lent is not waited for.
    bool is_worth_waiting(int error, std::uint64_t bytes) {
        if (latest_) return false;  // whose writer never waits
        if ((error != ENOSPC && error != EDQUOT) || bytes > os::total_bytes(segment_->file())) return false;
        if (is_any_unread()) return true;
        const std::uint64_t viewed = viewed_bytes();
        return viewed > 0 && bytes <= os::free_bytes(segment_->file()) + viewed;
    }

    // Reserves space for `bytes` bytes in the next chunk; throws ShmExhausted.
    void reserve_now(std::uint64_t bytes) {
        const std::uint64_t chunk = next_chunk();
        if (space_.has(chunk, bytes)) return;
        space_.ensure(*segment_, chunk, bytes);
        if (!os::is_half_free(segment_->file())) give_back_unused();
    }

    // The same. Returns 0, or how much is missing if readers could free it.
    std::uint64_t reserve(std::uint64_t bytes) {
        for (;;) {
            try {
                reserve_now(bytes);
                return 0;
            } catch (const core::ShmExhausted& exhausted) {
                if (exhausted.error != EFBIG && give_back_unused()) continue;
                if (!is_worth_waiting(exhausted.error, exhausted.need)) throw;
                return exhausted.need;
            }
        }
    }

    core::Taken<Claim> start() {
        if (latest_) return Claim(*this);
        const std::uint64_t chunk = ring_.chunk_at(position_);
        // Relaxed: the flag of every reader that may still read is 1 (or `written`
        // is 0 anyway), which keeps it out until `reset`, a later release store.
        SYNC_STORE(retract);
        core::store_relaxed<std::uint8_t>(ring_.written(chunk), 0);
        return Claim(*this);
    }

    template <class Fill, class Look>
    core::Outcome spill(Claim& claim, std::uint64_t bytes, os::Deadline deadline, Fill&& fill, Look&& look, bool lends) {
        const bool fits = bytes <= ring_.geometry().max_chunk_bytes && !(latest_ && latest_->is_next_kept());
        for (;;) {
            reclaim();
            const int error = write_extent(claim, bytes, fill, lends);
            if (error == 0) return {core::Status::ok};
            if (!core::is_exhaustion(error)) os::throw_errno("cannot write a message to an extent", error);
            if (error != EFBIG && give_back_unused()) continue;
            std::uint64_t need = bytes;
            if (fits) {
                need = reserve(bytes);
                if (need == 0) return {core::Status::ok};
            } else if (!is_worth_waiting(error, bytes)) {
                throw core::ShmExhausted(error, bytes, os::free_bytes(segment_->file()));
            }
            const core::Outcome outcome = wait_for_space(need, deadline, look);
            if (outcome.status != core::Status::ok) return outcome;
        }
    }

    // Returns 0 or an errno; then nothing is taken.
    template <class Fill>
    int write_extent(Claim& claim, std::uint64_t bytes, Fill&& fill, bool lends) {
        const os::FileDescriptor& file = segment_->file();
        // Check before writing: filling up the file system only to fail would hurt everybody else.
        const std::uint64_t free = os::free_bytes(file);
        if (bytes > free && bytes - free > extents_.warm_bytes()) return ENOSPC;
        if (extents_.fits_if_trimmed(bytes)) extents_.trim(file);
        const Extent extent = extents_.take(bytes, position_, lends);
        ExtentWriter writer = pool_.writer(extent, bytes);
        int error = pool_.lengthen_file(extent);
        if (error == 0) error = fill(writer);
        if (error != 0) {
            extents_.cancel(file);
            return error;
        }
        writer.finish();
        if (extents_.is_in_pool(extent)) pool_.keep(extent);
        last_spill_ = os::tick_now();
        // Looked at afterwards, so that of several writers that do this at once none lends too much.
        if (!os::is_half_free(file)) {
            give_back_unused();
            if (!os::is_half_free(file)) extents_.unlend();
        }
        claim.extent_ = extents_.latest();
        return 0;
    }

    void publish(const Claim& claim, ChunkKind kind, std::uint64_t length) noexcept {
        const std::uint64_t chunk = next_chunk();
        ChunkDescriptor& d = ring_.descriptor(chunk);
        d.kind = kind;
        d.lease = claim.extent_.lease;
        d.length = length;
        d.extent_offset = claim.extent_.offset;
        d.extent_bytes = claim.extent_.bytes;
        const os::Nanoseconds tick = os::tick_now();
        const bool is_first = tick != core::load_relaxed(participants_.slot(kSlot).last_progress_ns);
        d.published_ns = is_first ? os::monotonic_now() : 0;
        d.lap = next_lap();
        if (latest_)
            latest_->publish(position_);
        else
            show_to_all(chunk);
        if (claim.extent_.bytes > 0) core::add_single_writer<std::uint64_t>(participants_.slot(kSlot).spills, 1);
        ++position_;
        count(length, tick);
    }
    void wake_readers() noexcept { core::wake_parked(&ring_.waits().published, ring_.parked_readers()); }

    void show_to_all(std::uint64_t chunk) noexcept {
        for (std::uint64_t r = 0; r < ring_.geometry().n_reader; ++r) {
            // Release, not relaxed: a reader that sees its flag at 0 must also see
            // `written` at 0, or it would take the chunk of the lap before for a new one. For who takes the place later, it
            // counts as read.
            SYNC_STORE(reset);
            core::store_release<std::uint8_t>(ring_.consumed_by(chunk, r), is_waited_for(r) ? 0 : 1);
        }
        SYNC_STORE(publish);
        core::store_release<std::uint8_t>(ring_.written(chunk), 1);
    }

    void look_at_readers(os::Nanoseconds now) {
        last_look_ = now;
        if (has_uncounted_) admit();  // also one that was killed before it could tell
        for (std::size_t r = 0; r < readers_.size(); ++r) {
            if (readers_[r] != Reader::expected) continue;
            switch (participants_.presence(1 + r)) {
                case core::Presence::dead: readers_[r] = Reader::dead; break;
                case core::Presence::closed: readers_[r] = Reader::closed; break;
                default: break;
            }
        }
        const std::optional<os::Nanoseconds> since = deserted_since();
        is_deserted_ = since && now - *since >= os::kSecond;
    }

    std::optional<std::size_t> first_dead() const noexcept {
        const auto at = std::find(readers_.begin(), readers_.end(), Reader::dead);
        if (at == readers_.end()) return std::nullopt;
        return 1 + static_cast<std::size_t>(at - readers_.begin());
    }

    void count(std::uint64_t length, os::Nanoseconds tick) noexcept {
        core::ParticipantSlot& own = participants_.slot(kSlot);
        core::store_relaxed(own.position, position_);
        core::store_relaxed(own.last_progress_ns, tick);
        core::add_single_writer(own.bytes, length);
    }

    Pool pool_;
    Extents extents_;
    os::Nanoseconds last_spill_ = 0;
    bool is_deserted_ = false;
    std::uint32_t membership_ = 0;  // when late readers were last looked for
    bool lacks_space_ = false;  // the last call has waited for that in vain
    bool has_uncounted_;
    std::vector<Reader> readers_;
    std::optional<LatestWriter> latest_;  // in a ring of that kind
};

}  // namespace memlane::broadcast
