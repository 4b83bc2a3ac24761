// A message that a reader keeps without keeping its chunk: its extent is not written to while the lease lives.
//
// What is lent is a private mapping, so it is the reader's own: what it writes nobody else sees. The extent is free for the
// writer, who never waits for it, when the lease goes; the copies that writes have made are dropped then, and looked for
// again before the next lease, because mlockall() makes copies, too.
//
// Two things turn a lease into copies of all its pages, that do not depend on the extent: a fork, because the child has the
// memory, too, and the extent is free when the parent's lease goes; and the end of the reader, for which the writer does not
// wait any more.
#pragma once

#include <pthread.h>

#include <memory>
#include <mutex>
#include <set>

#include "broadcast/ring_layout.hpp"
#include "core/liveness.hpp"
#include "core/sync.hpp"
#include "os/private_mapping.hpp"

namespace memlane::broadcast {

class Lease;

namespace detail {

struct Leases {
    std::mutex mutex;
    std::set<Lease*> alive;
};

inline Leases& leases();

}  // namespace detail

// Ends in whatever thread lets go of it.
class Lease {
public:
    // The caller has the message's chunk, gives it back only then, and has found the range to show the file. Throws
    // system_error, and has then done nothing.
    Lease(const Ring& ring, std::uint32_t mark, std::size_t reader, std::shared_ptr<os::PrivateMapping> memory, std::uint64_t offset,
          std::uint64_t bytes)
        : ring_(ring), mark_(mark), reader_(reader), memory_(std::move(memory)), offset_(offset), bytes_(bytes) {
        detail::Leases& all = detail::leases();
        const std::lock_guard guard(all.mutex);
        all.alive.insert(this);
        SYNC_STORE(lease);
        core::store_relaxed<std::uint8_t>(ring_.lease(mark_, reader_), 1);  // `consume` makes it visible
    }
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;
    ~Lease() {
        detail::Leases& all = detail::leases();
        const std::lock_guard guard(all.mutex);
        all.alive.erase(this);
        memory_->drop_copies(offset_, bytes_);
        if (!keeps_extent_ || generation_ != os::fork_generation().load()) return;
        SYNC_STORE(drop);
        core::store_release<std::uint8_t>(ring_.lease(mark_, reader_), 0);
    }

    std::byte* memory() const noexcept { return memory_->base() + offset_; }

    // From now on the writer may have the extent.
    void own() noexcept {
        copy();
        keeps_extent_ = false;
    }

    // Once: the pages are the reader's own from then on, and later children share them like any other memory.
    void copy() noexcept {
        if (keeps_extent_ && !std::exchange(is_copied_, true)) memory_->copy_all(offset_, bytes_);
    }
    bool is_of(const Ring& ring, std::size_t reader) const noexcept {
        return &ring.lease(0, reader) == &ring_.lease(0, reader_);
    }

private:
    const Ring ring_;
    const std::uint32_t mark_;
    const std::size_t reader_;
    const std::shared_ptr<os::PrivateMapping> memory_;
    const std::uint64_t offset_;
    const std::uint64_t bytes_;
    const std::uint64_t generation_ = os::fork_generation().load();
    bool keeps_extent_ = true;
    bool is_copied_ = false;
};

namespace detail {

inline Leases& leases() {
    static auto* const all = [] {
        auto made = std::make_unique<Leases>();
        const int error = ::pthread_atfork(
            [] {
                leases().mutex.lock();
                for (Lease* lease : leases().alive) lease->copy();
            },
            [] { leases().mutex.unlock(); }, [] { leases().mutex.unlock(); });
        if (error != 0) os::throw_errno("cannot have the leases looked after at a fork", error);
        return made.release();  // never destroyed: a fork may come after static destructors
    }();
    return *all;
}

}  // namespace detail

// Before the writer stops waiting for the reader.
inline void own_leases(const Ring& ring, std::size_t reader) noexcept {
    detail::Leases& all = detail::leases();
    const std::lock_guard guard(all.mutex);
    for (Lease* lease : all.alive)
        if (lease->is_of(ring, reader)) lease->own();
}

}  // namespace memlane::broadcast
