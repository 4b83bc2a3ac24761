// Atomics on bytes that processes share, and names for the points where the processes synchronise.
//
// Every pair of a store and the load that must see it has one name, written at both ends:
//
//   name      store side                                load side                  what becomes visible
//   header    magic of a complete segment               attach                     header, sections, zeroes elsewhere
//   join      a participant's slot says `attached`      peers                      its identity (pid, start time, ...)
//   leave     a participant's slot says `closed`        peers                      all it published or released before
//   retract   writer sets `written` to 0                reader, before it reads    (nothing: readers keep out)
//   reset     writer sets a reader's flag to 0          that reader                `written` = 0, data and descriptor
//   publish   writer sets `written` to 1                readers                    data and descriptor
//   consume   a reader sets its own flag to 1           writer                     its loads of the data are complete
//   latest    writer points to a later message          reader, after `take`       data and descriptor (a fence on both sides)
//   take      a reader says which chunk it reads        writer, after `latest`     its loads of another (a fence on both sides)
//   finish    a reader says that it reads none          writer                     its loads of the data are complete
//   lease     a reader marks what it keeps              writer, after `consume`    (the mark itself); also after `finish`
//   drop      a reader clears that mark                 writer                     its loads of what it kept are complete
//   admit     writer counts a late reader               that reader                its own flags, and `written`, as they are
//   append    a section is added to the directory       processes looking for it   the section, filled in
//   offer     writer marks an object's entry live       readers                    its bytes, address, size; reads of 0
//   refer     writer stores an object's references      a reader that counts       (the number itself)
//   pin       a participant adds to its pins            writer, after `retire`     (a full fence on both sides)
//   retire    writer marks an entry closing, or retired readers, after `pin`       (a full fence on both sides)
//   count     a reader counts its read of an object     writer                     (the number itself)
//   unpin     a participant removes its pin             writer                     its loads of the object are complete
//   park      a sleeper sets its `parked` byte          the waker                  (a full fence on both sides)
//   wake      the waker increments the futex word       the sleeper's futex wait   what it waits for
//
// These orders are sufficient, and each is necessary: native/tests/weak_memory explores what a weakly ordered processor
// may do with them, and with each one weakened. No other file of the protocol names a memory order.
//
// Steps that are not atomics, but leave something behind if the process dies there, have names, too:
//
//   step      what comes next                           what a death just before it leaves behind
//   lock      taking a participant's lock               nothing: an unnamed file, or another process's segment
//   link      giving a new segment its name             nothing
//   unlink    removing that name                        a name without a creator: the last to leave, or the next creation, removes it
//   sweep     removing the name of a dead segment       that name, without a lock on it
//   unlock    dropping a participant's lock             nothing: the kernel does the same
//   reopen    opening a reader's place to another       nothing: the writer is dead, and with it the queue
//   fill      copying a piece of a message or object     a chunk that is not published, or no object
//   reserve   taking a piece of a region's space        an incomplete region: another process goes on, or replaces it
//   populate  mapping pages of a region                 the same
//   complete  marking that a region has all its space   the same
//   spill     writing part of a message to an extent    space in the file, which is freed with the file
//
// The marks expand to nothing in a release build, and to a call of `sync_hook` in a build with MEMLANE_SYNC_HOOKS, by
// which tests force an order of steps or kill a process exactly there. A mark comes directly before its step.
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
template <class T>
void add_relaxed(T& at, T amount) noexcept {
    std::atomic_ref<T>(at).fetch_add(amount, std::memory_order_relaxed);
}
inline void increment_release(std::uint32_t& at) noexcept {
    std::atomic_ref<std::uint32_t>(at).fetch_add(1, std::memory_order_release);
}
inline void full_fence() noexcept { std::atomic_thread_fence(std::memory_order_seq_cst); }

// Must be lock-free: an atomic with a lock would use a different lock in each process.
static_assert(std::atomic_ref<std::uint8_t>::is_always_lock_free);
static_assert(std::atomic_ref<std::uint32_t>::is_always_lock_free);
static_assert(std::atomic_ref<std::uint64_t>::is_always_lock_free);

// Copies shared bytes into the caller's memory, where later writes of a peer cannot change them. A plain copy is not
// enough: the compiler may elide it, and read the original again after it was checked.
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

// Adds to a number that one process writes and others may read at any time, so a plain addition is enough.
template <class T>
void add_single_writer(T& counter, T amount) noexcept {
    store_relaxed(counter, static_cast<T>(load_relaxed(counter) + amount));
}

}  // namespace memlane::core
