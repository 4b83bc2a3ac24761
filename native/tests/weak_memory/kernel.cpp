// What the code under test asks of the kernel while it is explored, answered by the explorer: the linker sends these
// calls here (--wrap). Outside of an exploration futex calls end at once, as timed out, and everything else is real.
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

constexpr long kTick = 100'000;  // ns between two looks at the clock: longer than any spin

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

// A clock of its own for each thread, or the order of looks at it would matter, too. No slice of 100 ms ever ends.
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

// Only futexes come this way. A sleep ends by a wake-up and by nothing else: the slice that would mend a lost
// one in the end never does here.
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

// Of the file that is mapped: a read of the same bytes.
ssize_t __real_pread(int file, void* to, std::size_t bytes, off_t offset);
ssize_t __wrap_pread(int file, void* to, std::size_t bytes, off_t offset) {
    Explorer& explorer = Explorer::instance();
    const ssize_t got = __real_pread(file, to, bytes, offset);
    if (got > 0 && explorer.is_observing())
        explorer.read_by_kernel(mapped_file + offset, static_cast<std::size_t>(got), static_cast<std::byte*>(to));
    return got;
}

// /proc says who a process is; nothing here depends on it, and asking costs more than a whole execution.
FILE* __wrap_fopen(const char*, const char*) { return nullptr; }
int __wrap_stat(const char*, struct stat*) { return -1; }

}  // extern "C"
