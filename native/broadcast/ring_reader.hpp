// A reader's end of the ring. One message: begin (see the chunk published) - read - finish.
//
// While messages are available: no system call and no lock; reads two flag bytes, one descriptor line and the last tick;
// writes one flag byte and one line of own counters; one full fence. latest.hpp says what differs there.
#pragma once

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "broadcast/latest.hpp"
#include "broadcast/lease.hpp"
#include "broadcast/ring_end.hpp"
#include "core/participants.hpp"
#include "core/status.hpp"
#include "core/wait.hpp"
#include "core/watcher.hpp"

namespace memlane::broadcast {

class RingReader : public RingEnd, public core::Watched {
public:
    // `opening`: of the place, as the handle has it. `reserved_bytes`: how much of every chunk the creator reserved;
    // 0 if unknown. `first`: position of the ring's first message.
    RingReader(std::shared_ptr<core::Segment> segment, const RingGeometry& geometry, std::size_t reader,
               std::uint32_t opening = 0, std::uint64_t reserved_bytes = 0, std::uint64_t first = 0)
        : RingEnd(std::move(segment), geometry, 1 + reader, reserved_bytes, first), reader_(reader) {
        const core::SlotState before = participants_.state(slot());
        if (before != core::SlotState::absent)
            throw core::RankTaken(before == core::SlotState::released
                                      ? "the place was released by release_reader"
                                      : "the place was already taken by pid " +
                                            std::to_string(participants_.identity(slot()).pid) + ", which has left it");
        if (participants_.openings(slot()) != opening)
            throw core::RankTaken("the place was opened again for another process; the handle that readmit() returned last is needed");
        if (ring_.is_latest()) latest_.emplace(ring_, reader);
        // Late readers cannot know yet; until then they are as far as the writer. A place that was opened again is theirs unless
        // the writer has said from where on it counts.
        const std::uint64_t admitted = core::load_relaxed(own().admitted);
        is_counted_ = !has_late_readers() && (opening == 0 || admitted != 0);
        if (!is_counted_ || admitted != 0) begin_at(is_counted_ ? admitted - 1 : core::load_relaxed(participants_.slot(kWriterSlot).position));
        participants_.join(slot(), os::own_identity());
    }

    struct Location {
        std::shared_ptr<os::Mapping> mapping;
        std::byte* begin;
    };

    // The next message, from begin() until finish() or keep(). If dropped before, the message is still the next one.
    class Sample {
    public:
        Sample(Sample&&) noexcept = default;
        Sample& operator=(Sample&&) noexcept = default;

        std::uint64_t position() const noexcept {
            return end_->latest_ ? end_->ring_.position_of(end_->latest_->ticket()) : end_->position_;
        }
        std::byte* chunk() const noexcept { return end_->ring_.data(end_->chunk()); }

        // A private copy of the descriptor of memlane's writer; nullopt if the chunk was filled by a process that knows
        // only the documented part, or if the descriptor is impossible.
        std::optional<ChunkDescriptor> descriptor() const {
            const Ring& ring = end_->ring_;
            const auto d = core::private_copy(ring.descriptor(end_->chunk()));
            if (d.lap != ring.lap_at(end_->ticket())) return std::nullopt;
            if (d.extent_bytes == 0) return d.length <= ring.geometry().max_chunk_bytes ? std::optional(d) : std::nullopt;
            const os::FileFacts file = os::facts_of(end_->segment_->file());
            const bool lies_in_the_file = d.extent_offset <= file.bytes && d.length <= file.bytes - d.extent_offset;
            // A length beyond the file's space is false; believing it would make the reader allocate memory.
            return lies_in_the_file && d.length <= file.allocated ? std::optional(d) : std::nullopt;
        }

        // Reserves the space of the chunk's first `bytes` bytes: a reader that goes beyond what was written, or
        // believes a wrong length, would touch pages that may have none.
        void ensure(std::uint64_t bytes) const {
            if (end_->space_.has_everywhere(bytes)) return;
            end_->space_.follow(core::load_relaxed(end_->ring_.waits().given_back));
            end_->space_.ensure(*end_->segment_, end_->chunk(), bytes);
        }

        // Makes a private copy of a part of the message that `d` describes; false if that part does not exist.
        bool copy_out(const ChunkDescriptor& d, std::uint64_t offset, std::uint64_t bytes, void* to) const {
            if (offset > d.length || bytes > d.length - offset) return false;
            if (d.extent_bytes > 0) return os::read_at(end_->segment_->file(), to, bytes, d.extent_offset + offset);
            core::copy_privately(to, chunk() + offset, bytes);
            return true;
        }

