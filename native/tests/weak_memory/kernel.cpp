// The system calls of the code under test; the linker redirects them here (--wrap). The clock, the cores and /proc are
// always simulated. Outside an exploration, futex waits time out at once, wakes do nothing, and reads are not reported.
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdarg>
#include <ctime>

#include "../check.hpp"
#include "kernel.hpp"

namespace memlane::weak {

namespace {

constexpr long kTick = 100'000;  // ns between two reads of the clock: longer than any spin

unsigned cores = 4;
long ticks[kMostThreads + 1];
const std::byte* mapped_file = nullptr;

}  // namespace

void restart_clock() {
    for (long& one : ticks) one = 0;
}

void set_cores(unsigned count) { cores = count; }

void map_files_at(const std::byte* base) { mapped_file = base; }

}  // namespace memlane::weak

using namespace memlane::weak;

extern "C" {

// Each thread has its own clock; otherwise the order of reading it would matter, too. No slice of 100 ms ever ends.
int __wrap_clock_gettime(clockid_t, timespec* now) {
    const Explorer& explorer = Explorer::instance();
    long& mine = ticks[explorer.is_observing() ? explorer.running() : kMostThreads];
    ++mine;
    *now = {1000, mine * kTick};
    return 0;
}

int __wrap_sched_yield() { return 0; }

int __wrap_sched_getaffinity(pid_t, std::size_t bytes, cpu_set_t* set) {
    CPU_ZERO_S(bytes, set);
    for (unsigned i = 0; i < cores; ++i) CPU_SET_S(i, bytes, set);
    return 0;
}

// Only futex calls arrive here. Only a wake-up ends a sleep: the slice, which would eventually hide a lost one, never
// ends here.
long __wrap_syscall(long number, ...) {
    CHECK(number == SYS_futex);
    va_list arguments;
    va_start(arguments, number);
    const auto* word = va_arg(arguments, const std::uint32_t*);
    const int operation = va_arg(arguments, int);
    const auto expected = va_arg(arguments, std::uint32_t);
    va_end(arguments);
    Explorer& explorer = Explorer::instance();
    if (operation == FUTEX_WAKE) {
        if (explorer.is_observing()) explorer.futex_wake(word);
        return 0;
    }
    CHECK(operation == FUTEX_WAIT_BITSET);
    if (explorer.is_observing() && explorer.futex_wait(word, expected)) return 0;
    errno = explorer.is_observing() ? EAGAIN : ETIMEDOUT;
    return -1;
}

// A read of the mapped file is reported as a read of the same bytes of the mapping.
ssize_t __real_pread(int file, void* to, std::size_t bytes, off_t offset);
ssize_t __wrap_pread(int file, void* to, std::size_t bytes, off_t offset) {
    Explorer& explorer = Explorer::instance();
    const ssize_t got = __real_pread(file, to, bytes, offset);
    if (got > 0 && explorer.is_observing())
        explorer.read_by_kernel(mapped_file + offset, static_cast<std::size_t>(got), static_cast<std::byte*>(to));
    return got;
}

// /proc identifies processes. Nothing here depends on that, and reading it costs more than a whole execution.
FILE* __wrap_fopen(const char*, const char*) { return nullptr; }
int __wrap_stat(const char*, struct stat*) { return -1; }

}  // extern "C"
