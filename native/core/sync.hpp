// Atomics on bytes that processes share, and the names of the places where they synchronise.
//
// Every pair of a store and the load that must see it has one name, written at both ends:
//
//   name      store side                                load side                  what becomes visible
//   header    magic of a complete segment               attach                     header, sections, all zeroes
//   join      a participant's slot says `attached`      peers                      who it is (pid, start time, ...)
//   leave     a participant's slot says `closed`        peers                      all it published or released before
//   retract   writer sets `written` to 0                reader, before it reads    (nothing: readers keep out)
//   reset     writer sets a reader's flag to 0          that reader                `written` = 0, data and descriptor
//   publish   writer sets `written` to 1                readers                    data and descriptor
//   consume   a reader sets its own flag to 1           writer                     that its loads of the data are over
//   lease     a reader marks an extent that it keeps     writer, behind `consume`   (the mark itself)
//   drop      a reader takes that mark away              writer                     that its loads of the extent are over
//   append    a later section gets into the directory   whoever looks for it       the section, filled in
//   offer     writer marks an object's entry live       readers                    its bytes, address, size; reads of 0
//   refer     writer adds a reference                   a reader that counts       (the number itself)
//   pin       a participant adds to its pins            writer, once it has retired (ordered by a full fence on both sides)
//   retire    writer marks an entry closing, or retired readers, once they pinned  (ordered by a full fence on both sides)
//   count     a reader counts its read of an object     writer                     (the number itself)
//   unpin     a participant takes its pin away          writer                     that its loads of the object are over
//   park      a sleeper sets its `parked` byte          whoever wakes it           (ordered by a full fence on both sides)
//   wake      the waker increments the futex word       the sleeper's futex wait   what it waits for
//
// These orders suffice, and none is there for nothing: native/tests/weak_memory tries what a weakly ordered processor
// may do with them, and with each one taken away. No other file of the protocol names a memory order.
//
// Steps that are no atomics but leave something behind if the process dies there have a name, too:
//
//   step      what comes next                           what a death right before it leaves
//   lock      taking a participant's lock               nothing: a file without a name, or somebody else's segment
//   link      giving a new segment its name             nothing
//   unlink    removing that name                        a name without a creator: the last to leave, or the next creation, removes it
//   sweep     removing the name of a dead segment       that name, and no lock on it
//   unlock    giving up a participant's lock            nothing: the kernel does the same
//   fill      copying a piece of a message or object     a chunk that is not published, or no object
//   reserve   taking a piece of a region's space        a region that is not complete: another goes on, or a new one is made
//   populate  mapping pages of a region                 the same
//   complete  saying that a region has all its space    the same
//   spill     writing a piece of it behind the ring     space of the file, which goes with the file
//
// The marks are executable: nothing in a release build, a call of `sync_hook` in a build with
// MEMLANE_SYNC_HOOKS, by which tests force an order of steps or kill a process exactly there.
// A mark stands right before its step.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(MEMLANE_SYNC_HOOKS)
namespace memlane::core {
inline std::atomic<void (*)(const char*)> sync_hook{nullptr};
inline void call_sync_hook(const char* point) {
    if (auto* hook = sync_hook.load(std::memory_order_relaxed)) hook(point);
}
}  // namespace memlane::core
#define SYNC_STORE(name) ::memlane::core::call_sync_hook(#name ".store")
#define SYNC_LOAD(name) ::memlane::core::call_sync_hook(#name ".load")
#define SYNC_STEP(name) ::memlane::core::call_sync_hook(#name)
#else
#define SYNC_STORE(name) ((void)0)
#define SYNC_LOAD(name) ((void)0)
#define SYNC_STEP(name) ((void)0)
#endif

namespace memlane::core {

template <class T>
T load_relaxed(const T& at) noexcept {
    return std::atomic_ref<T>(const_cast<T&>(at)).load(std::memory_order_relaxed);
}
template <class T>
T load_acquire(const T& at) noexcept {
    return std::atomic_ref<T>(const_cast<T&>(at)).load(std::memory_order_acquire);
}
template <class T>
void store_relaxed(T& at, T value) noexcept {
    std::atomic_ref<T>(at).store(value, std::memory_order_relaxed);
}
template <class T>
void store_release(T& at, T value) noexcept {
    std::atomic_ref<T>(at).store(value, std::memory_order_release);
}
inline void increment_release(std::uint32_t& at) noexcept {
    std::atomic_ref<std::uint32_t>(at).fetch_add(1, std::memory_order_release);
}
inline void full_fence() noexcept { std::atomic_thread_fence(std::memory_order_seq_cst); }

// Lock-free at any address that holds such a value, or two processes would not agree on the lock.
static_assert(std::atomic_ref<std::uint8_t>::is_always_lock_free);
static_assert(std::atomic_ref<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic_ref<std::uint64_t>::is_always_lock_free);

// What lies there now, as the caller's own: what a peer scribbles later changes nothing of it. A plain copy would not do,
// because the compiler may leave it out, and read the original again after it was checked.
inline void copy_privately(void* to, const void* shared, std::size_t bytes) noexcept {
    std::memcpy(to, shared, bytes);
    asm volatile("" : : "r"(to) : "memory");
}
template <class T>
T private_copy(const T& shared) noexcept {
    T copy;
    copy_privately(&copy, &shared, sizeof copy);
    return copy;
}

// A number that one process writes and others may read at any time. No read-modify-write: a plain addition.
template <class T>
void add_single_writer(T& counter, T amount) noexcept {
    store_relaxed(counter, static_cast<T>(load_relaxed(counter) + amount));
}

}  // namespace memlane::core
