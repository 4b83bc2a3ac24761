// The broadcast ring for Python: RingSegment (the shared memory), RingWriter and RingReader (its two ends).
//
// A message that fits the chunk and finds it free: one crossing, one copy, the GIL kept for copies below 64 KiB.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bindings/broadcast.hpp"
#include "bindings/buffer_pool.hpp"
#include "bindings/end.hpp"
#include "bindings/incoming.hpp"
#include "bindings/outgoing.hpp"
#include "bindings/shared_buffer.hpp"
#include "broadcast/ring_reader.hpp"
#include "broadcast/ring_writer.hpp"
#include "core/sweep.hpp"

namespace memlane::bindings {

using namespace nb::literals;
using broadcast::ChunkKind;
using broadcast::ChunkSpace;
using broadcast::RingGeometry;
using broadcast::RingReader;
using broadcast::RingWriter;

namespace {

// Above this a copy takes longer than handing the GIL over and back.
constexpr std::size_t kCopyWithoutGil = 64u << 10;

// Runs `work` with or without the GIL, as is cheaper for so many bytes.
template <class Work>
auto copying(std::uint64_t bytes, Work&& work) {
    if (bytes < kCopyWithoutGil) return work();
    const nb::gil_scoped_release no_gil;
    return work();
}

core::SegmentId to_id(const nb::bytes& text) {
    core::SegmentId id{};
    if (text.size() != id.size()) raise_error("InvalidArgument", "a queue id has 16 bytes");
    std::memcpy(id.data(), text.c_str(), id.size());
    return id;
}

class RingSegment {
public:
    RingSegment(std::shared_ptr<core::Segment> segment, const RingGeometry& geometry, std::uint64_t reserved)
        : segment_(std::move(segment)), geometry_(geometry), reserved_(reserved), space_(geometry, reserved) {}

    static RingSegment create(const RingGeometry& g, const nb::bytes& id, const std::string& name,
                              std::uint64_t reserved_bytes, std::optional<std::size_t> slot) {
        const core::SegmentId segment_id = to_id(id);
        const nb::gil_scoped_release no_gil;
        core::sweep_dead_segments();
        const std::uint64_t each = std::min(reserved_bytes, g.max_chunk_bytes);
        std::vector<core::ReservedRange> ranges;
        if (each == g.max_chunk_bytes) {
            ranges.push_back({0, g.total_bytes()});
        } else {
            for (std::uint64_t c = 0; c < g.max_chunks; ++c) ranges.push_back({c * g.max_chunk_bytes, each});
            ranges.push_back({g.metadata_offset(), g.metadata_size() * g.max_chunks});
        }
        return {core::Segment::create(broadcast::plan_of(g), segment_id, name, ranges, slot), g, each};
    }

    static RingSegment attach(const RingGeometry& g, const std::string& name, const std::optional<nb::bytes>& id,
                              std::optional<std::size_t> slot) {
        std::optional<core::SegmentId> segment_id;
        if (id) segment_id = to_id(*id);
        const nb::gil_scoped_release no_gil;
        return {core::Segment::attach(name, broadcast::plan_of(g), segment_id, slot), g, 0};
    }

    const std::shared_ptr<core::Segment>& segment() const noexcept { return segment_; }
    const RingGeometry& geometry() const noexcept { return geometry_; }
    std::uint64_t reserved() const noexcept { return reserved_; }

    nb::object whole() const { return view({mapping(), 0, mapping()->bytes()}); }
    nb::object data(std::uint64_t chunk) {
        const auto kept = mapping();
        space_.ensure_all(*segment_, chunk);
        return view({kept, chunk * geometry_.max_chunk_bytes, geometry_.max_chunk_bytes});
    }
    nb::object metadata(std::uint64_t chunk) const {
        const std::uint64_t at = geometry_.metadata_offset() + chunk * geometry_.metadata_size();
        return view({mapping(), at, geometry_.metadata_size()});
    }

