// What the threads of a disk tier and its caller share: the jobs, the rows, the files.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include "core/ready_descriptor.hpp"
#include "os/clock.hpp"
#include "os/event.hpp"
#include "os/fork.hpp"
#include "tiers/block_jobs.hpp"
#include "tiers/slot_file.hpp"

namespace memlane::tiers {

class DiskWork {
public:
    using Work = BlockJobs::Work;

    DiskWork(SlotFile& file, std::byte* rows) : file_(file), rows_(rows) {}

    SlotFile& file() const noexcept { return file_; }
    int descriptor() const noexcept { return ready_.fd(); }
    // Makes the descriptor readable.
    void wake() {
        const std::lock_guard guard(mutex_);
        ready_.set();
    }
    std::span<std::byte> row(const Work& work) const noexcept {
        return {rows_ + std::uint64_t{work.request().row} * file_.row_bytes(), file_.row_bytes()};
    }

    // The caller's side: one thread at a time.

    BlockJobs::Ref submit(Direction direction, std::vector<BlockRequest> requests, os::Deadline deadline) {
        const std::size_t blocks = requests.size();
        const std::lock_guard guard(mutex_);
        ready_.set_at(std::min({jobs_.next_deadline(), also_, deadline}));  // the only step that may fail
        BlockJobs::Ref job = jobs_.submit(direction, std::move(requests), deadline, os::monotonic_now());
        for (std::size_t i = std::min(blocks, idle_); i > 0; --i) work_.notify_one();
        if (std::exchange(is_bell_wanted_, false)) os::set_event(bell_.file());
        return job;
    }

    // A deadline of the caller's own.
    void set_also(os::Deadline deadline) {
        const std::lock_guard guard(mutex_);
        also_ = deadline;
        ready_.set_at(std::min(jobs_.next_deadline(), also_));
    }

    std::vector<BlockJobs::Event> poll() {
        const std::lock_guard guard(mutex_);
        ready_.take();
        jobs_.expire(os::monotonic_now());
        ready_.set_at(std::min(jobs_.next_deadline(), also_));
        return jobs_.take_events();
    }

    // A descriptor that is readable while the caller says so, for whoever waits for that in another thread than polls.
    // Throws system_error.
    int idle_descriptor(bool is_idle) {
        if (!idle_event_.file().is_open()) {
            idle_event_ = os::OwnFile([] { return os::make_event(); });
            is_idle_ = is_idle;
            if (is_idle) os::set_event(idle_event_.file());
        }
        return idle_event_.file().get();
    }
    void note_idle(bool is_idle) noexcept {
        if (!idle_event_.file().is_open() || std::exchange(is_idle_, is_idle) == is_idle) return;
        if (is_idle) {
            os::set_event(idle_event_.file());
        } else {
            os::take_event(idle_event_.file());
        }
    }

    // What that job stores there will not be found; true if it was stored already.
    bool forget(const BlockJobs::Ref& job, std::size_t at) {
        const std::lock_guard guard(mutex_);
        return BlockJobs::forget(job, at);
    }

    // How the slot of that store can lose what it had before: the store has begun, and writes over it; it waits until go_on();
    // or it never began.
    enum class Before : std::uint8_t { is_written_over, is_held_back, is_left };
    Before hold_back(const BlockJobs::Ref& job, std::size_t at) {
        const std::lock_guard guard(mutex_);
        if (BlockJobs::hold_back(job, at)) return Before::is_held_back;
        return BlockJobs::is_expired(job, at) ? Before::is_left : Before::is_written_over;
    }
    // Any thread.
    void go_on(const Work& work) {
        const std::lock_guard guard(mutex_);
        jobs_.go_on(work);
        work_.notify_one();
        if (std::exchange(is_bell_wanted_, false)) os::set_event(bell_.file());
    }

    // True if nothing is under way; the threads then end.
    bool stop() {
        const std::lock_guard guard(mutex_);
        if (!jobs_.is_idle()) return false;
        is_stopping_ = true;
        work_.notify_all();
        return true;
    }

    struct Statistics {
        std::size_t waiting;
        BlockJobs::Counts stores, loads;
    };
    Statistics statistics() {
        const std::lock_guard guard(mutex_);
        return {jobs_.waiting(), jobs_.counts(Direction::store), jobs_.counts(Direction::load)};
    }
    Latencies latencies(Direction direction) {
        const std::lock_guard guard(mutex_);
        return jobs_.latencies(direction);
    }

    // The threads' side.

    // Waits for the next block; nullopt: the tier is closing.
    std::optional<Work> wait() {
        std::unique_lock lock(mutex_);
        is_bell_wanted_ = false;
        for (;;) {
            if (auto next = jobs_.begin()) return next;
            if (is_stopping_) return std::nullopt;
            ++idle_;
            work_.wait(lock);
            --idle_;
        }
    }

    // For a single thread that also waits for something else: what is readable once there is more after next() had none.
    // Throws system_error.
    const os::FileDescriptor& make_bell() {
        bell_ = os::OwnFile([] { return os::make_event(); });
        return bell_.file();
    }
    // The next block, if there is one now.
    std::optional<Work> next() {
        const std::lock_guard guard(mutex_);
        auto next = jobs_.begin();
        is_bell_wanted_ = !next;
        return next;
    }

    // Adds a piece of a block to its row; false if the block was reported meanwhile.
    bool copy_in(const Work& work, std::span<std::byte> to, const std::byte* from, std::uint32_t& crc) {
        {
            const std::lock_guard guard(mutex_);
            if (!jobs_.begin_copy(work)) return false;
        }
        crc = Crc32c::copy(to.data(), {from, to.size()}, crc);
        const std::lock_guard guard(mutex_);
        jobs_.end_copy(work);
        return true;
    }

    // A store that was reported as failed, or that was forgotten, must not be found: its header goes before its slot may be
    // another's.
    void finish(const Work& work, Fault fault) {
        const bool is_store = work.direction() == Direction::store;
        bool is_erased = false;
        if (is_store && fault.kind != Fault::Kind::none) is_erased = erase(work);
        for (;;) {
            {
                const std::lock_guard guard(mutex_);
                const bool must_go = is_store && (jobs_.is_abandoned(work) || jobs_.is_unwanted(work));
                if (!must_go || is_erased) {
                    jobs_.finish(work, fault, os::monotonic_now());
                    if (jobs_.has_events()) ready_.set();
                    return;
                }
            }
            is_erased = erase(work);
        }
    }

    // Why a store must not write what it has read of its row: it was reported already, as failed, so the row may have
    // changed; or the key was forgotten.
    Fault reason_to_stop(const Work& work) {
        const std::lock_guard guard(mutex_);
        if (jobs_.is_abandoned(work)) return {Fault::Kind::expired};
        return {jobs_.is_unwanted(work) ? Fault::Kind::missing : Fault::Kind::none};
    }

private:
    bool erase(const Work& work) const noexcept {
        static_cast<void>(file_.erase(work.request().slot));  // if that fails, so does the checksum, most likely
        return true;
    }

    SlotFile& file_;
    std::byte* const rows_;
    core::ReadyDescriptor ready_;
    std::mutex mutex_;
    std::condition_variable work_;  // there is something to do
    BlockJobs jobs_;
    os::Deadline also_ = os::Deadline::never();
    std::size_t idle_ = 0;
    bool is_stopping_ = false;
    os::OwnFile bell_;
    os::OwnFile idle_event_;  // once somebody has asked for it
    bool is_idle_ = false;    // what it says
    bool is_bell_wanted_ = false;
};

}  // namespace memlane::tiers
