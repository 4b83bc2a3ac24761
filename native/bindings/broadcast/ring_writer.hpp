// The writer of a ring for Python. A message that fits its chunk and finds it free: one native call, one copy;
// the GIL is kept for messages below 64 KiB.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/broadcast/burst.hpp"
#include "bindings/broadcast/chunk_block.hpp"
#include "bindings/broadcast/leaving.hpp"
#include "bindings/broadcast/ring_segment.hpp"
#include "bindings/ends/end.hpp"
#include "bindings/messages/encoder.hpp"
#include "broadcast/ring_writer.hpp"
#include "core/sync.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using namespace nb::literals;
using Claim = broadcast::RingWriter::Claim;

class RingWriter : public End<RingWriter, broadcast::RingWriter> {
public:
    // `has_others`: the queue has readers that are not of this ring, so it does not warn when all of its own have left.
    RingWriter(const RingSegment& ring, std::vector<std::int64_t> ranks, const nb::object& codec, std::uint64_t pool_bytes,
           bool has_others)
        : End(ring.segment(), std::move(ranks), ring.geometry(), ring.reserved(), pool_bytes),
          encoder_(codec),
          has_told_(has_others) {}

    static void settle_leases(broadcast::RingWriter&) noexcept {}  // a writer lends, and borrows nothing
    static void leave(std::shared_ptr<broadcast::RingWriter> core, core::Segment& segment) {
        leave_ring(std::move(core), segment);
    }

    std::size_t slot() const noexcept { return broadcast::RingWriter::kSlot; }
    bool has_open_block() const noexcept { return open_.has_value(); }
    bool is_ready_anyway() const noexcept { return false; }
    // After close(), the last position: it settles what was sent to other hosts as well.
    std::uint64_t position() { return is_closed() ? last_position() : core().position(); }

    nb::object send(nb::handle object, nb::handle timeout) {
        has_sent_ = false;
        const Call call(*this);
        const Cleared cleared{encoder_};
        const os::Deadline deadline = deadline_of(timeout);
        const Doing doing(*this, core::SlotActivity::copying);
        encoder_.encode(object);
        check_own();
        return explained([&] { return put(encoder_, deadline, timeout); });
    }

    // Sends the objects one after the other. Readers that sleep are woken once, at the end, unless it takes long.
    nb::object send_many(const nb::tuple& objects, nb::handle timeout, Burst& count) {
        const Call call(*this);
        const Cleared cleared{encoder_};
        const os::Deadline deadline = deadline_of(timeout);
        const Doing doing(*this, core::SlotActivity::copying);
        broadcast::RingWriter::Burst burst(core());
        os::Nanoseconds tick = os::tick_now();
        for (const nb::handle object : objects) {
            if (const os::Nanoseconds now = os::tick_now(); now != std::exchange(tick, now)) {
                const WithoutGil no_gil;  // other threads have their turn
                burst.wake();
            }
            encoder_.encode(object, [&] { burst.wake(); });
            check_own();
            const auto publish = [&](Claim& claim, ChunkKind kind, std::uint64_t bytes) {
                burst.publish(claim, kind, bytes);
                ++count.sent;
            };
            const nb::object done = explained(
                [&] { return put(encoder_, deadline, timeout, nb::none(), publish, [&] { burst.wake(); }); });
            if (!done.is_valid()) return done;
        }
        return nb::none();
    }

    // Sends a message that is encoded already, because it goes elsewhere, too. While the call is blocked,
    // `watch` is checked like a `cancel`, so that it can raise what happened there.
    nb::object send_encoded(const Encoder& encoder, nb::handle timeout, nb::handle watch) {
        has_sent_ = false;
        const Call call(*this);
        const Doing doing(*this, core::SlotActivity::copying);
        return explained([&] { return put(encoder, deadline_of(timeout), timeout, watch); });
    }

