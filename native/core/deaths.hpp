// Ends a sleep when the process of a peer ends, so that the sleeper looks for deaths at once and not after its slice.
//
// A thread cannot sleep on a futex and on a descriptor, so one thread of this process sleeps on the pidfds of all peers
// that its ends wait for, and wakes those ends. It decides nothing: the lock does (liveness.hpp), and a process has dropped
// its locks before its pidfd shows its end. Where pidfd_open is refused, or for a peer of another pid namespace, the slices
// of a wait remain. They are what sees a peer that joins and dies within one sleep: joining wakes nobody.
//
// No fork finds the thread: Python warns those who fork beside one. It ends before, and the next sleep starts another.
// Until then the slices remain, too; of an end that is watched, the looks of its lane (watcher.hpp).
//
// Cost: of a sleep a load, of one after a peer has come or left a look at each, of a message none. The thread, which exists as
// long as an end has a peer, never wakes but at a death; one descriptor for each process that is a peer, and two more. Of a
// fork, a thread's end and start.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "core/participants.hpp"
#include "core/sync.hpp"
#include "core/wait.hpp"
#include "os/event.hpp"
#include "os/fork.hpp"
#include "os/process.hpp"
#include "os/threads.hpp"

namespace memlane::core {

class PeerAlarm;

// The peers of all ends of this process, and the thread. Nothing throws: what the system refuses is not watched.
class Deaths {
public:
    // The deaths that this process watches; a child does not know its parent's.
    static Deaths& here() {
        static std::pair<Deaths*, std::uint64_t> known{nullptr, 0};
        os::ClosedInChildren& files = os::ClosedInChildren::all();
        // After theirs, so that it runs before: the thread may need that lock to end. Refused: Python warns.
        [[maybe_unused]] static const int refused =
            ::pthread_atfork([] { here().rest(); }, [] { here().mutex_.unlock(); }, nullptr);
        const auto no_fork = files.hold();
        const std::uint64_t generation = os::fork_generation().load();
        if (known.first == nullptr || known.second != generation) known = {new Deaths, generation};  // its thread may outlive all else
        return *known.first;
    }

    // From now on the alarm rings when one of these processes ends, and for no other. False: it knew all of them.
    bool follow(PeerAlarm& alarm, const std::vector<std::uint64_t>& pids) noexcept;

private:
    struct Process {
        os::OwnFile file;  // closed once it has ended, so that nothing rings twice
        std::vector<PeerAlarm*> alarms;
    };

    struct Sleeper {
        os::OwnFile poller{[] { return os::make_poller(); }};
        os::OwnFile end{[] { return os::make_event(); }};
        bool is_over = false;
        std::int64_t id = 0;  // of the thread, which sets it
        std::thread thread;
    };

    bool add(PeerAlarm& alarm, std::uint64_t pid);
    void begin();
    void end(std::unique_lock<std::mutex>& lock) noexcept;
    void abandon() noexcept;
    void rest() noexcept;
    void run(Sleeper& sleeper) noexcept;

    std::mutex mutex_;
    std::map<std::uint64_t, Process> processes_;  // by pid, those that are somebody's peer; also if they have ended
    std::unique_ptr<Sleeper> sleeper_;  // while there are any, but for the time from a fork to the next sleep
};

// The alarm of one end. Only who may wait for the end calls it.
class PeerAlarm final : public Alarm {
public:
    // `word`: where the end sleeps, but for `membership`. Of the slots only the first `count` are followed.
    PeerAlarm(const Participants& participants, std::size_t own, std::size_t count, std::uint32_t& word) noexcept
        : participants_(participants), own_(own), count_(count), word_(word) {}
    PeerAlarm(const PeerAlarm&) = delete;
    PeerAlarm& operator=(const PeerAlarm&) = delete;
    ~PeerAlarm() { leave(); }

    // For good; at the latest when the segment is left, whose memory it touches.
    void leave() noexcept {
        if (std::exchange(is_known_, false) && generation_ == os::fork_generation().load()) Deaths::here().follow(*this, {});
    }

    // For one wait: all peers, and other processes, which may become peers.
    class Wider {
    public:
        Wider(PeerAlarm& alarm, std::size_t count, std::vector<std::uint64_t> pids) noexcept
            : alarm_(alarm), before_(std::exchange(alarm.count_, count)) {
            alarm.others_ = std::move(pids);
            alarm.seen_.reset();
        }
        Wider(const Wider&) = delete;
        Wider& operator=(const Wider&) = delete;
        ~Wider() {
            alarm_.count_ = before_;
            alarm_.others_.clear();
            alarm_.seen_.reset();
            if (alarm_.is_known_) alarm_.follow();  // a descriptor for each of the others
        }

    private:
        PeerAlarm& alarm_;
        const std::size_t before_;
    };

