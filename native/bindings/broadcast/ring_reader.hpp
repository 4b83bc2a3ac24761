// A reader of a ring for Python. A small message: one native call, one copy into a bytes object, which is then decoded.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "bindings/broadcast/chunk_block.hpp"
#include "bindings/broadcast/leaving.hpp"
#include "bindings/broadcast/ring_segment.hpp"
#include "bindings/ends/end.hpp"
#include "bindings/messages/incoming.hpp"
#include "bindings/python/buffer_pool.hpp"
#include "broadcast/frames.hpp"
#include "broadcast/lease.hpp"
#include "broadcast/ring_reader.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using broadcast::ChunkKind;
using Sample = broadcast::RingReader::Sample;
using Batch = broadcast::RingReader::Batch;

// Bytes after which a batch takes no more: decoding them keeps the GIL, and the writer's space.
inline constexpr std::uint64_t kMostAhead = 1u << 20;

// For one object, which is made last: what has been received must not be lost.
template <class Make>
nb::object list_of(Make&& make) {
    nb::list one = nb::steal<nb::list>(PyList_New(1));
    if (!one.is_valid()) throw nb::python_error();
    PyList_SET_ITEM(one.ptr(), 0, nb::none().release().ptr());  // the collector shows the list to others
    nb::object object = make();
    if (!object.is_valid()) return object;
    if (PyList_SetItem(one.ptr(), 0, object.release().ptr()) != 0) throw nb::python_error();
    return one;
}

// A fork cannot log: this is called after it, and at the end of a reader.
inline void log_uncopied_leases() noexcept {
    if (!broadcast::Leases::all().is_any_uncopied.load(std::memory_order_relaxed)) return;
    static bool is_logged = false;  // protected by the GIL
    if (std::exchange(is_logged, true)) return;
    try {
        installed(Function::warn)(
            "pages of a lent array could not be copied for a fork or the end of its reader (are they sealed, or is /proc "
            "missing?): their space in /dev/shm stays in use as long as the queue");
    } catch (nb::python_error& error) {
        error.discard_as_unraisable("logging leases that could not be copied");
    }
}

class RingReader : public End<RingReader, broadcast::RingReader> {
public:
    RingReader(const RingSegment& ring, std::vector<std::int64_t> ranks, const nb::object& codec, std::size_t reader,
               std::uint32_t opening, nb::object origin)
        : End(ring.segment(), std::move(ranks), ring.geometry(), reader, opening, ring.reserved()),
          decode_(codec.attr("decode")),
          decode_parts_(codec.attr("decode_parts")),
          decode_plain_(codec.attr("decode_plain")),
          origin_(std::move(origin)),
          place_(reader) {}

    static void settle_leases(broadcast::RingReader& reader) noexcept {
        reader.own_leases();
        log_uncopied_leases();
    }
    static void leave(std::shared_ptr<broadcast::RingReader> core, core::Segment& segment) {
        leave_ring(std::move(core), segment);
    }

    std::size_t place() const noexcept { return place_; }
    std::size_t slot() const noexcept { return 1 + place_; }
    bool has_open_block() const noexcept { return open_.has_value(); }
    bool is_ready_anyway() const noexcept { return undecoded_.has_value(); }
    // The position of the message whose block is open, or of the next one.
    std::uint64_t position() { return is_closed() ? last_position() : core().position() - (has_open_block() ? 1 : 0); }

    nb::object origin() const { return origin_; }
    std::uint64_t skipped() {
        const Unwatched unwatched(*this);
        return readable().skipped();
    }

    // If `lend` is true, large arrays stay in their extent, mapped privately for this reader.
    nb::object receive(nb::handle timeout, nb::handle cancel, nb::handle lend) {
        const int lends = PyObject_IsTrue(lend.ptr());
        if (lends < 0) throw nb::python_error();
        const Call call(*this);
        if (undecoded_) return decode_again();
        std::optional<Sample> sample = try_begin(timeout, cancel);
        if (!sample) return {};
        const Doing doing(*this, core::SlotActivity::decoding);
        Message message = described(std::move(*sample));
        nb::object object = explained([&] { return receive_object(message, lends != 0); });
        check_own();
        return object;
    }