    // Without a queue on it nobody is told: such a ring has no participants.
    void close() {
        if (segment_->is_open()) segment_->remove_name();
        segment_->abandon();
    }
    void abandon() noexcept { segment_->abandon(); }

private:
    const std::shared_ptr<os::Mapping>& mapping() const {
        if (!segment_->is_open()) raise_error("Closed", "this ring is closed");
        return segment_->mapping();
    }

    std::shared_ptr<core::Segment> segment_;
    RingGeometry geometry_;
    std::uint64_t reserved_;
    ChunkSpace space_;
};

const char* to_text(core::Presence presence, const os::ProcessIdentity& who) noexcept {
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

// (state, pid, position, last progress in ns of the monotonic clock) by slot. Costs system calls.
template <class Core>
nb::list participants_of(Core& end, std::size_t own_slot) {
    nb::list all;
    for (std::size_t i = 0; i < 1 + end.ring().geometry().n_reader; ++i) {
        const core::Participants& participants = end.participants();
        const core::Presence presence = i == own_slot ? core::Presence::attached : participants.presence(i);
        const os::ProcessIdentity who = participants.identity(i);
        const core::ParticipantSlot& slot = participants.slot(i);
        all.append(nb::make_tuple(to_text(presence, who), who.pid, core::load_relaxed(slot.position),
                                  core::load_relaxed(slot.last_progress_ns)));
    }
    return all;
}

template <class Core>
nb::tuple counters_of(Core& end, std::size_t own_slot) {
    const core::ParticipantSlot& slot = end.participants().slot(own_slot);
    return nb::make_tuple(core::load_relaxed(slot.position), core::load_relaxed(slot.bytes),
                          core::load_relaxed(slot.waits), core::load_relaxed(slot.spills));
}

// Until the writer and every reader have attached. A death among them, or the writer's end, ends it, too.
template <class Core>
core::Outcome wait_for_all(Core& end, std::size_t own_slot, os::Deadline deadline, Interruption& look) {
    const core::Participants& participants = end.participants();
    const std::size_t count = 1 + end.ring().geometry().n_reader;
    std::optional<std::size_t> dead;
    const auto find_dead = [&] {
        for (std::size_t i = 0; i < count && !dead; ++i)
            if (i != own_slot && participants.presence(i) == core::Presence::dead) dead = i;
        return dead.has_value();
    };
    const auto all_here = [&] {
        if (end.is_stopping() || participants.state(0) == core::SlotState::closed) return true;
        for (std::size_t i = 0; i < count; ++i)
            if (participants.state(i) == core::SlotState::absent) return false;
        return true;
    };
    core::Spinner spinner(count, os::usable_cores());
    const core::WaitResult result = core::wait_until({&end.segment().header().membership}, spinner, deadline, all_here,
                                                     [&] { return find_dead() || look(); });
    if (end.is_stopping()) return {core::Status::closed};
    if (find_dead()) return {core::Status::peer_died, *dead};
    if (result == core::WaitResult::timed_out) return {core::Status::timed_out};
    if (result == core::WaitResult::interrupted) return {core::Status::interrupted};
    for (std::size_t i = 0; i < count; ++i)
        if (participants.state(i) == core::SlotState::absent) return {core::Status::peer_closed, 0};
    return {core::Status::ok};
}

template <class Bound, class Core>
void raise_outcome(End<Bound, Core>& end, const core::Outcome& outcome, nb::handle timeout,
                   const char* timed_out = "timed_out") {
    if (outcome.status == core::Status::interrupted) raise_failure(end.self(), "cancelled");
    if (outcome.status == core::Status::timed_out) raise_failure(end.self(), timed_out, 0, timeout);
    raise_failure(end.self(), name_of(outcome.status), outcome.slot, timeout);
}

class Writer : public End<Writer, RingWriter> {
public:
    Writer(const RingSegment& ring, std::vector<std::int64_t> ranks, const nb::object& codec, std::uint64_t keep_bytes)
        : End(ring.segment(), std::move(ranks), ring.geometry(), ring.reserved(), keep_bytes),
          encode_(codec.attr("encode")),
          outgoing_(codec.attr("outgoing")) {}

    void send(nb::handle object, nb::handle timeout) {
        const Call call(*this, false);
        Outgoing& message = nb::cast<Outgoing&>(outgoing_);
        const Cleared cleared{message};
        encode_(object);
        const broadcast::FrameTable table = message.table();
        const std::uint64_t bytes = message.is_plain() ? message.stream_bytes() : table.total();
        const ChunkKind kind = message.is_plain() ? ChunkKind::object : ChunkKind::frames;
        const os::Deadline deadline = to_deadline(timeout);
        const std::uint64_t limit = core().ring().geometry().max_chunk_bytes;
        if (bytes <= limit) {
            begin(bytes, deadline, timeout);
            std::byte* const chunk = core().chunk();
            copying(bytes, [&] {
                return message.for_each_part(table, [&](std::uint64_t at, std::uint64_t size, const void* from) {
                    std::memcpy(chunk + at, from, size);
                    return 0;
                });
            });
        } else {
            begin(0, deadline, timeout);
            spill(message, table, bytes, deadline, timeout);
        }
        core().publish(kind, bytes);
    }

    nb::object begin_write(nb::handle timeout) {
        const Call call(*this, false);
        const RingGeometry& g = core().ring().geometry();
        begin(g.max_chunk_bytes, to_deadline(timeout), timeout);
        set_holding(true);
        const std::uint64_t at = core().ring().chunk_at(core().position()) * g.max_chunk_bytes;
        return view({core().segment().mapping(), at, g.max_chunk_bytes});
    }

    void end_write(bool publish) {
        if (is_closed() && !publish) return;  // closed inside the block, which then failed: nothing to take back
        const Call call(*this, true);
        set_holding(false);
        if (publish) core().publish(ChunkKind::raw, core().ring().geometry().max_chunk_bytes);
    }

    void wait_until_ready(nb::handle timeout) {
        const Call call(*this, false);
        const os::Deadline deadline = to_deadline(timeout);
        Interruption look;
        const core::Outcome outcome = [&] {
            const nb::gil_scoped_release no_gil;
            return wait_for_all(core(), RingWriter::kSlot, deadline, look);
        }();
        if (outcome.status != core::Status::ok) raise_outcome(*this, outcome, timeout, "not_ready");
        core().segment().remove_name();
    }

    bool release_reader(std::size_t reader) {
        const Call call(*this, false);
        return core().release_reader(reader);
    }

private:
    struct Cleared {
        Outgoing& message;
        ~Cleared() { message.clear(); }
    };

    void begin(std::uint64_t bytes, os::Deadline deadline, nb::handle timeout) {
        core::Outcome outcome = core().begin_nowait(bytes);
        if (outcome.status == core::Status::would_block) {
            Interruption look;
            const nb::gil_scoped_release no_gil;
            outcome = core().begin(bytes, deadline, look);
        }
        if (outcome.status != core::Status::ok) raise_outcome(*this, outcome, timeout);
    }

    void spill(const Outgoing& message, const broadcast::FrameTable& table, std::uint64_t bytes, os::Deadline deadline,
               nb::handle timeout) {
        const os::FileDescriptor& file = core().segment().file();
        const auto write = [&](std::uint64_t extent) {
            return message.for_each_part(table, [&](std::uint64_t at, std::uint64_t size, const void* from) {
                return os::write_at(file, from, size, extent + at);
            });
        };
        Interruption look;
        const core::Outcome outcome = [&] {
            const nb::gil_scoped_release no_gil;
            return core().spill(bytes, deadline, write, look);
        }();
        if (outcome.status != core::Status::ok) raise_outcome(*this, outcome, timeout);
    }

    const nb::object encode_;
    const nb::object outgoing_;
};

class Reader : public End<Reader, RingReader> {
public:
    Reader(const RingSegment& ring, std::vector<std::int64_t> ranks, const nb::object& codec, std::size_t reader)
        : End(ring.segment(), std::move(ranks), ring.geometry(), reader),
          decode_(codec.attr("decode")),
          decode_parts_(codec.attr("decode_parts")),
          place_(reader) {}

    std::size_t place() const noexcept { return place_; }

    nb::object receive(nb::handle timeout, nb::handle cancel) {
        const Call call(*this, false);
        begin(timeout, cancel);
        const auto descriptor = core().descriptor();
        if (!descriptor) raise_corrupt();
        if (descriptor->kind == ChunkKind::object && descriptor->length <= kCopyWithoutGil)
            return receive_small(*descriptor);
        return receive_parts(*descriptor);
    }

    nb::object begin_read(nb::handle timeout, nb::handle cancel) {
        const Call call(*this, false);
        begin(timeout, cancel);
        core().ensure_whole_chunk();
        set_holding(true);
        const std::uint64_t bytes = core().ring().geometry().max_chunk_bytes;
        const std::uint64_t at = core().ring().chunk_at(core().position()) * bytes;
        return view({core().segment().mapping(), at, bytes});
    }

    void end_read() {
        if (is_closed()) return;  // closed inside the block: the chunk was given back with everything else
        const Call call(*this, true);
        set_holding(false);
        core().finish(core().ring().geometry().max_chunk_bytes);
    }

    void wait_until_ready(nb::handle timeout) {
        const Call call(*this, false);
        const os::Deadline deadline = to_deadline(timeout);
        Interruption look;
        const core::Outcome outcome = [&] {
            const nb::gil_scoped_release no_gil;
            return wait_for_all(core(), core().slot(), deadline, look);
        }();
        if (outcome.status != core::Status::ok) raise_outcome(*this, outcome, timeout, "not_ready");
    }

private:
    // The chunk is given back before its bytes are decoded: whatever decoding does, the message is consumed.
    nb::object receive_small(const broadcast::ChunkDescriptor& message) {
        const nb::bytes stream = copy_stream(message, {0, message.length});
        core().finish(message.length);
        return decode_(stream);
    }

    // Arrays are copied out first. A small stream is decoded after the chunk is given back, a large one from it,
    // so that large bytes are copied once only.
    nb::object receive_parts(const broadcast::ChunkDescriptor& message) {
        broadcast::Frame stream{0, message.length};
        nb::list buffers;
        if (message.kind == ChunkKind::frames) {
            const auto table = broadcast::FrameTable::parse(
                message.length, [&](std::uint64_t offset, std::uint64_t bytes, void* to) {
                    return core().copy_out(message, offset, bytes, to);
                });
            if (!table) raise_corrupt();
            stream = table->stream();
            for (const broadcast::Frame& frame : table->buffers()) buffers.append(copy_buffer(message, frame));
        } else if (message.kind != ChunkKind::object) {
            raise_corrupt();
        }
        if (stream.bytes <= kCopyWithoutGil) {
            const nb::bytes text = copy_stream(message, stream);
            core().finish(message.length);
            return decode_parts_(text, buffers);
        }
        const nb::object file = nb::cast(Incoming(core(), message, stream));
        const Finished finished{core(), nb::cast<Incoming&>(file), message.length};
        return decode_parts_(file, buffers);
    }

    nb::object copy_buffer(const broadcast::ChunkDescriptor& message, const broadcast::Frame& frame) {
        PooledBuffer buffer(frame.bytes);
        const bool copied =
            copying(frame.bytes, [&] { return core().copy_out(message, frame.offset, frame.bytes, buffer.memory()); });
        if (!copied) raise_corrupt();
        return nb::cast(std::move(buffer));
    }

    nb::bytes copy_stream(const broadcast::ChunkDescriptor& message, const broadcast::Frame& frame) {
        nb::object text = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(frame.bytes)));
        if (!text.is_valid()) throw nb::python_error();  // MemoryError; nothing is consumed
        if (!core().copy_out(message, frame.offset, frame.bytes, PyBytes_AS_STRING(text.ptr()))) raise_corrupt();
        return nb::borrow<nb::bytes>(text);
    }

