// A descriptor that is readable once names come to a folder, or leave it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "os/watch.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

inline void bind_folder_watch(nb::module_& m) {
    using namespace nb::literals;
    nb::class_<os::FolderWatch>(m, "FolderWatch", "Its descriptor is readable once a name has come to a folder, or left it.")
        .def(nb::init<const std::string&>(), "path"_a, "Raises SystemFault.")
        .def("fileno", &os::FolderWatch::descriptor);
}

}  // namespace memlane::bindings
