// Small programs whose outcomes under C++20 are known. They test the explorer itself.
#pragma once

namespace memlane::weak {

// Returns how many programs ran. Ends the process at the first one whose outcomes differ from the known ones.
int run_litmus_tests();

}  // namespace memlane::weak
