#pragma once

#include <nanobind/nanobind.h>

namespace memlane::bindings {

void bind_offload(nanobind::module_& m);

}  // namespace memlane::bindings
