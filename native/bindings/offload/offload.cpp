// The offload region for Python: RegionFile (its life), Population (its start-up), and the views of its memory.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bindings/offload/region_views.hpp"
#include "bindings/python/gil.hpp"
#include "bindings/python/systems.hpp"
#include "offload/population.hpp"
#include "offload/region_file.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using namespace nb::literals;
using offload::Cells;
using offload::Pages;
using offload::Population;
using offload::RegionFile;

namespace {

// Python handles signals and deadlines after each slice.
constexpr os::Nanoseconds kSlice = 100 * os::kMillisecond;

os::Nanoseconds slice_of(double seconds) noexcept {
    return std::clamp<os::Nanoseconds>(static_cast<os::Nanoseconds>(seconds * 1e9), 0, kSlice);
}

std::shared_ptr<RegionFile> new_region(const nb::bytes& directory, const std::string& name, std::uint64_t total_bytes,
                                       std::uint64_t blocks, std::uint64_t row_bytes, std::uint64_t cell_bytes,
                                       const std::string& label) {
    return std::make_shared<RegionFile>(std::string(directory.c_str(), directory.size()), name,
                                        offload::RegionGeometry{total_bytes, blocks, row_bytes, cell_bytes}, label);
}

// A signal handler, or `progress`, may fork in the middle of a start, which remains the parent's.
void require_own(bool is_own) {
    if (!is_own)
        raise_error(Error::WrongProcess, "this process was forked while a region started: the region belongs to its parent");
}

// In the order of the enums.
constexpr const char* kEntries[] = {"waiting", "foreign", "created", "joined"};
constexpr const char* kSpaces[] = {"waiting", "complete", "build"};
constexpr const char* kNamings[] = {"waiting", "kept", "removed"};
constexpr const char* kProgress[] = {"working", "reserved", "done"};

// Makes one step of a start; returns the name of its result.
template <class Self, class Result, class... Args>
const char* step(Self& self, Result (Self::*method)(Args...), const char* const* names, std::type_identity_t<Args>... args) {
    require_own(self.is_own());
    const WithoutGil no_gil;
    return names[static_cast<int>((self.*method)(args...))];
}

void publish(RegionFile& self, std::uint64_t huge_pages) {
    require_own(self.is_own());
    const WithoutGil no_gil;
    self.publish(huge_pages);
}

void map(RegionFile& self, bool in_huge_pages) {
    require_own(self.is_own());
    const WithoutGil no_gil;
    self.map();
    self.mapping()->advise_huge_pages(in_huge_pages);
}

// Another thread may have cleaned up a moment ago.
const std::shared_ptr<os::Mapping>& mapping_of(const RegionFile& self) {
    if (!self.mapping()) raise_error(Error::Closed, nb::str("the region {} was cleaned up").attr("format")(text_of(self.path())));
    return self.mapping();
}

nb::tuple leave(RegionFile& self, double patience) {
    std::shared_ptr<os::Mapping> mapping = self.take_mapping();  // before releasing the GIL: views are made under it
    const offload::Departure departure = [&] {
        const WithoutGil no_gil;
        offload::Departure told = self.leave(static_cast<os::Nanoseconds>(patience * 1e9));
        mapping.reset();
        return told;
    }();
    return nb::make_tuple(departure.removed_name, text_of(departure.problem));
}

std::shared_ptr<Population> populate(const std::shared_ptr<RegionFile>& region, std::uint64_t offset, std::uint64_t bytes,
                                     std::uint64_t stride, std::uint64_t count, bool is_builder, const std::string& pages,
                                     unsigned threads) {
    require_own(region->is_own());
    const Pages kind = pages == "huge" ? Pages::huge : pages == "auto" ? Pages::huge_if_they_pay : Pages::small;
    const WithoutGil no_gil;
    return {new Population(region, Cells::of(offset, bytes, stride, count), is_builder, kind, threads), [](Population* made) {
                if (made->is_own()) delete made;
            }};
}

}  // namespace

