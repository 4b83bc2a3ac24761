// Keeps a message for a reader without keeping its chunk: its extent is not written to while the lease lives.
//
// The reader gets a private mapping, so nobody else sees what it writes. When the lease ends, the extent is free for
// the writer, which never waits for that, and the pages that writes have copied are dropped.
//
// Two events turn a lease into copies of all its pages, which do not depend on the
// extent: a fork, because the child has the memory, too, but the extent is free when the
// parent's lease ends; and the end of the reader, whose leases the writer then ignores. Pages that cannot be copied
// (sealed ones, or without /proc) keep their extent instead.
#pragma once

#include <pthread.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "broadcast/ring_layout.hpp"
#include "core/liveness.hpp"
#include "core/sync.hpp"
#include "os/private_mapping.hpp"

namespace memlane::broadcast {

class Lease;
class LeftFile;

// What a reader keeps of extents; in a ring of the latest of chunks, too. In any thread.
inline void count_leased(const Ring& ring, std::size_t reader, std::uint64_t bytes) noexcept {
    core::add_relaxed(ring.slot_of(reader).leased_bytes, bytes);
}

struct Leases {
    // The first call must not run beside a fork, whose child would wait for its end for ever.
    static Leases& all();

    std::mutex mutex;
    std::set<Lease*> alive;
    std::vector<std::weak_ptr<LeftFile>> left;  // left_file.hpp
    std::atomic<bool> is_any_uncopied = false;  // until it is logged
};

// May end in any thread.
class Lease {
public:
    // The caller holds the message's chunk, and gives it back only afterwards. Throws system_error, which leaves
    // everything unchanged.
    Lease(const Ring& ring, std::uint32_t mark, std::size_t reader, std::shared_ptr<os::PrivateMapping> memory, std::uint64_t offset,
          std::uint64_t bytes)
        : ring_(ring), mark_(mark), reader_(reader), memory_(std::move(memory)), offset_(offset), bytes_(bytes) {
        Leases& all = Leases::all();
        const std::lock_guard guard(all.mutex);
        // The previous lease of this range dropped its copies, but mlock() and prefaulting also copy pages that nobody
        // uses. The mutex keeps forks out: the pages that a fork copies for this lease must not be dropped here.
        if (!memory_->drop_copies(offset_, bytes_)) os::throw_errno("cannot drop the copies in a message's memory");
        all.alive.insert(this);
        SYNC_STORE(lease);
        core::store_relaxed<std::uint8_t>(ring_.lease(mark_, reader_), kKept);  // `consume` makes it visible
        count(bytes_);
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    // Clears the mark first, so that the writer has the extent while the copies in it are searched for. A next lease of
    // the range waits for that.
    ~Lease() {
        Leases& all = Leases::all();
        const std::lock_guard guard(all.mutex);
        all.alive.erase(this);
        if (keeps_extent_ && !is_inherited_ && generation_ == os::fork_generation().load()) {
            SYNC_STORE(drop);
            core::store_release<std::uint8_t>(ring_.lease(mark_, reader_), kNotKept);
            count(-bytes_);
        }
        memory_->drop_copies(offset_, bytes_);
    }

    std::byte* memory() const noexcept { return memory_->base() + offset_; }

    // Makes copies of all pages. From then on the writer may reuse the extent, unless a page cannot be copied.
    void own() noexcept {
        copy();
        if (is_copied_) {
            if (std::exchange(keeps_extent_, false)) count(-bytes_);
        } else if (keeps_extent_) {
            core::store_relaxed<std::uint8_t>(ring_.lease(mark_, reader_), kKeptForGood);  // `leave` makes it visible
        }
    }

    // For a child, which has the memory too. If a page cannot be copied, the extent stays as it is.
    void share() noexcept {
        copy();
        if (keeps_extent_ && !is_copied_) is_inherited_ = true;
    }
    const Ring& ring() const noexcept { return ring_; }
    bool is_of(const Ring& ring, std::size_t reader) const noexcept {
        return &ring.lease(0, reader) == &ring_.lease(0, reader_);
    }

private:
    void count(std::uint64_t bytes) const noexcept { count_leased(ring_, reader_, bytes); }

    // Copies only once: the pages are then the reader's own, and later children share them like any other memory.
    void copy() noexcept {
        if (!keeps_extent_ || is_copied_) return;
        is_copied_ = memory_->copy_all(offset_, bytes_);
        if (!is_copied_) Leases::all().is_any_uncopied = true;
    }

    const Ring ring_;
    const std::uint32_t mark_;
    const std::size_t reader_;
    const std::shared_ptr<os::PrivateMapping> memory_;
    const std::uint64_t offset_;
    const std::uint64_t bytes_;
    const std::uint64_t generation_ = os::fork_generation().load();
    bool keeps_extent_ = true;
    bool is_copied_ = false;
    bool is_inherited_ = false;  // by a child, although pages were not copied
};

inline Leases& Leases::all() {
    static auto* const kept = [] {
        os::ClosedInChildren::all();  // before a fork it is locked after this
        auto made = std::make_unique<Leases>();
        const int error = ::pthread_atfork(
            [] {
                all().mutex.lock();
                for (Lease* lease : all().alive) lease->share();
            },
            [] { all().mutex.unlock(); }, [] { all().mutex.unlock(); });
        if (error != 0) os::throw_errno("cannot install a fork handler for leases", error);
        return made.release();  // never destroyed: a fork may come after static destructors
    }();
    return *kept;
}

// Call it before the writer stops waiting for the reader.
inline void own_leases(const Ring& ring, std::size_t reader) noexcept {
    Leases& all = Leases::all();
    const std::lock_guard guard(all.mutex);
    for (Lease* lease : all.alive)
        if (lease->is_of(ring, reader)) lease->own();
}

}  // namespace memlane::broadcast
