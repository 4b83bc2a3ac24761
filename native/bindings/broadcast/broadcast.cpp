// The broadcast ring for Python: RingSegment (the shared memory), RingWriter and RingReader (its two ends).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/broadcast/burst.hpp"
#include "bindings/broadcast/frame_batch.hpp"
#include "bindings/broadcast/peer_table.hpp"
#include "bindings/broadcast/ring_gather.hpp"
#include "bindings/broadcast/ring_reader.hpp"
#include "bindings/broadcast/ring_segment.hpp"
#include "bindings/broadcast/ring_writer.hpp"
#include "bindings/python/systems.hpp"
#include "broadcast/lease.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

const nb::sig kReceived(
    "def __getitem__(self, how: tuple[float | None, object | None, bool] | tuple[float | None, object | None, bool, int], /) "
    "-> Any");

template <class Bound>
nb::object received(Bound& self, const nb::tuple& how) {
    if (how.size() == 3) return self.receive(how[0], how[1], how[2]);
    return self.receive_many(how[0], how[1], how[2], nb::cast<std::size_t>(how[3]));
}

const nb::sig kCounters("def counters(self) -> tuple[int, int, int, int]");

template <class Bound>
void bind_end(nb::class_<Bound>& end) {
    end.def("wait_until_ready", &Bound::wait_until_ready, "timeout"_a.none(), "watch"_a.none() = nb::none())
        .def("close", [](Bound& self) { self.close(true, true); })
        .def("abandon", [](Bound& self) { self.close(false, false); }, "Frees everything; peers see a death.")
        .def("check", [](Bound& self) { self.readable(); }, "Raises if this end is closed or the parent process's.")
        .def("watch", &Bound::watch, "Whose descriptor is readable while a call would not wait.")
        .def("show_waiting", &Bound::show_waiting, "is_waiting"_a, "counts"_a,
             "Shows observers that somebody waits, though in no call; counts it as a wait.")
        .def("awaited", &Bound::awaited, "The peers that a call on this end waits for, and the writer.")
        .def_prop_ro("is_closed", &Bound::is_closed)
        .def_prop_ro("has_late_readers", [](Bound& self) { return self.readable().has_late_readers(); })
        .def_prop_ro("is_latest", [](Bound& self) { return self.readable().ring().is_latest(); })
        .def_prop_ro("position", &Bound::position)
        .def_prop_ro("label", &Bound::label, "What people call the queue, or an empty string.")
        .def_prop_ro("slot", [](Bound& self) { return self.slot(); })
        .def_prop_ro("ranks", &Bound::ranks)
        .def_prop_ro("absent_elsewhere", [](Bound& self) { return self.readable().participants().absent_elsewhere(); })
        .def("participant", &Bound::participant, "slot"_a, nb::sig(kParticipant))
        .def("counters", &Bound::counters, kCounters)
        .def("expect", [](Bound& self, std::size_t participants) { self.core().expect(participants); }, "participants"_a,
             "Says how many processes take turns on the cores, those of other rings included.");
}

}  // namespace

void install_fork_handlers() {
    os::ClosedInChildren::all();
    broadcast::Leases::all();  // no thread can fork beside the import
}

