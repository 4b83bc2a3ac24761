// The object store for Python: ByteRingSegment (the shared memory), StoreWriter and StoreReader (the ends of a storage).
#include "bindings/store.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/byte_views.hpp"
#include "bindings/store_end.hpp"
#include "bindings/store_ring.hpp"
#include "store/store_reader.hpp"
#include "store/store_writer.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class End>
void bind_end(nb::class_<End>& end) {
    end.def("pin", &End::pin, "address"_a.none(), "id"_a.none(),
            nb::sig("def pin(self, address: object, id: object) -> PinnedObject | None"),
            "The object, kept as it is; None unless that id is stored there.")
        .def("is_valid", &End::is_valid, "pinned"_a, "Was all that was read of it until now its own?")
        .def("finish_read", &End::finish_read, "pinned"_a, "stands_in"_a,
             "Counts a read, of a writer only if it stands in for a reader. False if it was not valid.")
        .def("count", &End::count, "view"_a, "One more read, of the object whose 4 count bytes these are.")
        .def("note_progress", &End::note_progress, "bytes"_a)
        .def("close", [](End& self) { self.finish(true); })
        .def("abandon", [](End& self) { self.finish(false); }, "Frees everything, tells nobody.")
        .def("check", &End::check, "Raises if this end is closed or a parent process's.")
        .def_prop_ro("is_closed", &End::is_closed)
        .def_prop_ro("secret", &End::secret, "32 random bytes that all ends of the storage share.")
        .def_prop_ro("slot", &End::slot)
        .def_prop_ro("ranks", &End::ranks)
        .def("participant", &End::participant, "slot"_a,
             nb::sig(kParticipant))
        .def("counters", &End::counters, nb::sig("def counters(self) -> tuple[int, int, int, int, int, int]"),
             "max_objects, puts, hits, evictions, objects, bytes.")
        .def("outstanding", &End::outstanding, "Reads that each reader still owes.");
}

const char* const kBlockers = "def blockers(self, id: int, references: int) -> list[tuple[int, int, int]]";

}  // namespace

