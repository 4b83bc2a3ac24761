// What the ends of all systems show to Python: HeldSegment, Sightings.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "bindings/ends/held_segment.hpp"
#include "bindings/ends/participant.hpp"
#include "bindings/python/systems.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

void bind_ends(nb::module_& m) {
    nb::class_<HeldSegment>(m, "HeldSegment", "A segment that this process holds.")
        .def_prop_ro("name", [](const HeldSegment& self) { return self.segment()->name(); })
        .def_prop_ro("size", [](const HeldSegment& self) { return self.segment()->bytes(); })
        .def_prop_rw("label", &HeldSegment::label, &HeldSegment::set_label, "What people call it, or an empty string.")
        .def_prop_ro("is_open", [](const HeldSegment& self) { return self.segment()->is_open(); });

    nb::class_<Sightings>(m, "Sightings", "A snapshot of peers.")
        .def("participants", &Sightings::participants,
             nb::sig("def participants(self) -> dict[int, tuple[str, bytes, int]]"),
             "By slot, as `participant` returns them.");
}

}  // namespace memlane::bindings
