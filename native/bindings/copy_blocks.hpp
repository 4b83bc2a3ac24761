// Moving blocks between arrays, within this host or to and from a GPU.
#pragma once

#include <nanobind/nanobind.h>

namespace memlane::bindings {

void bind_copy_blocks(nanobind::module_& m);

}  // namespace memlane::bindings
