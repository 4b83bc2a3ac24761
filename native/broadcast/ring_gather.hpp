// One thread that reads from several rings, and waits for all of them by one sleep.
//
// A look at a ring is two loads; a sleep parks in every ring and is one system call (futex_waitv), whichever writer wakes.
// Why no wake-up is lost: as in wait.hpp, for each ring.
#pragma once

#include <list>
#include <optional>
#include <utility>
#include <vector>

#include "broadcast/ring_reader.hpp"
#include "core/status.hpp"
#include "core/wait.hpp"
#include "os/futex.hpp"

namespace memlane::broadcast {

class RingGather {
public:
    // True if so many rings can be waited for here.
    static bool can_wait_for(std::size_t count) noexcept { return count <= os::kMostFutexes && os::has_futex_waitv(); }

    explicit RingGather(std::size_t rings) : spinner_(1 + rings, os::usable_cores()) {}

    // Waits until a message or an end of one of them is there; the first in turn. `readers` may have gaps (null), whose numbers
    // are kept. Calls `look(reason)` without any lock held.
    template <class Look>
    core::Taken<std::size_t> next(const std::vector<RingReader*>& readers, os::Deadline deadline, Look&& look,
                                  os::Nanoseconds longest) {
        if (const auto found = find(readers)) return *found;
        std::optional<std::size_t> found;
        const core::WaitResult result = core::wait_asleep(
            Sleep(readers), spinner_, deadline, [&] { return (found = find(readers)).has_value(); },
            [&](core::LookReason reason) {
                const os::Nanoseconds now = os::monotonic_now();
                if (!deadline.is_poll() || now - last_look_ >= core::kPollInterval) {
                    last_look_ = now;
                    for (RingReader* reader : readers)
                        if (reader != nullptr && reader->look()) return true;
                }
                return look(reason);
            },
            [&] { return any_may_be_silent(readers) ? core::kSlice : longest; });
        if (found || (found = find(readers))) return *found;
        return {result == core::WaitResult::timed_out ? core::Status::timed_out : core::Status::interrupted};
    }

    // Looks for deaths now and then, also while others keep the reader busy.
    void look_in_passing(const std::vector<RingReader*>& readers) {
        const os::Nanoseconds now = os::tick_now();
        if (now - last_look_ < kLookInterval) return;
        last_look_ = now;
        for (RingReader* reader : readers)
            if (reader != nullptr) reader->look();
    }

    // The first in turn that is ready.
    std::optional<std::size_t> find(const std::vector<RingReader*>& readers) noexcept {
        for (std::size_t i = 0; i < readers.size(); ++i) {
            const std::size_t at = (turn_ + i) % readers.size();
            if (readers[at] == nullptr || !readers[at]->is_ready()) continue;
            turn_ = at + 1;
            return at;
        }
        return std::nullopt;
    }

    void turn_to(std::size_t at) noexcept { turn_ = at; }

private:
    static constexpr os::Nanoseconds kLookInterval = 250 * os::kMillisecond;

    // Shown to observers in every ring, and counted as a wait in the first.
    class Sleep {
    public:
        explicit Sleep(const std::vector<RingReader*>& readers) : readers_(readers), asleep_(points_of(readers)) {}

        void park() {
            if (shown_.empty())
                for (const RingReader* reader : readers_)
                    if (reader != nullptr)
                        shown_.emplace_back(reader->participants().slot(reader->slot()), core::SlotActivity::waiting, shown_.empty());
            asleep_.park();
        }
        bool sleep(os::Nanoseconds until) const noexcept { return asleep_.sleep(until); }
        void unpark() const noexcept { asleep_.unpark(); }
        bool take_alarm() const noexcept { return asleep_.take_alarm(); }

    private:
        static std::vector<core::WaitPoint> points_of(const std::vector<RingReader*>& readers) {
            std::vector<core::WaitPoint> points;
            for (RingReader* reader : readers)
                if (reader != nullptr) points.push_back(reader->wait_point());
            return points;
        }

        const std::vector<RingReader*>& readers_;
        core::SleepAtAll asleep_;
        std::list<core::Waiting> shown_;
    };

    static bool any_may_be_silent(const std::vector<RingReader*>& readers) noexcept {
        for (const RingReader* reader : readers)
            if (reader != nullptr && reader->may_be_silent()) return true;
        return false;
    }

    core::Spinner spinner_;
    std::size_t turn_ = 0;
    os::Nanoseconds last_look_ = 0;
};

}  // namespace memlane::broadcast
