// Feeds a tuner beside the calls that make the accesses: its shadows take 0.3 to 3 us an access, by their size.
//
// A thread runs while there is a batch, and ends: a fork loses none, and whoever drops a pool waits for none.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <new>
#include <span>
#include <vector>

#include "os/threads.hpp"
#include "tiers/tuner.hpp"

namespace memlane::tiers {

class TunerFeed {
public:
    explicit TunerFeed(std::uint32_t blocks) : state_(std::make_shared<State>(blocks)), choice_(state_->tuner.choice()) {}

    // Before the first access.
    void restore(const TunerState& state) noexcept { state_->tuner.restore(state); }

    // Accesses in their order. If the thread is far behind, these are not seen: the choice comes later.
    void accessed(std::span<const Key> keys) {
        const std::lock_guard lock(state_->mutex);
        if (state_->has_failed) return;
        std::vector<Key>& pending = state_->pending;
        if (pending.size() < kMostPending) pending.insert(pending.end(), keys.begin(), keys.end());
        if (pending.size() >= kBatch) start();
    }

    // Waits until all accesses so far have been seen.
    void settle() {
        std::unique_lock lock(state_->mutex);
        if (!state_->pending.empty()) start();
        state_->idle.wait(lock, [this] { return !state_->is_fed; });
    }

    std::shared_ptr<const Choice> choice() const noexcept { return choice_; }

private:
    static constexpr std::size_t kBatch = Tuner::kRound, kMostPending = 100'000;

    struct State {
        explicit State(std::uint32_t blocks) : tuner(blocks) {}

        Tuner tuner;  // of the thread while it is fed
        std::mutex mutex;
        std::condition_variable idle;
        std::vector<Key> pending;
        bool is_fed = false;
        bool has_failed = false;  // for lack of memory: what was chosen last stays
    };

    // With the lock held. Without a thread to be had, the accesses wait for the next call.
    void start() {
        if (!state_->is_fed) state_->is_fed = os::run_detached([state = state_] { feed(*state); });
    }

    static void feed(State& state) {
        std::vector<Key> keys;
        std::unique_lock lock(state.mutex);
        while (!state.pending.empty()) {
            keys.clear();
            keys.swap(state.pending);
            lock.unlock();
            bool is_done = true;
            try {
                state.tuner.accessed(keys);
            } catch (const std::bad_alloc&) {
                is_done = false;
            }
            lock.lock();
            if (is_done) continue;
            state.has_failed = true;
            state.pending.clear();
        }
        state.is_fed = false;
        state.idle.notify_all();
    }

    std::shared_ptr<State> state_;
    std::shared_ptr<const Choice> choice_;
};

}  // namespace memlane::tiers