void bind_offload(nb::module_& m) {
    static PyType_Slot map_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(RegionMap::get_buffer)}, {0, nullptr}};
    nb::class_<RegionMap>(m, "RegionMap", nb::type_slots(map_slots), "All bytes of a region, like mmap.mmap.")
        .def_prop_ro("closed", &RegionMap::is_closed)
        .def("close", &RegionMap::close, "Existing views stay valid: they keep the memory mapped.")
        .def("size", &RegionMap::size)
        .def("__len__", &RegionMap::size)
        .def("__getitem__", &RegionMap::get, "key"_a, nb::sig("def __getitem__(self, key: int | slice) -> int | bytes"))
        .def("__setitem__", &RegionMap::set, "key"_a, "value"_a,
             nb::sig("def __setitem__(self, key: int | slice, value: int | bytes | bytearray | memoryview) -> None"));

    static PyType_Slot row_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(RegionRows::get_buffer)}, {0, nullptr}};
    nb::class_<RegionRows>(m, "RegionRows", nb::type_slots(row_slots),
                           "A region by blocks: `rows[b]` is a writable memoryview of one row; memoryview(rows) is 2-D.")
        .def_prop_ro("shape", &RegionRows::shape, nb::sig("def shape(self) -> tuple[int, int]"))
        .def_prop_ro("nbytes", &RegionRows::nbytes)
        .def("__len__", &RegionRows::size)
        .def("__getitem__", &RegionRows::row, "block"_a, nb::sig("def __getitem__(self, block: int) -> memoryview"));

    nb::class_<RegionFile>(m, "RegionFile", "The file of a region, and this holder's place in it.")
        .def(nb::new_(&new_region), "directory"_a, "name"_a, "total_bytes"_a, "blocks"_a, "row_bytes"_a, "cell_bytes"_a,
             "label"_a = "")
        .def("enter", [](RegionFile& self, double seconds) { return step(self, &RegionFile::enter, kEntries, slice_of(seconds)); },
             "seconds"_a, "One try to create or join it: 'created', 'joined', 'waiting' or 'foreign'.")
        .def("await_space", [](RegionFile& self, double seconds) { return step(self, &RegionFile::await_space, kSpaces, slice_of(seconds)); },
             "seconds"_a, "'complete', 'build' (up to the caller) or 'waiting'.")
        .def("publish", &publish, "huge_pages"_a, "Announces that all space is reserved, in so many huge pages.")
        .def("map", &map, "in_huge_pages"_a)
        .def("mark_mapped",
             [](RegionFile& self, std::uint64_t participants, double seconds) {
                 return step(self, &RegionFile::mark_mapped, kNamings, participants, slice_of(seconds));
             },
             "participants"_a, "seconds"_a, "Removes the name once `participants` have mapped the file: 'removed', 'kept' or 'waiting'.")
        .def("leave", &leave, "patience"_a, nb::sig("def leave(self, patience: float) -> tuple[bool, str]"),
             "Frees everything. Returns whether the name was removed, and a description of any problem.")
        .def("region_map", [](const RegionFile& self) { return RegionMap(mapping_of(self)); })
        .def("rows", [](const RegionFile& self) {
                 return RegionRows(mapping_of(self), self.geometry().blocks, self.geometry().row_bytes);
             })
        .def("memory", [](const RegionFile& self) {
                 const auto& mapping = mapping_of(self);
                 return shared_view(mapping, 0, mapping->bytes());
             }, nb::sig("def memory(self) -> memoryview"))
        .def_prop_ro("address", [](const RegionFile& self) { return reinterpret_cast<std::uintptr_t>(mapping_of(self)->base()); })
        .def_prop_ro("fd", [](const RegionFile& self) { return self.file().get(); })
        .def_prop_ro("allocated", [](const RegionFile& self) { return os::facts_of(self.file()).allocated; },
                     "Bytes whose space is allocated.")
        .def_prop_ro("free", [](const RegionFile& self) { return os::free_bytes(self.file()); },
                     "Free bytes of its file system.")
        .def_prop_ro("label", [](const RegionFile& self) { return text_of(self.label()); }, nb::sig("def label(self) -> str"),
                     "What people call the region, once it is entered, or empty.")
        .def_prop_ro("huge_pages", &RegionFile::huge_pages, "Of the whole region, once its space is complete.")
        .def_prop_ro("builder", &RegionFile::builder, "The pid of the process that reserves the space, or 0.")
        .def_prop_ro("is_own", &RegionFile::is_own);

    nb::class_<Population>(m, "Population", "Threads that reserve and populate pages; they end with this object.")
        .def(nb::new_(&populate), "region"_a, "offset"_a, "bytes"_a, "stride"_a, "count"_a, "is_builder"_a,
             "pages"_a, "threads"_a)
        .def("wait", [](Population& self, double seconds) { return step(self, &Population::wait, kProgress, slice_of(seconds)); },
             "seconds"_a, "'reserved' (once), 'done' or 'working'; raises a thread's error.")
        .def("stop", [](Population& self) { const WithoutGil no_gil; self.stop(); })
        .def_prop_ro("done", &Population::done)
        .def_prop_ro("bytes", &Population::bytes)
        .def_prop_ro("huge_pages", &Population::huge_pages, "Those that were made here.")
        .def_prop_ro("was_touched", &Population::was_touched);

    m.def("await_bytes", [](int fd, std::uint64_t bytes, double seconds) {
              const WithoutGil no_gil;
              const os::FileWatch watch(fd);
              if (os::bytes_of(fd) >= bytes) return true;
              watch.wait(slice_of(seconds));
              return os::bytes_of(fd) >= bytes;
          }, "fd"_a, "bytes"_a, "seconds"_a, "Waits until the file has that many bytes; False on timeout.");
    m.def("usable_cores", &os::usable_cores);
}

}  // namespace memlane::bindings