    // True if the last call of `send` or `send_encoded` has published its message. What is raised after that, by a signal
    // handler that runs once it has returned, is not an error of that call.
    bool has_sent() const noexcept { return has_sent_; }

    // False on timeout.
    bool wait_until_read(std::uint64_t position, nb::handle timeout) {
        const Call call(*this);
        if (position >= core().position()) raise_error(Error::InvalidArgument, "that message has not been sent yet");
        const os::Deadline deadline = deadline_of(timeout);
        Interruption look(self(), core().segment(), "chunk");
        const core::Outcome outcome = without_gil([&] { return core().wait_until_read(position, deadline, look); });
        if (outcome.status == core::Status::timed_out) return false;
        if (outcome.status != core::Status::ok) raise_outcome(outcome);
        return true;
    }

    // Publishes the chunk, unless the block raises, or leaves a reference that could change it.
    ChunkBlock write_block(nb::object owner, nb::object timeout) {
        return {nb::make_tuple(owner, self()), [this, timeout] { return begin_write(timeout); },
                [this](bool is_whole) { end_write(is_whole); }};
    }

    void wait_until_ready(nb::handle timeout, nb::handle watch) {
        const Call call(*this);
        core().look_at_next_begin();
        wait_for_everybody(timeout, watch);
        core().segment().remove_name();
    }

    Sightings awaited() {
        const Unwatched unwatched(*this);
        std::vector<std::size_t> slots = readable().blocking_slots();
        slots.push_back(broadcast::RingWriter::kSlot);
        return {core().participants(), slots};
    }

    // Slot, lent messages, their bytes, viewed messages and their bytes of every reader that keeps any.
    nb::list kept() {
        const Unwatched unwatched(*this);
        nb::list all;
        for (const broadcast::RingWriter::Kept& one : core().kept())
            all.append(nb::make_tuple(one.slot, one.lent_messages, one.lent_bytes, one.viewed_messages, one.viewed_bytes));
        return all;
    }

    // Bytes that other files of the file system use; none if it has no size.
    std::uint64_t used_by_others() {
        const os::FileDescriptor& file = core().segment().file();
        const std::uint64_t used = os::total_bytes(file) - os::free_bytes(file);
        return used - std::min(used, os::facts_of(file).allocated);
    }

    bool release_reader(std::size_t reader) {
        const Call call(*this);
        return core().release_reader(reader);
    }

    bool readmit(std::size_t reader) {
        const Call call(*this);
        Interruption look(self(), core().segment(), "ready");
        const core::Outcome outcome = without_gil([&] { return core().readmit(reader, look); });
        if (outcome.status == core::Status::interrupted || outcome.status == core::Status::closed) raise_outcome(outcome);
        return outcome.status == core::Status::ok;
    }

    // For a thread that makes no calls of this end: runs at once, with the GIL held, or as the call under way ends. False if the
    // place is not open yet; ask again later.
    bool readmit_late(std::size_t reader) {
        readable();
        if (is_called() || has_open_block()) {
            if (std::find(asked_.begin(), asked_.end(), reader) == asked_.end()) asked_.push_back(reader);
            return false;
        }
        const Call call(*this);
        return core().readmit_late(reader);
    }
    void after_call() noexcept {
        if (!asked_.empty()) readmit_asked();
    }

    // In nanoseconds of the monotonic clock; None if a reader may still read.
    nb::object deserted_since() {
        const Unwatched unwatched(*this);
        const auto since = readable().deserted_since();
        return since ? nb::object(nb::int_(*since)) : nb::none();
    }

private:
    void readmit_asked() noexcept {
        if (is_closed() || !core().segment().is_own() || has_open_block()) return;
        for (const std::size_t reader : std::exchange(asked_, {})) {
            try {
                core().readmit_late(reader);
            } catch (const std::system_error&) {  // the kernel refuses a lock: whoever asks again gets the error
            }
        }
    }