        // Where the message that `d` describes is mapped, valid while the mapping is kept; nullopt if it is not there.
        // The memory is read-only in this process, because other readers see it, too.
        std::optional<Location> locate(const ChunkDescriptor& d) const { return end_->locate(d); }

        // Keeps the message's extent after the chunk is given back; null
        // if the extent cannot be lent, or this process cannot map it.
        std::unique_ptr<Lease> lease(const ChunkDescriptor& d) const { return end_->lease_of(d); }

        // Gives the chunk back.
        void finish(std::uint64_t length) noexcept {
            RingReader& end = *std::exchange(end_, nullptr);
            const std::uint64_t chunk = end.chunk();
            end.advance(length);
            if (end.latest_)
                end.latest_->finish();
            else if (!end.is_held(chunk))
                end.give_back(chunk);
        }

        // True if keep() can keep what `d` describes.
        bool can_keep(const ChunkDescriptor& d) const noexcept {
            if (!end_->latest_) return true;
            return d.extent_bytes > 0 ? end_->is_leasable(d) : can_keep_chunk();
        }
        // Not if what an earlier decoding has left behind keeps it already.
        bool can_keep_chunk() const noexcept {
            return !end_->latest_ || core::load_relaxed(end_->ring_.kept_by(end_->chunk(), end_->reader_)) == kNotKept;
        }
        // Keeps the message where it is until release_held() is called with the same number, of new_hold(). Without `d`, that is
        // in its chunk.
        void keep(std::uint64_t hold, std::uint64_t length, const ChunkDescriptor* d = nullptr) {
            RingReader& end = *end_;
            if (end.latest_) {
                keep_beside(hold, d);
                return finish(length);
            }
            keep_beside(hold, d);
            end_ = nullptr;
            end.advance(length);
        }
        // The same, but the message is still the next one; of the latest, if no later one comes first.
        void keep_beside(std::uint64_t hold, const ChunkDescriptor* d) {
            RingReader& end = *end_;
            const std::uint64_t chunk = end.chunk();
            if (!end.latest_) return end.hold({hold, position(), chunk, os::monotonic_now(), nullptr, 0});
            const bool is_in_extent = d != nullptr && d->extent_bytes > 0;
            std::uint8_t& mark = is_in_extent ? end.ring_.lease(d->lease - 1, end.reader_) : end.ring_.kept_by(chunk, end.reader_);
            const std::uint64_t bytes = is_in_extent ? d->extent_bytes : end.space_.bytes_of(chunk);
            end.hold({hold, position(), chunk, os::monotonic_now(), &mark, bytes});
            SYNC_STORE(lease);
            core::store_relaxed(mark, kKept);  // `finish`, or the next `take`, makes it visible
            count_leased(end.ring_, end.reader_, bytes);
        }

    private:
        friend class RingReader;
        explicit Sample(RingReader& end) noexcept : end_(&end) {}

        RingReader* end_;
    };

    // Messages that are taken together, not of the latest. None counts as read before finish(); if it is dropped before, the
    // first of them is the next message again.
    class Batch {
    public:
        explicit Batch(RingReader& end) noexcept : end_(end) {}
        Batch(const Batch&) = delete;
        Batch& operator=(const Batch&) = delete;
        ~Batch() { rewind(); }

        // The message behind those that were added, if it is there.
        std::optional<Sample> next() noexcept {
            const bool is_next = end_.ahead_ < end_.ring_.geometry().max_chunks && !end_.is_stopping() && !end_.holds_next() &&
                                 end_.is_published();
            return is_next ? std::optional(Sample(end_)) : std::nullopt;
        }
        void add(Sample& sample, std::uint64_t length) noexcept {
            sample.end_ = nullptr;
            bytes_ += length;
            ++end_.ahead_;
            ++end_.position_;
        }
        std::uint64_t bytes() const noexcept { return bytes_; }

        // Gives their chunks back, and wakes the writer once.
        void finish() noexcept { end_.finish_next(rewind(), std::exchange(bytes_, 0)); }

    private:
        // Returns how many there were.
        std::uint64_t rewind() noexcept {
            end_.position_ -= end_.ahead_;
            return std::exchange(end_.ahead_, 0);
        }

