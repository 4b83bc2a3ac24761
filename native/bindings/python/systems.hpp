// What each source file of the other folders of native/bindings does for memlane._native.
#pragma once

#include <nanobind/nanobind.h>

namespace memlane::bindings {

// Before anything is registered: an import that fails there can be repeated.
void install_fork_handlers();

void bind_messages(nanobind::module_& m);
void bind_ends(nanobind::module_& m);
void bind_broadcast(nanobind::module_& m);
void bind_store(nanobind::module_& m);
void bind_offload(nanobind::module_& m);
void bind_copy_blocks(nanobind::module_& m);
void bind_tiers(nanobind::module_& m);
void bind_disk(nanobind::module_& m);
void bind_remote_tiers(nanobind::module_& m);

}  // namespace memlane::bindings
