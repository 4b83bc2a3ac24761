// One bind function for each part of memlane._native.
#pragma once

#include <nanobind/nanobind.h>

namespace memlane::bindings {

void bind_broadcast(nanobind::module_& m);
void bind_store(nanobind::module_& m);
void bind_offload(nanobind::module_& m);
void bind_copy_blocks(nanobind::module_& m);

}  // namespace memlane::bindings