        RingReader& end_;
        std::uint64_t bytes_ = 0;
    };

    // Takes the next chunk if it is published.
    core::Taken<Sample> begin_nowait() {
        if (is_stopping()) return {core::Status::closed};
        if (!is_published()) return {core::Status::would_block};
        return take();
    }

    // The same, but waits for the writer. What it published before it closed or died comes first. Calls `look(reason)`
    // without any lock held. Slices grow up to `longest`, unless a process that knows only the documented part wrote
    // the previous message, or may be the writer, because such a process wakes nobody.
    template <class Look>
    core::Taken<Sample> begin(os::Deadline deadline, Look&& look, os::Nanoseconds longest = core::kSlice) {
        const core::Waiting waiting(own());
        const core::WaitResult result = core::wait_until(
            wait_point(), spinner_, deadline, [&] { return is_ready(); },
            [&](core::LookReason reason) {
                const os::Nanoseconds now = os::monotonic_now();
                if (!deadline.is_poll() || now - last_look_ >= core::kPollInterval) {
                    is_writer_dead_ = is_writer_dead();
                    last_look_ = now;
                }
                return is_writer_dead_ || look(reason);
            },
            [&] { return may_be_silent() ? core::kSlice : longest; });
        if (is_stopping()) return {core::Status::closed};
        // In this order, so that a message published before the close is seen even if both came after the wait.
        const bool writer_closed = has_writer_closed();
        if (is_published()) return take();
        if (writer_closed) return {core::Status::peer_closed, 0};
        if (is_writer_dead_) return {core::Status::peer_died, 0};
        if (result == core::WaitResult::interrupted) return {core::Status::interrupted};
        return {core::Status::timed_out};
    }

    std::uint64_t position() const noexcept { return position_ - ahead_; }
    // The number of messages that it has taken, and of those that it will not get, because later ones came first.
    std::uint64_t messages() const noexcept { return RingEnd::messages() - ahead_ - skipped_; }
    std::uint64_t skipped() const noexcept { return skipped_; }

    // For a thread that watches. A message that cannot be taken because this reader keeps its chunk counts as ready.
    core::WaitPoint wait_point() noexcept final {
        return {&ring_.waits().published, &ring_.parked_readers()[reader_], &alarm_};
    }
    bool is_ready() noexcept final { return is_stopping() || is_published() || has_writer_closed() || is_writer_dead_; }
    bool look() final { return is_writer_dead_ = is_writer_dead(); }
    // True if no process has taken the writer's slot, or its owner did not publish the previous message.
    bool may_be_silent() const noexcept final {
        return core::load_relaxed(participants_.slot(kWriterSlot).position) < position_ ||
               participants_.state(kWriterSlot) == core::SlotState::absent;
    }

    // Call it before the slot is left.
    void own_leases() noexcept { broadcast::own_leases(ring_, reader_); }

    // As RingEnd's, once nothing but arrays and views refers to the mappings.
    void keep_file() noexcept {
        lent_.reset();
        shown_.reset();
        RingEnd::keep_file();
    }

    // A number for what may be kept of the next message; it does nothing if nothing is.
    std::uint64_t new_hold() noexcept { return ++last_hold_; }
    // Gives back what a sample has kept under that number.
    void release_held(std::uint64_t hold) noexcept {
        const auto at = std::find_if(held_.begin(), held_.end(), [&](const Held& held) { return held.number == hold; });
        if (at == held_.end()) return;
        const Held held = *at;
        held_.erase(at);
        count_views();
        if (!latest_) {  // the message may be the next one still, or be kept once more
            const bool is_over = static_cast<std::int64_t>(held.position - position()) < 0;
            if (is_over && !is_held(held.chunk)) give_back(held.chunk);
            return;
        }
        SYNC_STORE(drop);
        core::store_release(*held.mark, kNotKept);
        count_leased(ring_, reader_, -held.bytes);
    }
    // True if this reader keeps the next chunk: its flags look published, but it contains the old message.
    bool holds_next() const noexcept {
        return !latest_ && std::any_of(held_.begin(), held_.end(), [&](const Held& held) {
            return held.position != position_ && held.chunk == ring_.chunk_at(position_);
        });
    }

private:
    // Addresses for a pool of the default size: they cost nothing, but a new mapping would have to be populated anew.
    static constexpr std::uint64_t kLentWindow = std::uint64_t{1} << 30;

