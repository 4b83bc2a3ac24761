// Whether huge pages pay. Making one costs a third of what the same bytes cost in small pages, as long as there is a free
// one. In fragmented memory the kernel moves others' pages first, which costs more than it gives.
#pragma once

#include <cstdint>

#include "os/clock.hpp"
#include "os/mapping.hpp"

namespace memlane::offload {

enum class Pages { small, huge_if_they_pay, huge };

// Pure. Each huge page earns what its bytes cost in small pages, and each attempt spends what it took; once the sum is
// below zero by 2 % of what all cost in small pages, the rest is made of those.
class HugePageAccount {
public:
    // `small_page_cost`: processor time of so many bytes in small pages, in nanoseconds.
    HugePageAccount(os::Nanoseconds small_page_cost, std::uint64_t region_bytes) noexcept
        : earned_each_(small_page_cost), floor_(-small_page_cost * static_cast<std::int64_t>(region_bytes / os::kHugePage) / 50) {}

    void note(os::Nanoseconds took, bool is_made) noexcept { sum_ += (is_made ? earned_each_ : 0) - took; }
    bool pays() const noexcept { return sum_ >= floor_; }

private:
    os::Nanoseconds earned_each_;
    os::Nanoseconds floor_;
    os::Nanoseconds sum_ = 0;
};

}  // namespace memlane::offload