    nb::object begin_write(nb::handle timeout) {
        const Call call(*this);
        const RingGeometry& g = core().ring().geometry();
        tend(false);
        if (core().is_next_kept()) {  // by a dead reader, perhaps: nothing is reserved to find that out
            if (!explained([&] { return begin(0, deadline_of(timeout), timeout); })) throw nb::python_error();
            raise_failure(self(), "chunks_kept");
        }
        std::optional<Claim> claim = explained([&] { return begin(g.max_chunk_bytes, deadline_of(timeout), timeout); });
        if (!claim) throw nb::python_error();
        const auto lease = std::make_shared<std::shared_ptr<os::Mapping>>(core().segment().mapping());
        nb::object view = view_of(nb::cast(Buffer(lease, claim->chunk(), g.max_chunk_bytes, false)));
        open_.emplace(std::move(*claim), lease);  // last: a failure before this leaves no block to be ended
        core().show(core::SlotActivity::in_block);
        return view;
    }

    // Nothing is published while something still refers to the chunk, because it could change the message later.
    void end_write(bool publish) {
        auto block = *std::exchange(open_, std::nullopt);
        if (is_closed() && !publish) return;  // closed inside the block, which then failed: nothing to take back
        const Call call(*this);
        core().show(core::SlotActivity::elsewhere);
        refused_ = block.second;
        if (!publish) return;
        if (!refused_.expired()) raise_failure(self(), "write_view_in_use");
        look_for_signals();
        block.first.publish(ChunkKind::raw, core().ring().geometry().max_chunk_bytes);
    }

    // Returns None, or a null object with the Python error set (see is_ok).
    nb::object put(const Encoder& encoder, os::Deadline deadline, nb::handle timeout, nb::handle watch = nb::none()) {
        const auto publish = [&](Claim& claim, ChunkKind kind, std::uint64_t bytes) {
            claim.publish(kind, bytes);
            has_sent_ = true;
        };
        return put(encoder, deadline, timeout, watch, publish, [] {});
    }
    // Calls `before_long` before what may take long.
    template <class Publish, class BeforeLong>
    nb::object put(const Encoder& encoder, os::Deadline deadline, nb::handle timeout, nb::handle watch, Publish&& publish,
                   BeforeLong&& before_long) {
        const Outgoing& message = encoder.message();
        const broadcast::FrameTable table = message.table();
        const std::uint64_t bytes = encoder.kind() == ChunkKind::frames ? table.total() : message.stream_bytes();
        const bool fits = bytes <= core().ring().geometry().max_chunk_bytes && !core().is_next_kept();
        const bool lends = table.has_lent();
        if (lends || !fits || bytes >= kCopyWithoutGil) before_long();
        tend(lends || !fits);
        bool spills = !fits || (lends && core().prefers_extent(bytes));
        if (spills && core().takes_memory(bytes) && !find_memory(bytes, fits, deadline, timeout, watch)) {
            if (!fits) return {};
            spills = false;
        }
        std::optional<Claim> claim = begin(spills ? 0 : bytes, deadline, timeout, watch, before_long);
        if (!claim) return {};
        if (spills && !spill(*claim, message, table, bytes, deadline, timeout, watch)) return {};
        if (!claim->is_spilled()) {
            std::byte* const chunk = claim->chunk();
            copying(bytes, [&] {
                return message.for_each_part(table, [&](std::uint64_t at, std::uint64_t size, const void* from) {
                    SYNC_STEP(fill);
                    std::memcpy(chunk + at, from, size);
                    return 0;
                });
            });
        }
        look_for_signals();
        publish(*claim, encoder.kind(), bytes);
        return nb::none();
    }

    // A lack of space becomes an error that says who keeps it.
    template <class Work>
    std::invoke_result_t<Work> explained(Work&& work) {
        try {
            return work();
        } catch (const core::ShmExhausted& e) {
            set_raised(installed(Function::exhausted)(self(), e.need, e.free, e.error));
        }
        throw nb::python_error();
    }