void bind_store(nb::module_& m) {
    nb::class_<ByteRingSegment>(m, "ByteRingSegment", "The shared memory of a ring of bytes.")
        .def_static("create", &ByteRingSegment::create, "bytes"_a, "id"_a, "name"_a,
                    "Makes a segment, of which the first piece is reserved; sweeps what the dead left first.")
        .def_static("attach", &ByteRingSegment::attach, "bytes"_a, "name"_a)
        .def_prop_ro("name", [](const ByteRingSegment& self) { return self.segment().name(); })
        .def_prop_ro("size", [](const ByteRingSegment& self) { return self.segment().bytes(); })
        .def_prop_ro("is_open", [](const ByteRingSegment& self) { return self.segment().is_open(); })
        .def("check", &ByteRingSegment::check, "Raises if it is closed or a parent process's.")
        .def("whole", &ByteRingSegment::whole, nb::sig("def whole(self) -> memoryview"))
        .def("view", &ByteRingSegment::view, "offset"_a, "bytes"_a,
             nb::sig("def view(self, offset: int, bytes: int) -> memoryview"))
        .def("read_header", &ByteRingSegment::read_header, "offset"_a,
             nb::sig("def read_header(self, offset: int) -> tuple[int, int]"),
             "Id and size of a chunk; the size is 0 where there is none.")
        .def("write_header", &ByteRingSegment::write_header, "offset"_a, "id"_a, "size"_a,
             "Of a new chunk, whose space is taken first.")
        .def("writing", &ByteRingSegment::writing, "call"_a, "mend"_a,
             "A block around a call of the writer; `mend()` comes after one that raised.")
        .def("close", &ByteRingSegment::close)
        .def("abandon", &ByteRingSegment::abandon);

    nb::class_<WriterCall>(m, "WriterCall", "A block of ByteRingSegment.writing: ConcurrentUse while there is another one.")
        .def("__enter__", &WriterCall::enter)
        .def("__exit__", &WriterCall::exit, "kind"_a.none(), "error"_a.none(), "traceback"_a.none());

    m.def("copy_parts", &copy_parts, "target"_a, "offset"_a, "parts"_a, "bytes"_a,
          "Copies `parts`, of so many bytes together, to `target[offset:]`; large ones without the GIL.");

    nb::class_<PinnedObject>(m, "PinnedObject", "An object that stays as it is while this or a buffer of it exists.")
        .def("data", &PinnedObject::data, nb::sig("def data(self) -> memoryview"), "Metadata and data, read-only.")
        .def("count", &PinnedObject::count, nb::sig("def count(self) -> memoryview"), "The 4 count bytes.")
        .def("lease", &PinnedObject::lease)
        .def_prop_ro("size", [](const PinnedObject& self) { return self.object().size; })
        .def("release", &PinnedObject::release);

    nb::class_<BoundStoreReader> reader(m, "StoreReader", "A reader's end of a storage; holds slot 1 + place.");
    reader.def_static(
        "attach",
        [](const ByteRingSegment& ring, std::uint64_t n_readers, std::uint64_t max_object_size) {
            ring.check();
            const auto table = store::ObjectTable::find(ring.segment(), ring.ring_bytes(), n_readers, max_object_size);
            return new BoundStoreReader(store::StoreReader::join(ring.segment(), table));
        },
        "ring"_a, "n_readers"_a, "max_object_size"_a, "Takes the next free place.");
    bind_end(reader);

    nb::class_<BoundStoreWriter> writer(m, "StoreWriter", "The writer's end of a storage; holds slot 0.");
    writer.def_static(
              "create",
              [](const ByteRingSegment& ring, std::uint64_t n_readers, std::uint64_t max_objects, std::uint64_t max_object_size,
                 const nb::bytes& secret, bool unlink_when_complete) {
                  ring.check();
                  const store::StoreGeometry g{n_readers, max_objects, max_object_size};
                  return new BoundStoreWriter(
                      store::StoreWriter::create(ring.segment(), ring.ring_bytes(), g, to_secret(secret), unlink_when_complete));
              },
              "ring"_a, "n_readers"_a, "max_objects"_a, "max_object_size"_a, "secret"_a,
              "unlink_when_complete"_a, "Adds an object table to the ring's file.")
        .def("obstacle", [](const BoundStoreWriter& self, std::uint64_t offset, std::uint64_t bytes) {
                 return self.core().obstacle(offset, bytes); }, "offset"_a, "bytes"_a,
             "Retires the orphans in these bytes of the ring; 0, or the end of one that is read.")
        .def("is_kept", [](const BoundStoreWriter& self, std::uint32_t id) { return self.core().is_kept(id); }, "id"_a,
             "Is the entry of this id that of an object that was cleared, and is still read?")
        .def("admits", [](const BoundStoreWriter& self, std::uint32_t id) { return self.core().admits(id); }, "id"_a,
             "Is the object's entry in the table free?")
        .def("offer", [](const BoundStoreWriter& self, std::uint32_t id, std::uint64_t address,
                         std::uint64_t size) { self.core().offer(id, address, size); }, "id"_a, "address"_a, "size"_a,
             "What was written there is an object from now on.")
        .def("store", &BoundStoreWriter::store, "id"_a, "address"_a, "metadata"_a.none(), "metadata_bytes"_a, "parts"_a,
             "bytes"_a, "Fills an admitted place, and makes an object with one reference of it.")
        .def("refer", [](const BoundStoreWriter& self, std::uint32_t id,
                         std::uint32_t references) { if (self.core().knows(id)) self.core().refer(id, references); },
             "id"_a, "references"_a, "Sets how often every reader is to read it.")
        .def("drop_reference", [](const BoundStoreWriter& self, std::uint32_t id, std::uint32_t left) {
                 return !self.core().knows(id) || self.core().drop_reference(id, left); }, "id"_a, "left"_a,
             "Takes one reference back; False, and nothing has changed, if a reader has read it already.")
        .def("is_read", &BoundStoreWriter::is_read, "id"_a, "view"_a, "references"_a,
             "Has every reader read the object with these count bytes so often?")
        .def("has_been_read", &BoundStoreWriter::has_been_read, "id"_a, "references"_a, "The same of an object that is stored.")
        .def("evict", [](const BoundStoreWriter& self, std::uint32_t id) { return self.core().evict(id); }, "id"_a,
             "Its entry and space may be used again, which is counted once; False while somebody reads it.")
        .def("clear", [](const BoundStoreWriter& self, std::uint32_t id) { self.core().clear(id); }, "id"_a,
             "Makes an orphan of it: readable until its entry or space is wanted.")
        .def("take_back", [](const BoundStoreWriter& self, std::uint32_t id) { self.core().take_back(id); }, "id"_a,
             "It never was an object.")
        .def("blockers", &BoundStoreWriter::blockers, "id"_a, "references"_a, nb::sig(kBlockers),
             "(slot, reads that it owes, pins) of everybody who keeps the object.")
        .def("orphan_blockers", &BoundStoreWriter::orphan_blockers,
             nb::sig("def orphan_blockers(self) -> list[tuple[int, int, int]]"),
             "The same of orphans.");
    bind_end(writer);
}

}  // namespace memlane::bindings
