// Descriptors for select, epoll and asyncio that say when a call on an end would not wait, and the threads behind them.
//
// A thread sleeps for up to 127 ends at a time, on all their words. An end that is watched is in one of three states:
//
//   calling    its owner is in a call, which may park and sleep by itself
//   armed      not ready: it is parked, and the thread sleeps on its word, too
//   readable   the thread or the owner has seen that it is ready, or that its peer is dead
//
//   pause(): any -> calling     resume(): calling -> armed or readable     the thread: armed <-> readable
//
// Why no wake-up is lost: as in wait.hpp, with one difference. The owner parks, and the thread sleeps, perhaps since before
// that. Whoever wakes increments the word and wakes all its sleepers, so the thread is either asleep on the value that the
// word has, or is woken, or does not fall asleep. Each time it wakes it parks all armed ends anew, after it has loaded
// their words: that also makes up for a waker's late clearing of `parked`.
//
// Cost, of an end that is watched: a lock, a fence and two loads for each call; a write and a read of an eventfd where the
// end has become readable and quiet again. Idle: each thread looks at its ends twice a second, with a system call for each.
// A death wakes it earlier (deaths.hpp).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/sync.hpp"
#include "core/wait.hpp"
#include "os/clock.hpp"
#include "os/event.hpp"
#include "os/fork.hpp"
#include "os/futex.hpp"
#include "os/threads.hpp"

namespace memlane::core {

// An end that can be watched. The calls come with the lane's lock held, and while its owner is in no call.
class Watched {
public:
    // Both words stay where they are while the end is watched.
    virtual WaitPoint wait_point() noexcept = 0;
    // True if a call would not wait, as far as somebody tells that.
    virtual bool is_ready() noexcept = 0;
    // True if a call would not wait for another reason, such as a death. May make system calls.
    virtual bool look() = 0;
    // True if it must be looked at every 0.1 s, because nobody may tell that it is ready.
    virtual bool may_be_silent() const noexcept = 0;

protected:
    ~Watched() = default;
};

class Watch;

// The ends that share a thread.
class Lane : public std::enable_shared_from_this<Lane> {
public:
    explicit Lane(std::size_t most) noexcept : most_(most) {}

    // False if there is no room. Throws system_error if the system has no more threads.
    bool add(Watch& watch);
    // With the lock held.
    void remove(Watch& watch) noexcept;
    std::mutex& mutex() noexcept { return mutex_; }

private:
    static constexpr os::Nanoseconds kLookInterval = 500 * os::kMillisecond;

    // What the thread sleeps on; it is its own, because others change `watches_` meanwhile.
    struct Words {
        std::array<os::FutexWaiter, os::kMostFutexes> all;
        std::size_t count = 0;
        void add(std::uint32_t* word) noexcept { all[count++] = {load_acquire(*word), word}; }
    };

    void run() noexcept;
    // The words as they are; parks what is armed.
    Words park_all() noexcept;
    // True if any end has changed so that it must be parked anew.
    bool look_at_all(bool is_due) noexcept;
    struct Intervals {
        os::Nanoseconds look, wake;
    };
    Intervals intervals() const noexcept;
    void sleep(const Words& words, os::Nanoseconds until) const noexcept;

    const std::size_t most_;
    std::mutex mutex_;
    std::vector<Watch*> watches_;
    std::uint32_t changes_ = 0;
    bool has_thread_ = false;
};

class Watch {
public:
    // Begins as `calling`. Throws system_error.
    explicit Watch(Watched& end);
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    ~Watch() { leave(); }

    int fd() const noexcept { return event_.file().get(); }

    void pause() noexcept {
        if (!is_here()) return;
        const std::lock_guard guard(lane_->mutex());
        if (state_ == State::armed) unpark();
        state_ = State::calling;
    }

    // `is_ready`: it is, whatever the end says.
    void resume(bool is_ready = false) noexcept {
        if (!is_here() || end_ == nullptr) return;
        end_->wait_point().follow();  // without the lock: it takes that of forks, and a fork's that of lanes
        const std::lock_guard guard(lane_->mutex());
        if (end_ == nullptr) return;
        is_ready_anyway_ = is_ready;
        if (is_ready || end_->is_ready()) return show();
        hide();
        state_ = State::armed;
        park();
        full_fence();
        if (end_->is_ready() || (end_->wait_point().take_alarm() && finds())) show();
    }

    // True if the descriptor is readable by now. Makes a system call if it may be so no more.
    bool is_readable() noexcept {
        if (!is_here()) return true;
        const std::lock_guard guard(lane_->mutex());
        if (end_ != nullptr && look(false)) {
            park();
            full_fence();
            if (end_->is_ready()) show();
        }
        return is_shown_;
    }

    // The end is no more: readable for ever. Nobody calls it any more.
    void leave() noexcept {
        if (end_ == nullptr) return;
        if (!is_here()) {
            end_ = nullptr;
            new std::shared_ptr<Lane>(std::move(lane_));
            return;
        }
        const std::lock_guard guard(lane_->mutex());
        lane_->remove(*this);
        show();
        end_ = nullptr;
    }

private:
    friend class Lane;
    enum class State : std::uint8_t { calling, armed, readable };

    // False in a child: a thread of its parent's may have had the lock.
    bool is_here() const noexcept { return generation_ == os::fork_generation().load(std::memory_order_relaxed); }

