#pragma once

#include <nanobind/nanobind.h>

namespace memlane::bindings {

void bind_store(nanobind::module_& m);

}  // namespace memlane::bindings
