// Small programs whose outcomes under C++20 are known: they test the explorer itself.
#pragma once

namespace memlane::weak {

// Returns how many programs ran. Ends the process at the first whose outcomes are not those that are known.
int run_litmus_tests();

}  // namespace memlane::weak
