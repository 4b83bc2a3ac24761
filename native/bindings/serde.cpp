// Memory for the serdes: an array's bytes in place, for encoding and for decoding, and private copies.
#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "bindings/object_memory.hpp"
#include "bindings/systems.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

nb::object bytes_at(nb::object owner, std::uintptr_t address, std::size_t bytes) {
    return view_of(foreign_memory(std::move(owner), reinterpret_cast<void*>(address), bytes));
}

}  // namespace

void bind_serde(nb::module_& m) {
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
        .def_prop_rw("lies", &ObjectMemory::lies, &ObjectMemory::set_lies, "Whether pieces stay in place.");

    m.def("bytes_at", &bytes_at, "owner"_a, "address"_a, "nbytes"_a,
          nb::sig("def bytes_at(owner: object, address: int, nbytes: int) -> memoryview"),
          "A read-only view of memory that `owner` keeps alive.");
}

}  // namespace memlane::bindings