    [[noreturn]] void raise_corrupt() {
        core().finish(0);
        raise_failure(self(), "corrupt");
    }

    struct Finished {
        RingReader& reader;
        Incoming& stream;
        std::uint64_t bytes;
        ~Finished() {
            stream.detach();
            reader.finish(bytes);
        }
    };

    const nb::object decode_;
    const nb::object decode_parts_;
    const std::size_t place_;

    void begin(nb::handle timeout, nb::handle cancel) {
        const os::Deadline deadline = to_deadline(timeout);
        core::Outcome outcome = core().begin_nowait();
        if (outcome.status == core::Status::would_block) {
            Interruption look(cancel);
            if (look.is_cancelled()) raise_failure(self(), "cancelled");
            const nb::gil_scoped_release no_gil;
            outcome = core().begin(deadline, look);
        }
        if (outcome.status != core::Status::ok) raise_outcome(*this, outcome, timeout);
    }
};

const nb::sig kParticipants("def participants(self) -> list[tuple[str, int, int, int]]");
const nb::sig kCounters("def counters(self) -> tuple[int, int, int, int]");

}  // namespace

void bind_broadcast(nb::module_& m) {
    nb::class_<RingGeometry>(m, "RingGeometry", "Numbers that fix the bytes of a ring.")
        .def(nb::init<std::uint64_t, std::uint64_t, std::uint64_t>(), "n_reader"_a, "max_chunk_bytes"_a, "max_chunks"_a)
        .def_ro("n_reader", &RingGeometry::n_reader)
        .def_ro("max_chunk_bytes", &RingGeometry::max_chunk_bytes)
        .def_ro("max_chunks", &RingGeometry::max_chunks)
        .def_prop_ro("metadata_size", &RingGeometry::metadata_size)
        .def_prop_ro("metadata_offset", &RingGeometry::metadata_offset)
        .def_prop_ro("total_bytes", &RingGeometry::total_bytes);

    nb::class_<RingSegment>(m, "RingSegment", "The shared memory of one ring.")
        .def_static("create", &RingSegment::create, "geometry"_a, "id"_a, "name"_a, "reserved_bytes"_a,
                    "slot"_a = nb::none(),
                    "Makes a segment, reserving so much of every chunk; sweeps what the dead left first.")
        .def_static("attach", &RingSegment::attach, "geometry"_a, "name"_a, "id"_a = nb::none(), "slot"_a = nb::none(),
                    "Joins the segment of that name, as the participant `slot` or as a mere user.")
        .def_prop_ro("name", [](const RingSegment& self) { return self.segment()->name(); })
        .def_prop_ro("size", [](const RingSegment& self) { return self.segment()->bytes(); })
        .def_prop_ro("is_creator", [](const RingSegment& self) { return self.segment()->is_creator(); })
        .def_prop_ro("is_open", [](const RingSegment& self) { return self.segment()->is_open(); })
        .def_prop_ro("is_own", [](const RingSegment& self) { return self.segment()->is_own(); },
                     "False in a child that was forked after the segment was opened.")
        .def("whole", &RingSegment::whole, nb::sig("def whole(self) -> memoryview"))
        .def("data", &RingSegment::data, "chunk"_a, nb::sig("def data(self, chunk: int) -> memoryview"))
        .def("metadata", &RingSegment::metadata, "chunk"_a, nb::sig("def metadata(self, chunk: int) -> memoryview"))
        .def("close", &RingSegment::close)
        .def("abandon", &RingSegment::abandon);

    nb::class_<Outgoing>(m, "Outgoing", "A message on its way out: a file for a Pickler, and its buffer_callback.")
        .def(nb::init<>())
        .def("write", &Outgoing::write, "data"_a)
        .def("add_buffer", &Outgoing::add_buffer, "buffer"_a, "True leaves it in the stream.");

    nb::class_<Incoming>(m, "Incoming", "The stream of a large message, as a file for an Unpickler.")
        .def("read", &Incoming::read, "size"_a = -1)
        .def("readinto", &Incoming::read_into, "target"_a)
        .def("readline", &Incoming::read_line);

    static PyType_Slot pooled[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(PooledBuffer::get_buffer)}, {0, nullptr}};
    nb::class_<PooledBuffer>(m, "PooledBuffer", nb::type_slots(pooled), "Memory of an array that a reader owns.");

    nb::class_<Writer>(m, "RingWriter", "The writer's end of a ring; holds slot 0 of the segment.")
        .def(nb::init<const RingSegment&, std::vector<std::int64_t>, const nb::object&, std::uint64_t>(), "ring"_a,
             "ranks"_a, "codec"_a, "keep_bytes"_a)
        .def("send", &Writer::send, "object"_a.none(), "timeout"_a.none(), "One object, encoded.")
        .def("begin_write", &Writer::begin_write, "timeout"_a.none(),
             nb::sig("def begin_write(self, timeout: float | None) -> memoryview"), "The next chunk, free to be filled by hand.")
        .def("end_write", &Writer::end_write, "publish"_a)
        .def("wait_until_ready", &Writer::wait_until_ready, "timeout"_a.none())
        .def("release_reader", &Writer::release_reader, "reader"_a,
             "Stops waiting for a reader that is dead or absent; False if it lives.")
        .def("close", [](Writer& self) { self.close(true); })
        .def("abandon", [](Writer& self) { self.close(false); })
        .def("check", [](Writer& self) { self.readable(); }, "Raises if this end is closed or a parent process's.")
        .def_prop_ro("is_closed", &Writer::is_closed)
        .def_prop_ro("position", [](Writer& self) { return self.is_closed() ? 0 : self.core().position(); })
        .def_prop_ro("slot", [](Writer&) { return RingWriter::kSlot; })
        .def_prop_ro("ranks", &Writer::ranks)
        .def("participants", [](Writer& self) { return participants_of(self.readable(), RingWriter::kSlot); }, kParticipants)
        .def("counters", [](Writer& self) { return counters_of(self.readable(), RingWriter::kSlot); }, kCounters);

    nb::class_<Reader>(m, "RingReader", "A reader's end of a ring; holds slot 1 + reader of the segment.")
        .def(nb::init<const RingSegment&, std::vector<std::int64_t>, const nb::object&, std::size_t>(), "ring"_a,
             "ranks"_a, "codec"_a, "reader"_a)
        .def("receive", &Reader::receive, "timeout"_a.none(), "cancel"_a.none(), "The next object, decoded.")
        .def("begin_read", &Reader::begin_read, "timeout"_a.none(), "cancel"_a.none(),
             nb::sig("def begin_read(self, timeout: float | None, cancel: object | None) -> memoryview"), "The next chunk as it is.")
        .def("end_read", &Reader::end_read)
        .def("wait_until_ready", &Reader::wait_until_ready, "timeout"_a.none())
        .def("close", [](Reader& self) { self.close(true); })
        .def("abandon", [](Reader& self) { self.close(false); })
        .def("check", [](Reader& self) { self.readable(); }, "Raises if this end is closed or a parent process's.")
        .def_prop_ro("is_closed", &Reader::is_closed)
        .def_prop_ro("position", [](Reader& self) { return self.is_closed() ? 0 : self.core().position(); })
        .def_prop_ro("slot", [](Reader& self) { return 1 + self.place(); })
        .def_prop_ro("ranks", &Reader::ranks)
        .def_prop_ro("place", &Reader::place, "Of the reader among the local ones.")
        .def("participants", [](Reader& self) { return participants_of(self.readable(), 1 + self.place()); }, kParticipants)
        .def("counters", [](Reader& self) { return counters_of(self.readable(), 1 + self.place()); }, kCounters);
}

}  // namespace memlane::bindings
