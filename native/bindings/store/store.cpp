// The object store for Python: ByteRingSegment (the ring), StoreWriter and StoreReader (the ends of a storage),
// ObjectIndex (the writer's index), ObjectMemory (what the serdes decode).
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/python/systems.hpp"
#include "bindings/store/object_index.hpp"
#include "bindings/store/object_memory.hpp"
#include "bindings/store/store_end.hpp"
#include "bindings/store/store_ring.hpp"
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
            "Pins the object; None unless that id is stored at the address.")
        .def("is_valid", &End::is_valid, "pinned"_a, "Whether everything read so far belonged to the object.")
        .def("finish_read", &End::finish_read, "pinned"_a, "counts"_a, "Ends a read; False if it was not valid.")
        .def("count", &End::count, "view"_a, "Counts a read of the object whose 4 count bytes are `view`.")
        .def("note_progress", &End::note_progress)
        .def("close", [](End& self) { self.finish(true); })
        .def("abandon", [](End& self) { self.finish(false); }, "Frees everything without notifying peers.")
        .def("check", &End::check, "Raises if this end is closed or the parent process's.")
        .def_prop_ro("is_closed", &End::is_closed)
        .def_prop_ro("secret", &End::secret, "32 random bytes that all ends of the storage share.")
        .def_prop_ro("slot", &End::slot)
        .def_prop_ro("ranks", &End::ranks)
        .def("participant", &End::participant, "slot"_a,
             nb::sig(kParticipant))
        .def("counters", &End::counters, nb::sig("def counters(self) -> tuple[int, int, int, int, int, int]"),
             "max_objects, puts, hits, evictions, objects, bytes.")
        .def("outstanding", &End::outstanding, "The number of outstanding reads of each reader.");
}

const char* const kBlockers = "def blockers(self, id: int, references: int) -> list[tuple[int, int, int]]";

}  // namespace