    struct Held {
        std::uint64_t number;
        std::uint64_t position;
        std::uint64_t chunk;
        os::Nanoseconds since;
        std::uint8_t* mark;   // of the latest: what keeps it
        std::uint64_t bytes;  // the same: so much
    };

    bool is_held(std::uint64_t chunk) const noexcept {
        return std::any_of(held_.begin(), held_.end(), [&](const Held& held) { return held.chunk == chunk; });
    }
    void hold(const Held& held) {
        held_.push_back(held);
        count_views();
    }

    // The message that is being read: where it is, and of which lap.
    std::uint64_t ticket() const noexcept { return latest_ ? latest_->ticket() : position_; }
    std::uint64_t chunk() const noexcept { return ring_.chunk_at(ticket()); }

    Sample take() noexcept {
        if (latest_) latest_->take();
        return Sample(*this);
    }

    // Touching a hole would allocate a page, or raise SIGBUS. Checked only once per offset, because the check is slow:
    // memlane's writer publishes no extent with holes, and a process that punches them can do so at any moment.
    bool has_its_space(const ChunkDescriptor& d) {
        std::uint64_t& checked = checked_[d.extent_offset];
        if (checked < d.length && !os::has_space(segment_->file(), d.extent_offset, d.length)) return false;
        checked = std::max(checked, d.length);
        return true;
    }

    std::optional<Location> locate(const ChunkDescriptor& d) {
        const RingGeometry& g = ring_.geometry();
        std::uint64_t begin = chunk() * g.max_chunk_bytes;
        if (d.extent_bytes > 0) {
            begin = d.extent_offset;
            // Not taken from the header: a peer may have changed it.
            if (begin < segment_->bytes() || !has_its_space(d)) return std::nullopt;
        }
        const std::uint64_t end = begin + d.length;
        // Kept for the next message, and doubled when it is too short: addresses cost nothing.
        if (!shown_ || shown_->bytes() < end) {
            const std::uint64_t bytes = std::max(end, shown_ ? 2 * shown_->bytes() : g.metadata_offset());
            shown_ = segment_->with_memory(
                bytes, [&] { return std::make_shared<os::Mapping>(segment_->file(), bytes, 0, os::Mapping::Access::read); });
            shown_->keep(left_);
        }
        return Location{shown_, shown_->base() + begin};
    }

    // Not if this reader keeps it already, for what an earlier decoding has left behind: the first to end would end both.
    bool is_leasable(const ChunkDescriptor& d) const noexcept {
        return d.lease != 0 && d.lease <= ring_.geometry().leases() &&
               core::load_relaxed(ring_.lease(d.lease - 1, reader_)) == kNotKept;
    }

    std::unique_ptr<Lease> lease_of(const ChunkDescriptor& d) {
        const std::uint64_t begin = segment_->bytes();
        if (os::Mapping::page_bytes() != core::kPage) return nullptr;  // extents consist of pages of that size
        if (!is_leasable(d) || d.extent_offset < begin || d.extent_offset % core::kPage != 0)
            return nullptr;
        const std::uint64_t at = d.extent_offset - begin;
        const std::uint64_t bytes = core::align_up(d.length, core::kPage);
        try {
            if (!has_its_space(d)) return nullptr;
            if (!lent_ || lent_->bytes() < at + bytes) {
                const std::uint64_t window = std::max(at + bytes, lent_ ? 2 * lent_->bytes() : kLentWindow);
                lent_ = std::make_shared<os::PrivateMapping>(segment_->file(), window, begin);
                lent_->keep(left_);
            }
            return std::make_unique<Lease>(ring_, d.lease - 1, reader_, lent_, at, bytes);
        } catch (const std::system_error&) {
            return nullptr;
        }
    }

    core::ParticipantSlot& own() const noexcept { return participants_.slot(slot()); }

    // `held_` is in order of positions, so the first is the oldest.
    void count_views() noexcept {
        core::store_relaxed<std::int64_t>(own().views_since_ns, held_.empty() ? 0 : held_.front().since);
        core::store_relaxed(own().views, static_cast<std::uint32_t>(held_.size()));
    }

