// What a tier risks after its medium has refused a write. Pure: takes the time; the slots themselves are the pool's.
//
//   a slot that was refused       is retired: others are used instead
//   a read that was refused       retires a slot as well; all are back once a trial succeeds, so its first trial is later each time
//   a trial                       one retired slot is used again, after a second, then two, four, up to a minute
//   a trial that succeeds         brings back all retired slots
//   a medium that refuses all     costs at most kCredit blocks, then one in kVictims trials: what is evicted for a store that is
//                                 refused is lost
#pragma once

#include <algorithm>
#include <cstdint>

#include "os/clock.hpp"

namespace memlane::tiers {

class Refusals {
public:
    // More writes have been refused than have succeeded, by so many that nothing is evicted for another.
    bool is_distrusted() const noexcept { return credit_ == 0; }

    void succeeded(bool was_retired) noexcept {
        credit_ = std::min(credit_ + 1, kCredit);
        if (!was_retired) return;
        wait_ = kShortest;
        next_ = kNever;
    }
    // True: from this one on the medium is distrusted.
    bool refused(bool was_retired, os::Nanoseconds now) noexcept {
        if (was_retired) wait_ = std::min(2 * wait_, kLongest);
        if (next_ == kNever || was_retired) next_ = now + wait_;
        return credit_ > 0 && --credit_ == 0;
    }

    // A slot was retired because of a read, which costs no trust in writes.
    void read_refused(os::Nanoseconds now) noexcept {
        if (next_ != kNever) return;
        next_ = now + read_wait_;
        read_wait_ = std::min(2 * read_wait_, kLongest);
    }

    enum class Trial : std::uint8_t { none, retired, victim };
    // What to try besides, in a store now. Call it only if it will be tried.
    Trial next(os::Nanoseconds now) noexcept {
        if (now < next_) return Trial::none;
        next_ = now + wait_;
        return is_distrusted() && ++trials_ % kVictims == 0 ? Trial::victim : Trial::retired;
    }

private:
    static constexpr std::uint32_t kCredit = 64;
    static constexpr std::uint32_t kVictims = 4;
    static constexpr os::Nanoseconds kShortest = os::kSecond, kLongest = 60 * os::kSecond;
    static constexpr os::Nanoseconds kNever = INT64_MAX;

    std::uint32_t credit_ = kCredit;
    std::uint32_t trials_ = 0;
    os::Nanoseconds wait_ = kShortest;
    os::Nanoseconds read_wait_ = kShortest;  // until the first trial after the next read that is refused
    os::Nanoseconds next_ = kNever;  // trial
};

}  // namespace memlane::tiers
