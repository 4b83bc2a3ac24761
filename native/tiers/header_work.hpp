// Headers that must be gone from a disk tier's file: erased one after another on a thread of its own, because the disk may
// not answer. Its caller keeps each slot from other use until it has taken it back; those of a whole namespace are erased
// wherever they still are. What else is written beside the blocks, by the same thread: slot_uses.hpp.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "os/clock.hpp"
#include "tiers/disk_work.hpp"
#include "tiers/slot_file.hpp"

namespace memlane::tiers {

class HeaderWork {
public:
    // What one call has asked for.
    struct Order {
        std::size_t left = 0;
        int error = 0;  // an errno, of what the disk refused last
    };
    using OrderRef = std::shared_ptr<Order>;

    HeaderWork(SlotFile& file, DiskWork& work) : file_(file), work_(work) {}

    // The caller's side: one thread at a time.

    // `held_back`: a store into that slot, which begins afterwards.
    void erase(Block slot, const OrderRef& order, std::optional<DiskWork::Work> held_back = std::nullopt) {
        add({slot, order, [&file = file_, slot] { return file.erase(slot); }, std::move(held_back)});
    }
    // All slots of the file are empty from now on; once the order is done, for a restart, too. Any thread.
    void clear(const OrderRef& order) {
        const std::lock_guard guard(mutex_);
        file_.clear();
        emptying_ = {kNoBlock, order, [&file = file_] { return file.write_cleared(); }, {}};
        push(emptying_);
    }
    // The same for what one namespace has stored by now. Any thread.
    void purge(const Namespace& name_space, const OrderRef& order) {
        const std::lock_guard guard(mutex_);
        const bool is_own = name_space == file_.name_space();
        const std::uint64_t end = is_own ? file_.clear() : file_.next_sequence();
        Erasure purging{kNoBlock, order, [&file = file_, name_space, end] { return file.purge(name_space, end); }, {}};
        push(purging);
        if (is_own) emptying_ = std::move(purging);
    }
    // What has emptied the file last is done once this order is, too: it is tried again if the disk has refused it. False:
    // it is done.
    bool empty_again(const OrderRef& order) {
        const std::lock_guard guard(mutex_);
        const OrderRef before = emptying_.order;
        if (before == nullptr || (before->left == 0 && before->error == 0)) return false;
        emptying_.order = order;
        push({kNoBlock, order, [before, again = emptying_.work] { return before->error == 0 ? 0 : again(); }, {}});
        return true;
    }
    // Nothing but waits for what was ordered before.
    void follow(const OrderRef& order) {
        add({kNoBlock, order, [] { return 0; }, {}});
    }
    // When slots were used, and what the tuner has learned.
    void keep_uses(const TunerState& tuner, const OrderRef& order) {
        add({kNoBlock, order, [&file = file_, tuner] { return file.write_uses(tuner); }, {}});
    }

    struct Ended {
        Block slot;
        bool is_erased;  // else the disk refused it
    };
    // Slots whose erasure has ended since the last call.
    std::vector<Ended> take_back() {
        const std::lock_guard guard(mutex_);
        return std::exchange(done_, {});
    }
    bool is_idle() {
        const std::lock_guard guard(mutex_);
        return left_ == 0 && done_.empty();
    }
    // The disk does not answer: nothing has ended for a second since somebody was told that an order is late. Any thread.
    bool is_stalled() {
        const std::lock_guard guard(mutex_);
        return late_since_ && os::monotonic_now() - *late_since_ > os::kSecond;
    }

    // Any thread: 0 or an errno; nullopt: something of it is not done by then.
    std::optional<int> wait(const OrderRef& order, os::Nanoseconds until) {
        std::unique_lock lock(mutex_);
        while (order->left > 0) {
            const os::Nanoseconds now = os::monotonic_now();
            if (now >= until) return std::nullopt;
            ended_.wait_for(lock, std::chrono::nanoseconds(until - now));
        }
        return order->error;
    }

    // Somebody does not wait for an order any longer. Any thread.
    void note_late() {
        const std::lock_guard guard(mutex_);
        if (left_ > 0 && !late_since_) late_since_ = os::monotonic_now();
    }

    // Nothing is left; the thread then ends.
    void stop() {
        const std::lock_guard guard(mutex_);
        is_stopping_ = true;
        begun_.notify_all();
    }

    // The thread's side: until the tier closes.
    void run() {
        std::unique_lock lock(mutex_);
        for (;;) {
            begun_.wait(lock, [&] { return is_stopping_ || !waiting_.empty(); });
            if (waiting_.empty()) return;
            const Erasure next = std::move(waiting_.front());
            waiting_.pop_front();
            lock.unlock();
            const int error = next.work();
            if (next.held_back) work_.go_on(*next.held_back);
            lock.lock();
            if (error != 0) next.order->error = error;
            --next.order->left;
            if (next.slot != kNoBlock) done_.push_back({next.slot, error == 0});
            late_since_.reset();
            if (--left_ == 0) work_.wake();  // for the thread that drains the tier
            ended_.notify_all();
        }
    }

private:
    struct Erasure {
        Block slot;                 // to be taken back; kNoBlock: none
        OrderRef order;
        std::function<int()> work;  // returns 0 or an errno
        std::optional<DiskWork::Work> held_back;
    };

    void add(const Erasure& erasure) {
        const std::lock_guard guard(mutex_);
        push(erasure);
    }
    void push(const Erasure& erasure) {
        waiting_.push_back(erasure);
        ++erasure.order->left;
        ++left_;
        begun_.notify_one();
    }

    SlotFile& file_;
    DiskWork& work_;
    std::mutex mutex_;
    std::condition_variable begun_, ended_;
    std::deque<Erasure> waiting_;
    Erasure emptying_{};  // the last clear, or purge of the file's own namespace; without an order: there was none
    std::vector<Ended> done_;
    std::size_t left_ = 0;  // that have not ended
    std::optional<os::Nanoseconds> late_since_;  // since when nothing has ended that somebody waited for in vain
    bool is_stopping_ = false;
};

}  // namespace memlane::tiers