    // At least one object, and `most` at most: the small ones that are there, or one that is not small.
    nb::object receive_many(nb::handle timeout, nb::handle cancel, nb::handle lend, std::size_t most) {
        const int lends = PyObject_IsTrue(lend.ptr());
        if (lends < 0) throw nb::python_error();
        const Call call(*this);
        if (undecoded_) return list_of([this] { return decode_again(); });
        std::optional<Sample> sample = try_begin(timeout, cancel);
        if (!sample) return {};
        const Doing doing(*this, core::SlotActivity::decoding);
        if (!core().ring().is_latest()) {
            nb::list objects;
            Batch batch(core());
            take_small(batch, objects, most);
            if (objects.size() > 0) {
                batch.finish();
                return objects;
            }
        }
        Message message = described(std::move(*sample));
        nb::object object = list_of([&] { return explained([&] { return receive_object(message, lends != 0); }); });
        check_own();
        return object;
    }

    // Appends the small messages that are there until there are `most` objects. Within a `Call`. If it raises, none of the batch
    // counts as read, but the first, if it cannot be decoded; another that cannot be decoded ends the batch, and is the next.
    void take_small(Batch& batch, nb::list& objects, std::size_t most) {
        while (objects.size() < most && batch.bytes() < kMostAhead) {
            std::optional<Sample> sample = batch.next();
            const auto descriptor = sample ? sample->descriptor() : std::nullopt;
            if (!descriptor || !is_small(*descriptor)) return;
            sample->ensure(descriptor->length);
            Message message{*descriptor, std::move(*sample)};
            const bool is_first = objects.size() == 0;
            nb::object object;
            try {
                object = explained([&] { return decode_small(message); });
            } catch (const nb::python_error& error) {
                const bool keeps = keeps_message(error);
                check_own();
                if (!is_first && (!keeps || error.matches(PyExc_MemoryError))) return;
                if (!keeps) {
                    batch.add(message.sample, message.length);
                    batch.finish();
                }
                throw;
            }
            check_own();
            objects.append(object);
            batch.add(message.sample, message.length);
        }
    }

    // The next object, with its arrays left in place, and the lease that they keep; None if there is no such array.
    nb::tuple receive_view(nb::handle timeout, nb::handle cancel) {
        const Call call(*this);
        if (undecoded_) return nb::make_tuple(decode_again(), nb::none());
        Sample sample = begin(timeout, cancel);
        const Doing doing(*this, core::SlotActivity::decoding);
        Message message = described(std::move(sample));
        nb::object lease = nb::none();
        nb::object object = explained([&] {
            const bool stays = message.kind == ChunkKind::frames && message.sample.can_keep(message);
            return stays ? receive_in_place(message, lease) : receive_object(message, false);
        });
        check_own();
        return nb::make_tuple(object, lease);
    }

    // Gives the chunk back, however the block ends, or later if something still refers to it.
    ChunkBlock read_block(nb::object owner, nb::object timeout, nb::object cancel) {
        return {nb::make_tuple(owner, self()), [this, timeout, cancel] { return begin_read(timeout, cancel); },
                [this](bool is_whole) {
                    try {
                        end_read();
                    } catch (const nb::python_error& error) {
                        // The block's own error says more, and its traceback refers to what the block made.
                        if (is_whole || !is_a(error, Error::ViewInUse)) throw;
                    }
                }};
    }

    Sightings awaited() { return {readable().participants(), std::vector<std::size_t>{0}}; }

