// Reports accesses to the explorer, through the compiler's own instrumentation: -fsanitize=thread turns every memory
// access, plain or atomic, and every fence into a call. Normally libtsan implements these calls; here the explorer
// does. So the code under test is exactly the code that ships, and no access can be missed.
//
// Accesses to memory that the threads of a scenario do not share (stacks, heap, the explorer itself) are not reported.
#include <cstring>

#include "../check.hpp"
#include "explorer.hpp"

using memlane::weak::Explorer;
using memlane::weak::Order;

namespace {

Order order_of(int order) {
    switch (order) {
        case __ATOMIC_RELAXED: return Order::relaxed;
        case __ATOMIC_RELEASE: return Order::release;
        case __ATOMIC_ACQ_REL: return Order::acquire_release;
        case __ATOMIC_SEQ_CST: return Order::full;
        default: return Order::acquire;
    }
}

void plain(const void* address, std::size_t bytes, bool is_write) {
    Explorer& explorer = Explorer::instance();
    if (explorer.is_observing()) explorer.plain(address, bytes, is_write);
}

template <class T>
T load(const T* at, int order) {
    Explorer& explorer = Explorer::instance();
    if (!explorer.is_observing(at)) return __atomic_load_n(at, __ATOMIC_SEQ_CST);
    return static_cast<T>(explorer.load(at, sizeof *at, order_of(order)));
}

// Also stores to memory, so that the kernel reads some value that was stored.
template <class T>
void store(T* at, T value, int order) {
    Explorer& explorer = Explorer::instance();
    if (explorer.is_observing(at)) explorer.store(at, sizeof *at, value, order_of(order));
    __atomic_store_n(at, value, __ATOMIC_SEQ_CST);
}

template <class T>
T add(T* at, T amount, int order) {
    Explorer& explorer = Explorer::instance();
    if (!explorer.is_observing(at)) return __atomic_fetch_add(at, amount, __ATOMIC_SEQ_CST);
    const T before = static_cast<T>(explorer.add(at, sizeof *at, amount, order_of(order)));
    __atomic_store_n(at, static_cast<T>(before + amount), __ATOMIC_SEQ_CST);
    return before;
}

}  // namespace

extern "C" {

#define PLAIN(bytes)                                                              \
    void __tsan_read##bytes(const void* at) { plain(at, bytes, false); }           \
    void __tsan_write##bytes(void* at) { plain(at, bytes, true); }                 \
    void __tsan_unaligned_read##bytes(const void* at) { plain(at, bytes, false); } \
    void __tsan_unaligned_write##bytes(void* at) { plain(at, bytes, true); }
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)
#undef PLAIN

void __tsan_read_range(const void* at, std::size_t bytes) { plain(at, bytes, false); }
void __tsan_write_range(void* at, std::size_t bytes) { plain(at, bytes, true); }

// The compiler does not instrument copies made by a library, so the linker redirects memcpy here (--wrap).
void* __real_memcpy(void* to, const void* from, std::size_t bytes);
void* __wrap_memcpy(void* to, const void* from, std::size_t bytes) {
    plain(from, bytes, false);
    plain(to, bytes, true);
    return __real_memcpy(to, from, bytes);
}

#define ATOMIC(bits, type)                                                                             \
    type __tsan_atomic##bits##_load(const type* at, int order) { return load(at, order); }             \
    void __tsan_atomic##bits##_store(type* at, type value, int order) { store(at, value, order); }     \
    type __tsan_atomic##bits##_fetch_add(type* at, type amount, int order) { return add(at, amount, order); }
ATOMIC(8, std::uint8_t)
ATOMIC(32, std::uint32_t)
ATOMIC(64, std::uint64_t)
#undef ATOMIC

void __tsan_atomic_thread_fence(int order) {
    Explorer& explorer = Explorer::instance();
    if (explorer.is_observing()) explorer.fence(order_of(order));
}

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void*, void*) {}
void __tsan_vptr_read(void*) {}

}  // extern "C"
