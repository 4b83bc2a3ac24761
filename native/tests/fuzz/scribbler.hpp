// The peer of a fuzz target: it writes into shared memory at any moment, as the input says.
//
// The input is a sequence of 16-byte records (offset, size, meaning):
//
//   0   2   after how many basic blocks of the target; 0: before the first
//   2   1   which region
//   3   1   width: 1, 2, 4 or 8 bytes
//   4   4   where in the region, modulo its length
//   8   8   the value
//
// So an interleaving of the two processes is part of the input: it can be repeated, mutated and saved.
#pragma once

#include <algorithm>
#include <cstring>
#include <span>
#include <vector>

#include "fuzz/engine.hpp"

namespace memlane::fuzz {

struct Scribble {
    std::uint16_t after;
    std::uint8_t region;
    std::uint8_t width;
    std::uint32_t offset;
    std::uint64_t value;
};
static_assert(sizeof(Scribble) == 16);

class Scribbler {
public:
    explicit Scribbler(Input input) : scribbles_(input.size() / sizeof(Scribble)) {
        if (!scribbles_.empty()) std::memcpy(scribbles_.data(), input.data(), scribbles_.size() * sizeof(Scribble));
        std::stable_sort(scribbles_.begin(), scribbles_.end(),
                         [](const Scribble& a, const Scribble& b) { return a.after < b.after; });
    }
    Scribbler(const Scribbler&) = delete;
    Scribbler& operator=(const Scribbler&) = delete;
    ~Scribbler() { strike_no_more(); }

    void add_region(std::byte* base, std::size_t bytes) { regions_.push_back({base, bytes}); }

    // From here on, the peer interrupts the target.
    void begin() {
        active_ = this;
        now_ = 0;
        write_what_is_due();
    }

private:
    static void strike() { active_->write_what_is_due(); }

    void write_what_is_due() {
        for (; next_ < scribbles_.size() && scribbles_[next_].after <= now_; ++next_) write(scribbles_[next_]);
        if (next_ == scribbles_.size()) return;
        const std::uint16_t then = scribbles_[next_].after;
        strike_after(static_cast<std::uint64_t>(then - now_), strike);
        now_ = then;
    }

    void write(const Scribble& s) const {
        const auto region = regions_[s.region % regions_.size()];
        const std::size_t width = std::min(std::size_t{1} << s.width % 4, region.size());
        const std::size_t at = s.offset % (region.size() - width + 1);
        std::memcpy(region.data() + at, &s.value, width);
    }

    static inline Scribbler* active_ = nullptr;
    std::vector<Scribble> scribbles_;
    std::vector<std::span<std::byte>> regions_;
    std::size_t next_ = 0;
    std::uint16_t now_ = 0;
};

}  // namespace memlane::fuzz