    void follow() noexcept override {
        // Relaxed, here and below: who is overlooked costs a slice.
        const std::pair now{load_relaxed(participants_.membership()), os::ClosedInChildren::all().forks()};
        if (seen_ == now) return;
        seen_ = now;
        bool has_new = true;
        try {
            const std::uint64_t here = os::own_pid_namespace();
            std::vector<std::uint64_t> pids = others_;
            for (std::size_t i = 0; i < count_; ++i) {
                const os::ProcessIdentity who = participants_.identity(i);
                if (i == own_ || load_relaxed(participants_.slot(i).state) != SlotState::attached) continue;
                if (who.pid_namespace != 0 && who.pid_namespace == here) pids.push_back(who.pid);
            }
            std::erase(pids, static_cast<std::uint64_t>(os::own_pid()));
            if (pids.empty() && !is_known_) return;
            is_known_ = true;
            has_new = Deaths::here().follow(*this, pids);
        } catch (const std::exception&) {  // no memory: the slices remain
        }
        if (has_new) store_relaxed(rung_, true);  // it may have ended before
    }

    bool take() noexcept override {
        if (!load_relaxed(rung_)) return false;
        store_relaxed(rung_, false);
        return true;
    }

private:
    friend class Deaths;

    // From the thread. As at every wake: the flag first, then the word.
    void ring() noexcept {
        store_relaxed(rung_, true);
        wake_always(&word_);
        wake_always(&participants_.membership());
    }

    const Participants& participants_;
    const std::size_t own_;
    std::size_t count_;
    std::uint32_t& word_;
    std::vector<std::uint64_t> others_;
    std::optional<std::pair<std::uint32_t, std::uint64_t>> seen_;  // `membership` and forks at the last look at the peers
    const std::uint64_t generation_ = os::fork_generation().load();
    bool is_known_ = false;  // to Deaths
    bool rung_ = false;      // atomic: set by the thread
};

inline bool Deaths::follow(PeerAlarm& alarm, const std::vector<std::uint64_t>& pids) noexcept {
    std::unique_lock lock(mutex_);
    for (auto at = processes_.begin(); at != processes_.end();) {
        if (std::find(pids.begin(), pids.end(), at->first) == pids.end()) std::erase(at->second.alarms, &alarm);
        at = at->second.alarms.empty() ? processes_.erase(at) : std::next(at);
    }
    bool has_new = false;
    for (const std::uint64_t pid : pids) {
        try {
            has_new |= add(alarm, pid);
        } catch (const std::exception&) {  // it has ended, or the system refuses
            has_new = true;
        }
    }
    try {
        if (!processes_.empty() && !sleeper_) begin();
    } catch (const std::exception&) {
        has_new = true;
    }
    if (processes_.empty() && sleeper_) end(lock);
    return has_new;
}

inline bool Deaths::add(PeerAlarm& alarm, std::uint64_t pid) {
    const auto known = processes_.find(pid);
    if (known != processes_.end() && known->second.file.is_intact()) {
        std::vector<PeerAlarm*>& alarms = known->second.alarms;
        if (std::find(alarms.begin(), alarms.end(), &alarm) != alarms.end()) return false;
        alarms.push_back(&alarm);
        return true;
    }
    os::OwnFile file([&] { return os::open_process(pid); });
    if (!os::leaves_enough(file.file())) return true;
    if (sleeper_ && !sleeper_->poller.is_intact()) abandon();
    if (!sleeper_) begin();
    os::watch(sleeper_->poller.file(), file.file(), pid);
    Process& process = processes_[pid];  // of a process that has ended, it is another one with its pid
    process.file = std::move(file);
    process.alarms.push_back(&alarm);
    return true;
}

inline void Deaths::end(std::unique_lock<std::mutex>& lock) noexcept {
    if (!sleeper_->end.is_intact() || !sleeper_->poller.is_intact()) return abandon();
    const std::unique_ptr<Sleeper> last = std::move(sleeper_);
    last->is_over = true;
    os::set_event(last->end.file());
    lock.unlock();
    last->thread.join();
    os::until_gone(last->id);
}

// For the time of a fork, with the lock, so that nobody starts another.
inline void Deaths::rest() noexcept {
    std::unique_lock lock(mutex_);
    while (sleeper_) {
        end(lock);
        if (!lock) lock.lock();
    }
    lock.release();
}

// Somebody has closed its descriptors, and nothing wakes the thread any more.
inline void Deaths::abandon() noexcept {
    sleeper_->thread.detach();
    static_cast<void>(sleeper_.release());
}

inline void Deaths::begin() {
    auto made = std::make_unique<Sleeper>();
    os::watch(made->poller.file(), made->end.file());
    for (const auto& [pid, process] : processes_)
        if (process.file.is_intact()) os::watch(made->poller.file(), process.file.file(), pid);
    const os::SignalsBlocked blocked;
    made->thread = std::thread([this, sleeper = made.get()] { run(*sleeper); });
    sleeper_ = std::move(made);
}

inline void Deaths::run(Sleeper& sleeper) noexcept {
    sleeper.id = os::own_thread();
    for (;;) {
        const std::optional<std::uint64_t> pid = os::wait_for_event(sleeper.poller.file());
        const std::lock_guard guard(mutex_);
        if (!pid || sleeper.is_over) return;
        const auto ended = processes_.find(*pid);
        if (ended == processes_.end()) continue;
        ended->second.file.close();
        for (PeerAlarm* alarm : ended->second.alarms) alarm->ring();
    }
}

}  // namespace memlane::core
