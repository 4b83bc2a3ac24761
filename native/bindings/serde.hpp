// What the object store's serdes need of raw memory.
#pragma once

#include <nanobind/nanobind.h>

namespace memlane::bindings {

void bind_serde(nanobind::module_& m);

}  // namespace memlane::bindings