    void advance(std::uint64_t length) noexcept {
        const ChunkDescriptor& d = ring_.descriptor(chunk());
        const os::Nanoseconds published = core::private_copy(d.published_ns);
        if (published != 0 && core::private_copy(d.lap) == ring_.lap_at(ticket()))
            ring_.deliveries(reader_).add(published, os::monotonic_now());
        if (latest_) {
            const std::uint64_t taken = ring_.position_of(ticket());
            skipped_ += taken - position_;
            core::store_relaxed(own().skipped, skipped_);
            position_ = taken;
        }
        ++position_;
        core::store_relaxed(own().position, position_);
        core::store_relaxed(own().last_progress_ns, os::tick_now());
        core::add_single_writer(own().bytes, length);
    }

    // Lets the writer reuse the chunk. Only the last reader wakes it: each stores its own flag, then (full fence) loads
    // the others', so if two are the last at once, at least one sees both. If the writer has reused the chunk
    // meanwhile, this reader's flag is 0 again, and a later reader will be the last.
    void give_back(std::uint64_t chunk) noexcept {
        SYNC_STORE(consume);
        core::store_release<std::uint8_t>(ring_.consumed_by(chunk, reader_), 1);
        core::wake_parked(&ring_.waits().consumed, {&ring_.waits().writer_parked, 1}, [&] { return is_read_by_all(chunk); });
    }

    // The same for the next `count` messages, of so many bytes.
    void finish_next(std::uint64_t count, std::uint64_t bytes) noexcept {
        const std::uint64_t first = position_;
        for (std::uint64_t i = 0; i < count; ++i) {
            const std::uint64_t at = chunk();
            advance(i == 0 ? bytes : 0);
            if (is_held(at)) continue;
            SYNC_STORE(consume);
            core::store_release<std::uint8_t>(ring_.consumed_by(at, reader_), 1);
        }
        core::wake_parked(&ring_.waits().consumed, {&ring_.waits().writer_parked, 1}, [&] {
            for (std::uint64_t i = 0; i < count; ++i)
                if (is_read_by_all(ring_.chunk_at(first + i))) return true;
            return false;
        });
    }

    // Readers that have left are not waited for. The writer must detect a dead reader itself.
    bool is_read_by_all(std::uint64_t chunk) const noexcept {
        for (std::uint64_t r = 0; r < ring_.geometry().n_reader; ++r) {
            if (core::load_relaxed(ring_.consumed_by(chunk, r)) != 0) continue;
            const core::SlotState state = participants_.state(1 + r);
            if (state != core::SlotState::closed && state != core::SlotState::released) return false;
        }
        return true;
    }

    void begin_at(std::uint64_t position) noexcept {
        first_ = position_ = position;
        core::store_relaxed(own().position, position);
    }

    // False until the writer counts this reader, if it is late.
    bool is_counted() noexcept {
        if (is_counted_) return true;
        SYNC_LOAD(admit);
        const std::uint64_t admitted = core::load_acquire(own().admitted);
        if (admitted == 0) return false;
        begin_at(admitted - 1);
        return is_counted_ = true;
    }

    // Loads its own flag first: once that is 0 the writer has passed `reset`, so `written`, loaded next, is of this
    // lap. The other order could pair the old `written` = 1 with the new flag.
    bool is_published() noexcept {
        if (!is_counted()) return false;
        if (latest_) return latest_->has(position_);
        const std::uint64_t chunk = ring_.chunk_at(position_);
        SYNC_LOAD(reset);
        if (core::load_acquire(ring_.consumed_by(chunk, reader_)) != 0) return false;
        SYNC_LOAD(retract);
        SYNC_LOAD(publish);
        return core::load_acquire(ring_.written(chunk)) != 0;
    }

    bool is_writer_dead() const { return participants_.presence(0) == core::Presence::dead; }

    std::size_t reader_;
    std::optional<LatestReader> latest_;  // in a ring of that kind
    std::uint64_t skipped_ = 0;           // messages of such a ring
    std::uint64_t ahead_ = 0;             // messages of a batch: `position_` is behind them
    bool is_counted_;
    bool is_writer_dead_ = false;  // at the last check, and for good
    std::uint64_t last_hold_ = 0;
    std::vector<Held> held_;                // chunks that this reader keeps because something still refers to them
    std::shared_ptr<os::Mapping> shown_;        // of chunks and extents, read-only, once a view was asked for
    std::shared_ptr<os::PrivateMapping> lent_;  // of extents, private, once a message was lent
    std::map<std::uint64_t, std::uint64_t> checked_;  // by offset, how many bytes are known to have space
};

}  // namespace memlane::broadcast