    void park() const noexcept {
        SYNC_STORE(park);
        store_relaxed<std::uint8_t>(*end_->wait_point().parked, 1);
    }
    void unpark() const noexcept { store_relaxed<std::uint8_t>(*end_->wait_point().parked, 0); }
    void show() noexcept {
        if (state_ == State::armed) unpark();
        state_ = State::readable;
        if (!std::exchange(is_shown_, true)) os::set_event(event_.file());
    }
    void hide() noexcept {
        if (std::exchange(is_shown_, false)) os::take_event(event_.file());
    }
    bool finds() const noexcept {
        try {
            return end_->look();
        } catch (const std::exception&) {
            return true;  // the call will say why
        }
    }

    // `is_due`: also for what nobody tells. True: it is to be parked.
    bool look(bool is_due) noexcept {
        if (state_ == State::armed && (end_->is_ready() || ((end_->wait_point().take_alarm() || is_due) && finds()))) show();
        // What was there may be gone without a call: a chunk that a view kept.
        if (state_ != State::readable || is_ready_anyway_ || end_->is_ready() || finds()) return false;
        hide();
        state_ = State::armed;
        return true;
    }

    Watched* end_;
    const std::uint64_t generation_ = os::fork_generation().load();
    os::OwnFile event_{[] { return os::make_event(); }};
    State state_ = State::calling;
    bool is_shown_ = false;
    bool is_ready_anyway_ = false;
    std::shared_ptr<Lane> lane_;  // last: from then on its thread looks at this
};

// All lanes of this process.
class Watcher {
public:
    static std::shared_ptr<Lane> join(Watch& watch) {
        static auto* const all = new Watcher;  // its threads may outlive static destructors
        const auto no_fork = os::ClosedInChildren::all().hold();
        return all->find(watch);
    }

private:
    std::shared_ptr<Lane> find(Watch& watch) {
        if (std::exchange(generation_, os::fork_generation().load()) != os::fork_generation().load()) {
            new std::vector<std::weak_ptr<Lane>>(std::move(lanes_));  // the parent's
            lanes_.clear();
        }
        std::erase_if(lanes_, [](const auto& lane) { return lane.expired(); });
        for (const auto& known : lanes_)
            if (const auto lane = known.lock(); lane && lane->add(watch)) return lane;
        // Without futex_waitv each end has a thread.
        auto lane = std::make_shared<Lane>(os::has_futex_waitv() ? os::kMostFutexes - 1 : 1);
        lanes_.push_back(lane);  // first: nothing may fail once its thread knows the watch
        lane->add(watch);
        return lane;
    }

    std::vector<std::weak_ptr<Lane>> lanes_;
    std::uint64_t generation_ = os::fork_generation().load();
};

inline Watch::Watch(Watched& end) : end_(&end), lane_(Watcher::join(*this)) {}

inline bool Lane::add(Watch& watch) {
    const std::lock_guard guard(mutex_);
    if (watches_.size() == most_) return false;
    watches_.reserve(watches_.size() + 1);
    if (!has_thread_) {
        has_thread_ = os::run_detached([lane = shared_from_this()] { lane->run(); });
        if (!has_thread_) os::throw_errno("cannot start a thread to watch queues", EAGAIN);
    }
    watches_.push_back(&watch);
    increment_release(changes_);
    os::futex_wake_all(&changes_);
    return true;
}

inline void Lane::remove(Watch& watch) noexcept {
    std::erase(watches_, &watch);
    increment_release(changes_);
    os::futex_wake_all(&changes_);
}

inline Lane::Words Lane::park_all() noexcept {
    Words words;
    if (most_ > 1) words.add(&changes_);
    for (const Watch* watch : watches_) {
        SYNC_LOAD(wake);
        words.add(watch->end_->wait_point().word);  // loads it before `parked` is stored
        if (watch->state_ == Watch::State::armed) watch->park();
    }
    full_fence();
    return words;
}

inline bool Lane::look_at_all(bool is_due) noexcept {
    bool is_any_to_park = false;
    for (Watch* watch : watches_) is_any_to_park |= watch->look(is_due);
    return is_any_to_park;
}

inline Lane::Intervals Lane::intervals() const noexcept {
    Intervals made{kLookInterval, most_ == 1 ? kSlice : kLookInterval};
    for (const Watch* watch : watches_) {
        if (watch->state_ == Watch::State::calling) continue;  // its owner is at it
        if (watch->end_->may_be_silent()) made.look = kSlice;
        if (watch->state_ == Watch::State::readable) made.wake = kSlice;
    }
    return made;
}

inline void Lane::sleep(const Words& words, os::Nanoseconds until) const noexcept {
    const os::FutexWaiter& first = words.all.front();
    if (most_ > 1 && os::futex_wait_any(&first, words.count, until)) return;
    // The only end's word. Or that of changes, if the system has come to refuse the call: then it wakes late.
    if (most_ > 1) until = std::min(until, os::monotonic_now() + 10 * os::kMillisecond);
    os::futex_wait(first.word, static_cast<std::uint32_t>(first.expected), until);
}

inline void Lane::run() noexcept {
    std::unique_lock lock(mutex_);
    os::Nanoseconds looked = os::monotonic_now();
    while (!watches_.empty()) {
        const Words words = park_all();
        const os::Nanoseconds now = os::monotonic_now();
        const bool is_due = now - looked >= intervals().look;
        if (is_due) looked = now;
        if (look_at_all(is_due)) continue;
        const Intervals next = intervals();
        const os::Nanoseconds until = std::min(looked + next.look, now + next.wake);
        lock.unlock();
        sleep(words, until);
        lock.lock();
    }
    has_thread_ = false;
}

}  // namespace memlane::core
