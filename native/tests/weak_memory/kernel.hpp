// How a scenario configures the kernel that it runs on (kernel.cpp).
#pragma once

#include <cstddef>

#include "explorer.hpp"

namespace memlane::weak {

void restart_clock();
// The number that sched_getaffinity reports. If it is below the participants, the wait loop yields before it sleeps.
void set_cores(unsigned count);
// Where the file that pread reads is mapped.
void map_files_at(const std::byte* base);

}  // namespace memlane::weak