    void wait_until_ready(nb::handle timeout, nb::handle watch) {
        const Call call(*this);
        wait_for_everybody(timeout, watch);
        core().segment().remove_name();  // if this end has created it
    }

private:
    nb::object begin_read(nb::handle timeout, nb::handle cancel) {
        const Call call(*this);
        if (undecoded_) raise_failure(self(), "undecoded");
        Sample sample = begin(timeout, cancel);
        const std::uint64_t bytes = core().ring().geometry().max_chunk_bytes;
        if (core().ring().is_latest())  // where the chunk has what was kept
            if (const auto descriptor = sample.descriptor(); descriptor && descriptor->extent_bytes > 0) {
                sample.finish(0);
                raise_failure(self(), "not_in_chunk");
            }
        if (!sample.can_keep_chunk()) raise_failure(self(), "next_chunk_held");
        sample.ensure(bytes);
        const std::uint64_t hold = core().new_hold();
        const std::shared_ptr<void> lease = lease_of_chunk(hold, core().segment().mapping());
        nb::object view = view_of(nb::cast(Buffer(lease, sample.chunk(), bytes, false)));
        sample.keep(hold, bytes);  // last: a failure before this has taken nothing
        open_ = lease;
        core().show(core::SlotActivity::in_block);
        return view;
    }

    // The chunk has been given back, or will be with the last reference to it: nobody ever sees it change.
    void end_read() {
        const auto lease = std::exchange(open_, std::nullopt);
        if (is_closed()) return;  // closed inside the block: given back with everything else
        const Call call(*this);
        core().show(core::SlotActivity::elsewhere);
        if (!lease->expired()) raise_failure(self(), "read_view_in_use");
    }

    // A lease that gives back what was kept under that number, if anything was, with its last buffer, and keeps `memory`
    // mapped until then.
    std::shared_ptr<void> lease_of_chunk(std::uint64_t hold, std::shared_ptr<os::Mapping> memory) {
        return {nullptr, [memory = std::move(memory), end = std::weak_ptr(shared_core()), hold](void*) {
                    if (const auto reader = end.lock(); reader && reader->segment().is_own()) reader->release_held(hold);
                }};
    }

    Message described(Sample sample) {
        const auto descriptor = sample.descriptor();
        if (!descriptor) raise_corrupt(sample);
        if (descriptor->extent_bytes == 0) sample.ensure(descriptor->length);
        return {*descriptor, std::move(sample)};
    }

    static bool is_small(const broadcast::ChunkDescriptor& d) noexcept {
        const bool has_one_stream = d.kind == ChunkKind::bytes || d.kind == ChunkKind::plain || d.kind == ChunkKind::object;
        return has_one_stream && d.extent_bytes == 0 && d.length <= kCopyWithoutGil;
    }
    nb::object decode_small(Message& message) {
        const nb::bytes stream = copy_stream(message, {0, message.length});
        if (message.kind == ChunkKind::bytes) return stream;
        return message.kind == ChunkKind::plain ? decode_plain(stream) : nb::object(decode_(stream));
    }

    nb::object receive_object(Message& message, bool lends) {
        if (message.kind == ChunkKind::bytes) return receive_bytes(message);
        const bool is_small = message.kind == ChunkKind::object && message.length <= kCopyWithoutGil;
        if (message.kind != ChunkKind::plain && !is_small) return receive_parts(message, lends);
        Undecoded copy{message.kind, copy_stream(message, {0, message.length}), {}};
        message.finish();
        return decode(std::move(copy));
    }

    // A private copy of a message whose chunk was given back: whatever decoding does, the writer does not wait for it.
    // `buffers` is null if all of it is one stream.
    struct Undecoded {
        ChunkKind kind;
        nb::bytes stream;
        nb::object buffers;
    };

    nb::object decode(Undecoded copy) {
        try {
            if (copy.kind == ChunkKind::plain) return decode_plain(copy.stream);
            return copy.buffers.is_valid() ? decode_parts_(copy.stream, copy.buffers) : decode_(copy.stream);
        } catch (const nb::python_error& error) {
            undecoded_ = std::move(copy);  // also if a handler raises in the next line
            if (!keeps_message(error)) undecoded_.reset();
            throw;
        }
    }

    nb::object decode_again() {
        nb::object object = explained([&] { return decode(*std::exchange(undecoded_, std::nullopt)); });
        check_own();
        return object;
    }