void bind_store(nb::module_& m) {
    nb::class_<ByteRingSegment, HeldSegment>(m, "ByteRingSegment", "The shared memory of a byte ring.")
        .def_static("create", &ByteRingSegment::create, "bytes"_a, "id"_a, "name"_a,
                    "Creates a segment and reserves its first piece; first sweeps dead segments.")
        .def_static("attach", &ByteRingSegment::attach, "bytes"_a, "name"_a)
        .def_static("attach_through", &ByteRingSegment::attach_through, "pid"_a, "descriptor"_a, "bytes"_a, "name"_a, "id"_a,
                    "The same, of a segment without a name, which that process has open.")
        .def_prop_ro("descriptor", &ByteRingSegment::descriptor, "The number of its descriptor in this process.")
        .def("check", &ByteRingSegment::check, "Raises if it is closed or the parent process's.")
        .def("view", &ByteRingSegment::view, "offset"_a, "bytes"_a,
             nb::sig("def view(self, offset: int, bytes: int) -> memoryview"))
        .def("read_header", &ByteRingSegment::read_header, "offset"_a,
             nb::sig("def read_header(self, offset: int) -> tuple[int, int]"),
             "Id and size of the allocation at `offset`; the size is 0 if there is none.")
        .def_prop_ro("addresses", &ByteRingSegment::addresses, nb::sig("def addresses(self) -> dict[int, int]"),
                     "The addresses of all allocations by id.")
        .def_prop_ro("count", [](const ByteRingSegment& self) { return self.allocations().all().size(); })
        .def_prop_ro("start", [](const ByteRingSegment& self) { return self.allocations().start(); })
        .def_prop_ro("end", [](const ByteRingSegment& self) { return self.allocations().end(); })
        .def_prop_ro("id_start", [](const ByteRingSegment& self) { return self.allocations().id_start(); })
        .def_prop_ro("id_end", [](const ByteRingSegment& self) { return self.allocations().id_end(); })
        .def("set_next_id", [](const ByteRingSegment& self, std::uint32_t id) { self.allocations().set_next_id(id); }, "id"_a,
             "Sets the next id; only on an empty ring.")
        .def("allocate", &ByteRingSegment::allocate, "bytes"_a,
             nb::sig("def allocate(self, bytes: int) -> tuple[int, int] | NoRoom"),
             "Reserves space for a new allocation of `bytes`, header included; returns its address and id.")
        .def("free", &ByteRingSegment::free_if, "most"_a, "is_free"_a,
             nb::sig("def free(self, most: int, is_free: collections.abc.Callable[[int, int, int], bool]) -> list[int]"),
             "Frees allocations, oldest first, while `is_free(id, offset, bytes)` of their data is true.")
        .def("clear", &ByteRingSegment::clear, "Removes all allocations.")
        .def("close", &ByteRingSegment::close)
        .def("abandon", &ByteRingSegment::abandon);

    nb::class_<NoRoom>(m, "NoRoom", "Why there is no room for an allocation.")
        .def(nb::init<bool>(), "is_obstructed"_a = false)
        .def_ro("is_obstructed", &NoRoom::is_obstructed, "Whether cleared data there is still being read.");

    nb::class_<PinnedObject>(m, "PinnedObject", "An object that is pinned while this or a buffer of it exists.")
        .def("data", &PinnedObject::data, nb::sig("def data(self) -> memoryview"), "Metadata and data, read-only.")
        .def("count", &PinnedObject::count, nb::sig("def count(self) -> memoryview"), "The 4 count bytes.")
        .def("lease", &PinnedObject::lease)
        .def("release", &PinnedObject::release);

    nb::class_<StoreReader> reader(m, "StoreReader", "A reader's end of a storage; holds slot 1 + place.");
    reader.def_static(
        "attach",
        [](const ByteRingSegment& ring, std::uint64_t n_readers, std::uint64_t max_object_size) {
            ring.check();
            const auto table = store::ObjectTable::find(*ring.segment(), ring.ring_bytes(), n_readers, max_object_size);
            return new StoreReader(store::StoreReader::join(*ring.segment(), table));
        },
        "ring"_a, "n_readers"_a, "max_object_size"_a, "Takes the next free place.");
    bind_end(reader);

    nb::class_<StoreWriter> writer(m, "StoreWriter", "The writer's end of a storage; holds slot 0.");
    writer.def_static(
              "create",
              [](const ByteRingSegment& ring, std::uint64_t n_readers, std::uint64_t max_objects, std::uint64_t max_object_size,
                 const nb::bytes& secret, bool unlink_when_complete) {
                  ring.check();
                  const store::StoreGeometry g{n_readers, max_objects, max_object_size};
                  return new StoreWriter(
                      store::StoreWriter::create(*ring.segment(), ring.ring_bytes(), g, to_array<store::Secret>(secret), unlink_when_complete));
              },
              "ring"_a, "n_readers"_a, "max_objects"_a, "max_object_size"_a, "secret"_a,
              "unlink_when_complete"_a, "Adds an object table to the ring's file.")
        .def("is_read", &StoreWriter::is_read, "id"_a, "view"_a, "references"_a,
             "Whether every reader has read the object with these count bytes that often.")
        .def("blockers", &StoreWriter::blockers, "id"_a, "references"_a, nb::sig(kBlockers),
             "(slot, outstanding reads, pins) of each participant that keeps the object.")
        .def("orphan_blockers", &StoreWriter::orphan_blockers,
             nb::sig("def orphan_blockers(self) -> list[tuple[int, int, int]]"),
             "The same for orphans.");
    bind_end(writer);

    static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(ObjectIndex::traverse)}, {0, nullptr}};
    nb::class_<Reservation>(m, "Reservation", "A `with` block on space for an object; without publish(), nothing is stored.")
        .def_prop_ro("id", &Reservation::id)
        .def("view", &Reservation::view, nb::sig("def view(self) -> memoryview"), "Its count bytes, metadata and data.")
        .def("offer", &Reservation::offer, "Makes what was written an object, still without a reference.")
        .def("publish", &Reservation::publish, "key"_a.none(), nb::sig("def publish(self, key: object) -> tuple[int, int]"),
             "Publishes the object under `key`; returns its address and id.")
        .def("__enter__", [](nb::handle self) { return nb::borrow(self); }, nb::sig("def __enter__(self) -> Reservation"))
        .def("__exit__", [](Reservation& self, nb::handle, nb::handle, nb::handle) { self.drop(); }, "kind"_a.none(),
             "error"_a.none(), "traceback"_a.none());

    nb::class_<ObjectIndex>(m, "ObjectIndex", nb::type_slots(slots), "What a storage's writer tracks beside the table.")
        .def(nb::init<const ByteRingSegment&, const StoreWriter&, nb::dict, nb::dict, nb::dict, nb::set>(), "ring"_a, "end"_a,
             "keys"_a, "ids"_a, "references"_a, "touched"_a,
             nb::sig("def __init__(self, ring: ByteRingSegment, end: StoreWriter, keys: dict[typing.Any, tuple[int, int]], "
                     "ids: dict[int, typing.Any], references: dict[int, int], touched: set[int]) -> None"),
             "Keeps these up to date: key -> (address, id), id -> key, id -> references, touched ids.")
        .def("put", &ObjectIndex::put, "key"_a.none(), "metadata"_a.none(), "metadata_bytes"_a, "parts"_a, "bytes"_a,
             "is_free"_a.none(),
             nb::sig("def put(self, key: object, metadata: object, metadata_bytes: int, parts: object, bytes: int, "
                     "is_free: collections.abc.Callable[[int, int, int], bool] | None) -> tuple[int, int] | NoRoom"),
             "Stores an object with one reference, evicting the oldest if needed. Returns (address, id).")
        .def("reserve", &ObjectIndex::reserve, "size"_a, "is_free"_a.none(),
             nb::sig("def reserve(self, size: int, is_free: collections.abc.Callable[[int, int, int], bool] | None) "
                     "-> Reservation | NoRoom"),
             "Reserves space for an object, to be filled step by step.")
        .def("refer", &ObjectIndex::refer, "id"_a, "references"_a, "Sets how often every reader is to read the object.")
        .def("drop_reference", &ObjectIndex::drop_reference, "id"_a, "left"_a,
             "Drops a reference; changes nothing and returns False if a reader has already read it.")
        .def("free", &ObjectIndex::free, "is_free"_a.none(),
             nb::sig("def free(self, is_free: collections.abc.Callable[[int, int, int], bool] | None) -> list[int]"),
             "Evicts up to 2 x max_object_size bytes of what the table or `is_free` releases.");

    nb::class_<ObjectMemory>(m, "ObjectMemory", "The bytes of a stored object, read piece by piece.")
        .def(nb::init<nb::handle, bool, bool>(), "shown"_a, "is_view"_a, "allows_pickle"_a,
             nb::sig("def __init__(self, shown: object, is_view: bool, allows_pickle: bool) -> None"),
             "The memory of `shown`, also after its release. With `is_view` pieces stay in place.")
        .def("tree", &ObjectMemory::tree, "A copy of the tree.")
        .def("take_array", &ObjectMemory::array, "itemsize"_a, "shape"_a.none(), "is_writable"_a,
             "The next piece, for an array. CorruptMessage if it is larger than the rest.")
        .def("take_bytes", &ObjectMemory::bytes, "length"_a.none(), nb::sig("def take_bytes(self, length: object) -> bytes | memoryview"))
        .def("take_bytearray", &ObjectMemory::byte_array, "length"_a.none(), nb::sig("def take_bytearray(self, length: object) -> bytearray"))
        .def("take_copy", &ObjectMemory::copy, "length"_a.none(), nb::sig("def take_copy(self, length: object) -> bytearray | Buffer"),
             "A writable copy of the next piece.")
        .def("release", &ObjectMemory::release, "Ends reading; pieces that were taken stay valid.")
        .def_prop_ro("allows_pickle", &ObjectMemory::allows_pickle, "As given to the constructor, for decoders.")
        .def_prop_rw("is_in_place", &ObjectMemory::is_in_place, &ObjectMemory::set_in_place, "Whether pieces stay in place.");
}

}  // namespace memlane::bindings
