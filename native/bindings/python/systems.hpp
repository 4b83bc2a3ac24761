// One function for each source file of the other folders of native/bindings, which registers its part of memlane._native.
#pragma once

#include <nanobind/nanobind.h>

namespace memlane::bindings {

void bind_messages(nanobind::module_& m);
void bind_ends(nanobind::module_& m);
void bind_broadcast(nanobind::module_& m);
void bind_store(nanobind::module_& m);
void bind_offload(nanobind::module_& m);
void bind_copy_blocks(nanobind::module_& m);

}  // namespace memlane::bindings