    // True if the message is not to blame: the next call decodes it again.
    static bool keeps_message(const nb::python_error& error) {
        if (error.matches(PyExc_MemoryError) || !error.matches(PyExc_Exception)) return true;
        const nb::object trace = error.traceback();  // none if no Python code raised it
        return trace.is_valid() && nb::cast<bool>(installed(Function::raised_by_handler)(trace));
    }

    // A lack of memory becomes an error that says that nothing is lost.
    template <class Receive>
    nb::object explained(Receive&& receive) {
        try {
            return receive();
        } catch (const std::bad_alloc&) {
        } catch (const nb::python_error& error) {
            if (!error.matches(PyExc_MemoryError)) throw;
            if (is_a(error, Error::MemlaneError)) throw;
        }
        raise_failure(self(), "no_memory");
    }

    // No object is encoded to bytes that do not decode, so the chunk is corrupt: not MessagePack, nested too
    // deeply, or a map with a key that no dict can have.
    nb::object decode_plain(const nb::bytes& stream) {
        try {
            return decode_plain_(stream);
        } catch (const nb::python_error& error) {
            const bool is_corrupt = error.matches(PyExc_ValueError) || error.matches(PyExc_RecursionError) ||
                                    error.matches(PyExc_TypeError);
            if (!is_corrupt) throw;
        }
        raise_failure(self(), "corrupt");
    }

    nb::object receive_bytes(Message& message) {
        nb::bytes text = copy_stream(message, {0, message.length});
        message.finish();
        return text;
    }

    // Arrays are copied out or lent first. A small stream is decoded after the chunk is given back, a large one
    // in the chunk, so that large bytes objects are copied only once.
    nb::object receive_parts(Message& message, bool lends) {
        broadcast::Frame stream{0, message.length};
        nb::list buffers;
        if (message.kind == ChunkKind::frames) {
            const broadcast::FrameTable table = table_of(message);
            stream = table.stream();
            const std::shared_ptr<broadcast::Lease> lease = lends ? lease_for(message, table) : nullptr;
            for (const broadcast::Frame& frame : table.buffers()) {
                const bool is_lent = lease && frame.bytes >= broadcast::kLeastLent;
                buffers.append(is_lent ? nb::cast(LentBuffer(lease, lease->memory() + frame.offset, frame.bytes))
                                       : copy_buffer(message, frame));
            }
        } else if (message.kind != ChunkKind::object) {
            raise_corrupt(message.sample);
        }
        if (stream.bytes <= kCopyWithoutGil) {
            Undecoded copy{message.kind, copy_stream(message, stream), buffers};
            message.finish();
            return decode(std::move(copy));
        }
        const nb::object file = nb::cast(Incoming(core().segment(), message, stream));
        Incoming& incoming = nb::cast<Incoming&>(file);
        return decode_in_chunk([&] { return decode_parts_(file, buffers); },
                               [&](bool is_consumed) {
                                   incoming.detach();
                                   if (is_consumed) message.finish();
                               });
    }

    // Decodes while the message is in its chunk. `leave(is_consumed)` ends that, however decoding ends.
    template <class Decode, class Leave>
    nb::object decode_in_chunk(Decode&& decode, Leave&& leave) {
        const auto is_own = [this] { return core().segment().is_own(); };  // decoding may have forked
        nb::object object;
        try {
            object = decode();
        } catch (const nb::python_error& error) {
            bool keeps = true;  // also if a handler raises in the next line
            try {
                keeps = keeps_message(error);
            } catch (const nb::python_error&) {
                leave(false);
                throw;
            }
            leave(is_own() && !keeps);
            throw;
        }
        leave(is_own());
        return object;
    }

