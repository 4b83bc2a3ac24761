// The scenarios that the explorer runs: the ends of a ring and the header of a segment, as they ship.
#pragma once

#include <vector>

#include "explorer.hpp"

namespace memlane::weak {

std::vector<Scenario> small_scenarios();
std::vector<Scenario> large_scenarios();

}  // namespace memlane::weak