void bind_broadcast(nb::module_& m) {
    bind_frame_batch(m);
    bind_burst(m);
    nb::class_<RingGeometry>(m, "RingGeometry", "The numbers that determine the layout of a ring.")
        .def(nb::init<std::uint64_t, std::uint64_t, std::uint64_t>(), "n_reader"_a, "max_chunk_bytes"_a, "max_chunks"_a)
        .def_ro("n_reader", &RingGeometry::n_reader)
        .def_ro("max_chunk_bytes", &RingGeometry::max_chunk_bytes)
        .def_ro("max_chunks", &RingGeometry::max_chunks)
        .def_prop_ro("metadata_size", &RingGeometry::metadata_size)
        .def_prop_ro("metadata_offset", &RingGeometry::metadata_offset)
        .def_prop_ro("total_bytes", &RingGeometry::total_bytes);

    nb::class_<RingSegment, HeldSegment>(m, "RingSegment", "The shared memory of one ring.")
        .def_static("create", &RingSegment::create, "geometry"_a, "id"_a, "name"_a, "reserved_bytes"_a,
                    "slot"_a = nb::none(), "has_late_readers"_a = false, "is_latest"_a = false,
                    "Creates a segment and reserves that much of each chunk; first sweeps dead segments.")
        .def_static("attach", &RingSegment::attach, "geometry"_a, "name"_a, "id"_a = nb::none(), "slot"_a = nb::none(),
                    "Attaches to the segment `name`, as participant `slot` or only as a user.")
        .def_static("attach_through", &RingSegment::attach_through, "pid"_a, "descriptor"_a, "geometry"_a, "name"_a, "id"_a,
                    "slot"_a, "Attaches to a segment that a process of this user has open, also if it has no name any more.")
        .def_prop_ro("is_latest", &RingSegment::is_latest, "Whether readers get the latest message only.")
        .def("openings", &RingSegment::openings, "How often each reader's place was opened again.")
        .def("note_work", &RingSegment::note_work, "id"_a, "Shows observers which ring has the messages that this one answers.")
        .def_prop_ro("descriptor", &RingSegment::descriptor, "The number of its descriptor in this process.")
        .def_prop_ro("reserved_bytes", &RingSegment::reserved,
                     "Bytes reserved of each chunk by the creator, according to the header.")
        .def_prop_ro("is_creator", [](const RingSegment& self) { return self.segment()->is_creator(); })
        .def_prop_ro("is_own", [](const RingSegment& self) { return self.segment()->is_own(); },
                     "False in a child that was forked after the segment was opened.")
        .def("view", &RingSegment::view, "offset"_a, "bytes"_a, nb::sig("def view(self, offset: int, bytes: int) -> memoryview"))
        .def("close", &RingSegment::close)
        .def("abandon", &RingSegment::abandon);

    nb::class_<PeerTable, HeldSegment>(m, "PeerTable", "What a network end shows observers: its peers, in a segment without a name.")
        .def(nb::init<const RingGeometry&, const nb::bytes&, const std::string&, bool, bool>(), "geometry"_a, "queue"_a,
             "name"_a, "is_writer"_a, "has_late_readers"_a)
        .def("write", &PeerTable::write, "row"_a, "slot"_a, "facts"_a, "Shows one participant, packed as in its segment.")
        .def("close", &PeerTable::close);

    nb::class_<core::Watch>(m, "Watch", "A descriptor for select and epoll, of an end that a thread watches.")
        .def("fileno", &core::Watch::fd)
        .def_prop_ro("is_readable", &core::Watch::is_readable, "Whether the descriptor is, right now.");

    nb::class_<ChunkBlock>(m, "ChunkBlock", "A `with` block on a chunk; leaving it publishes or releases the chunk.")
        .def("__enter__", &ChunkBlock::enter, nb::sig("def __enter__(self) -> memoryview"))
        .def("__exit__", &ChunkBlock::exit, "kind"_a.none(), "error"_a.none(), "traceback"_a.none());

    nb::class_<RingWriter> writer(m, "RingWriter", "The writer's end of a ring; holds slot 0 of the segment.");
    writer.def(nb::init<const RingSegment&, std::vector<std::int64_t>, const nb::object&, std::uint64_t, bool>(), "ring"_a,
             "ranks"_a, "codec"_a, "max_extent_bytes"_a, "has_others"_a)
        .def("send", &RingWriter::send, "object"_a.none(), "timeout"_a.none(),
             nb::sig("def send(self, object: object, timeout: float | None) -> None"), "Encodes and sends one object.")
        .def("send_encoded", &RingWriter::send_encoded, "encoder"_a, "timeout"_a.none(), "watch"_a.none(),
             nb::sig("def send_encoded(self, encoder: Encoder, timeout: float | None, watch: object | None) -> None"),
             "Sends the encoder's message; a blocked call polls `watch` like a `cancel`.")
        .def("send_many", &RingWriter::send_many, "objects"_a, "timeout"_a.none(), "burst"_a,
             nb::sig("def send_many(self, objects: tuple[object, ...], timeout: float | None, burst: Burst) -> None"),
             "Encodes and sends objects one after the other, and wakes readers once; `burst` counts them.")
        .def_prop_ro("has_sent", &RingWriter::has_sent, "Whether the last call to send has published its message.")
        .def("wait_until_read", &RingWriter::wait_until_read, "position"_a, "timeout"_a.none(),
             "Waits until every reader has finished with the message at `position`; False on timeout.")
        .def("write_block", &RingWriter::write_block, "owner"_a, "timeout"_a.none(),
             nb::sig("def write_block(self, owner: object, timeout: float | None) -> ChunkBlock"),
             "A block on the next chunk, for the caller to fill.")
        .def("release_reader", &RingWriter::release_reader, "reader"_a,
             "Stops waiting for a reader that is dead or absent; False if it is alive.")
        .def("readmit", &RingWriter::readmit, "reader"_a,
             "Opens the place of a reader that has closed or was released; False if it is neither.")
        .def("readmit_late", &RingWriter::readmit_late, "reader"_a,
             "Opens the place for a late reader, from any thread; False: not now.")
        .def("kept", &RingWriter::kept, nb::sig("def kept(self) -> list[tuple[int, int, int, int, int]]"),
             "Slot, lent messages and bytes, viewed messages and bytes, of each reader that keeps any.")
        .def_prop_ro("deserted_since", &RingWriter::deserted_since, nb::sig("def deserted_since(self) -> int | None"),
                     "When the last reader closed (ns), if none is left, as of the last look; else None.")
        .def("used_by_others", &RingWriter::used_by_others, "Bytes that other files in /dev/shm use.")
        .def("set_absent_elsewhere",
             [](RingWriter& self, std::uint32_t count) { self.readable().participants().set_absent_elsewhere(count); }, "count"_a,
             "Sets how many readers on other hosts have not attached; local readers wait for them, too.");
    bind_end(writer);

    nb::class_<RingReader> reader(m, "RingReader", "A reader's end of a ring; holds slot 1 + reader of the segment.");
    reader.def(nb::init<const RingSegment&, std::vector<std::int64_t>, const nb::object&, std::size_t, std::uint32_t, nb::object>(),
             "ring"_a, "ranks"_a, "codec"_a, "reader"_a, "opening"_a, "origin"_a.none(),
             nb::sig("def __init__(self, ring: RingSegment, ranks: Sequence[int], codec: object, reader: int, opening: int, "
                     "origin: tuple[int, str] | None) -> None"))
        // No call, after which a signal handler could raise: what was taken would be lost.
        .def("__getitem__",
             [](RingReader& reader, const nb::tuple& how) -> nb::object {
                 if (how.size() == 2) return reader.receive_view(how[0], how[1]);
                 return received(reader, how);
             },
             nb::sig("def __getitem__(self, how: tuple[float | None, object | None] | tuple[float | None, object | None, bool] | "
                     "tuple[float | None, object | None, bool, int], /) -> Any"),
             "The next by (timeout, cancel, lend), a list with `most`, a view and lease without `lend`.")
        .def("read_block", &RingReader::read_block, "owner"_a, "timeout"_a.none(), "cancel"_a.none(),
             nb::sig("def read_block(self, owner: object, timeout: float | None, cancel: object | None) -> ChunkBlock"),
             "A block on the next chunk, not decoded.")
        .def_prop_ro("place", &RingReader::place, "The index of the reader among the local ones.")
        .def_prop_ro("skipped", &RingReader::skipped, "Messages that it will not get, because later ones came first.")
        .def_prop_ro("origin", &RingReader::origin, nb::sig("def origin(self) -> tuple[int, str] | None"),
                     "For a relay's ring, pid and address of the writer whose messages it passes on.");
    bind_end(reader);

    nb::class_<RingGather>(m, "RingGather", "One reader of several rings.")
        .def(nb::init<const nb::list&, nb::object>(), "readers"_a, "nothing"_a,
             nb::sig("def __init__(self, readers: list[RingReader], nothing: object) -> None"))
        .def_static("can_wait_for", &broadcast::RingGather::can_wait_for, "count"_a,
                    "Whether so many rings can be waited for by one sleep here.")
        // No call, after which a signal handler could raise: what was taken would be lost.
        .def("__getitem__", received<RingGather>, kReceived,
             "As that of a RingReader, of the readers in turn; `nothing` on timeout.")
        .def("replace", &RingGather::replace, "at"_a, "reader"_a,
             nb::sig("def replace(self, at: int, reader: RingReader) -> None"),
             "Puts another reader in the place of one that is closed.")
        .def_prop_ro("ended", &RingGather::ended, "The index of the reader of which the last call has raised.");
}

}  // namespace memlane::bindings