    // The message's arrays stay where they are. Its chunk or extent is given back with the last of them.
    nb::object receive_in_place(Message& message, nb::object& shown) {
        const broadcast::FrameTable table = table_of(message);
        const auto at = message.sample.locate(message);
        if (!at) raise_corrupt(message.sample);
        const nb::bytes stream = copy_stream(message, table.stream());
        const std::uint64_t hold = core().new_hold();
        const std::shared_ptr<void> lease = lease_of_chunk(hold, at->mapping);
        shown = nb::cast(ViewLease(lease, at->begin, message.length));
        nb::list buffers;
        for (const broadcast::Frame& frame : table.buffers())
            buffers.append(nb::cast(Buffer(lease, at->begin + frame.offset, frame.bytes, true)));
        return decode_in_chunk(
            [&] { return decode_parts_(stream, std::exchange(buffers, nb::list())); },
            [&](bool is_consumed) {
                if (!is_consumed) {  // but decoding may have left references somewhere
                    if (core().segment().is_own() && lease.use_count() > 1) message.sample.keep_beside(hold, &message);
                    return;
                }
                if (lease.use_count() > 1)
                    message.sample.keep(hold, message.length, &message);
                else
                    message.finish();
            });
    }

    broadcast::FrameTable table_of(Message& message) {
        auto table = broadcast::FrameTable::parse(message.length, [&](std::uint64_t offset, std::uint64_t bytes, void* to) {
            return message.copy_out({offset, bytes}, to);
        });
        if (!table) raise_corrupt(message.sample);
        return std::move(*table);
    }

    static std::shared_ptr<broadcast::Lease> lease_for(const Message& message, const broadcast::FrameTable& table) {
        if (!table.has_lent()) return nullptr;
        log_uncopied_leases();
        return without_gil([&] { return message.sample.lease(message); });
    }

    nb::object copy_buffer(Message& message, const broadcast::Frame& frame) {
        Buffer buffer = pooled_buffer(frame.bytes);
        if (!copying(frame.bytes, [&] { return message.copy_out(frame, buffer.memory()); })) raise_corrupt(message.sample);
        return nb::cast(std::move(buffer));
    }

    nb::bytes copy_stream(Message& message, const broadcast::Frame& frame) {
        nb::bytes text = new_bytes(frame.bytes);  // first: without memory for it, nothing is consumed
        char* const to = PyBytes_AS_STRING(text.ptr());
        if (!copying(frame.bytes, [&] { return message.copy_out(frame, to); })) raise_corrupt(message.sample);
        return text;
    }

    [[noreturn]] void raise_corrupt(Sample& sample) {
        sample.finish(0);
        raise_failure(self(), "corrupt");
    }

    const nb::object decode_;
    const nb::object decode_parts_;
    const nb::object decode_plain_;
    const nb::object origin_;
    const std::size_t place_;
    std::optional<std::weak_ptr<void>> open_;  // the lease of the chunk whose block is open
    std::optional<Undecoded> undecoded_;       // the next message, if its last decoding was interrupted

    Sample begin(nb::handle timeout, nb::handle cancel) {
        std::optional<Sample> sample = try_begin(timeout, cancel);
        if (!sample) throw nb::python_error();
        return std::move(*sample);
    }

    std::optional<Sample> try_begin(nb::handle timeout, nb::handle cancel) {
        const os::Deadline deadline = deadline_of(timeout);
        if (core().holds_next()) raise_failure(self(), "next_chunk_held");
        core::Taken<Sample> taken = core().begin_nowait();
        if (taken.status == core::Status::would_block) {
            // An idle queue is not worth a line; a stopped writer is.
            const auto is_writer_stopped = [&participants = core().participants()] {
                return os::activity_of(participants.identity(0)) == os::Activity::stopped;
            };
            Interruption look(self(), core().segment(), "message", cancel, is_writer_stopped);
            if (look.is_cancelled()) raise_failure(self(), "cancelled");
            check_own();
            const WithoutGil no_gil;
            taken = core().begin(deadline, look, cancel.is_none() ? core::kLongestSlice : core::kSlice);
        }
        return is_ok(taken, timeout) ? std::move(taken.loan) : std::nullopt;
    }
};

}  // namespace memlane::bindings