    // Looks for memory for an extent, as for a ring: the kernel kills a process that takes too much. Gives back what is
    // warm, and waits for older laps. False with the Python error set, or if the message `fits` its chunk. Looking takes
    // about 0.1 ms, as long as writing a quarter of a megabyte, so small extents are counted until they are worth it.
    bool find_memory(std::uint64_t bytes, bool fits, os::Deadline deadline, nb::handle timeout, nb::handle watch) {
        constexpr std::uint64_t kUnchecked = 4u << 20;
        unchecked_ += bytes;
        if (unchecked_ <= kUnchecked) return true;
        const nb::handle ask = installed(Function::memory_refusal);
        Interruption look(self(), core().segment(), "chunk", watch);
        for (;;) {
            const nb::object refusal = ask(bytes, "spare"_a = kUnchecked);
            check_own();
            if (refusal.is_none()) break;
            if (without_gil([&] { return core().give_back_unused(); })) continue;
            if (fits) return false;
            if (!core().has_awaited()) {
                set_raised(refusal);
                throw nb::python_error();
            }
            const core::Outcome outcome = without_gil([&] { return core().wait_for_extent(deadline, look); });
            if (!is_ok(outcome, timeout)) return false;
        }
        unchecked_ = 0;
        return true;
    }

    void tend(bool is_large) {
        if (!core().has_extents()) return;
        const WithoutGil no_gil;
        core().tend(is_large);
    }

    std::optional<Claim> begin(std::uint64_t bytes, os::Deadline deadline, nb::handle timeout) {
        return begin(bytes, deadline, timeout, nb::none(), [] {});
    }
    template <class BeforeLong>
    std::optional<Claim> begin(std::uint64_t bytes, os::Deadline deadline, nb::handle timeout, nb::handle watch,
                               BeforeLong&& before_long) {
        if (!refused_.expired()) raise_failure(self(), "refused_chunk_in_use");
        const auto begin_nowait = [&] { return core().begin_nowait(bytes); };
        core::Taken<Claim> taken = core().has_space(bytes) ? begin_nowait() : without_gil(begin_nowait);
        if (taken.status == core::Status::would_block) {
            before_long();
            Interruption look(self(), core().segment(), "chunk", watch);
            const WithoutGil no_gil;
            taken = core().begin(bytes, deadline, look);
        }
        if (!is_ok(taken, timeout)) return std::nullopt;
        if (core().is_deserted() && !std::exchange(has_told_, true)) {
            installed(Function::report_deserted)(self(), *core().deserted_since());
            check_own();
        }
        return std::move(taken.loan);
    }

    bool spill(Claim& claim, const Outgoing& message, const broadcast::FrameTable& table, std::uint64_t bytes,
               os::Deadline deadline, nb::handle timeout, nb::handle watch) {
        // In a ring of the latest message, views keep extents like lent arrays.
        const bool lends = table.has_lent() || core().ring().is_latest();
        const auto fill = [&](broadcast::ExtentWriter& writer) {
            return message.for_each_part(table, [&](std::uint64_t at, std::uint64_t size, const void* from) {
                SYNC_STEP(spill);
                return writer.put(at, size, from);
            });
        };
        Interruption look(self(), core().segment(), "chunk", watch);
        const core::Outcome outcome = without_gil([&] { return claim.spill(bytes, deadline, fill, look, lends); });
        return is_ok(outcome, timeout);
    }

    Encoder encoder_;
    bool has_sent_ = false;
    std::vector<std::size_t> asked_;  // places that another thread has asked to open during a call
    bool has_told_;  // that nobody reads any more
    std::uint64_t unchecked_ = 0;  // bytes of extents since the last look at the machine's memory
    std::optional<std::pair<Claim, std::weak_ptr<void>>> open_;  // the chunk whose block is open, and its memory
    std::weak_ptr<void> refused_;              // that of the last block, while something still refers to it
};

}  // namespace memlane::bindings
