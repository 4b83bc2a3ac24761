// How an end of a ring leaves its segment. Memory that no surviving array or view needs is freed at once, the rest with the
// last of them.
#pragma once

#include <memory>

#include "broadcast/left_file.hpp"
#include "core/segment.hpp"

namespace memlane::bindings {

template <class Core>
void leave_ring(std::shared_ptr<Core> core, core::Segment& segment) {
    core->ignore_deaths();
    if (segment.is_own()) {
        core->mark_survivors();
        core->keep_file();
    }
    segment.abandon([&] { core->give_back_file(); });
    core->note_file();
    core.reset();
    broadcast::look_at_left_files();
}

}  // namespace memlane::bindings
