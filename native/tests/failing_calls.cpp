// Makes the k-th call of one system call by one library fail, with a chosen errno. Preload it before libc (LD_PRELOAD).
// Calls are numbered per system call, not overall, because threads may make theirs in any order.
//
// While armed, it counts the calls of the watched library and records their names. It recognises them by their return
// addresses, so the library must be compiled without tail calls. Other calls are not counted and never fail.
//
// A call that releases something (close, munmap, ...) does so before it fails, as the kernel does. Every function
// exported here, except `failing_calls_*`, is a call that can fail; tests/base/test_failing_calls.py compares that
// list with what the library imports.
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

constexpr int kMostCalls = 1 << 16;
constexpr int kStall = -1;  // instead of an error: the call lasts until nothing is armed any more

std::uintptr_t first_watched = 0;
std::uintptr_t last_watched = 0;
std::atomic<bool> is_armed{false};
std::atomic<int> calls{0};
std::atomic<int> named{0};  // calls so far of the one that is to fail
int to_fail = 0;
const char* call_to_fail = "";
int with_error = 0;
int record = -1;  // a file that gets what is written
const char* names[kMostCalls];

// Counts the call; true if it is to fail.
bool fails(const char* name, void* from) {
    const auto at = reinterpret_cast<std::uintptr_t>(from);
    if (!is_armed.load() || at < first_watched || at >= last_watched) return false;
    const int number = calls.fetch_add(1) + 1;
    if (number <= kMostCalls) names[number - 1] = name;
    if (std::strcmp(name, call_to_fail) != 0 || named.fetch_add(1) + 1 != to_fail) return false;
    while (with_error == kStall && is_armed.load()) ::usleep(1000);
    return with_error != kStall;
}

}  // namespace

extern "C" {

// Watches the library whose path contains `part`; returns 0 if it is loaded.
int failing_calls_watch(const char* part) {
    first_watched = last_watched = 0;
    ::dl_iterate_phdr(
        [](dl_phdr_info* info, std::size_t, void* wanted) {
            if (std::strstr(info->dlpi_name, static_cast<const char*>(wanted)) == nullptr) return 0;
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const auto& piece = info->dlpi_phdr[i];
                if (piece.p_type != PT_LOAD || (piece.p_flags & PF_X) == 0) continue;
                first_watched = info->dlpi_addr + piece.p_vaddr;
                last_watched = first_watched + piece.p_memsz;
            }
            return 1;
        },
        const_cast<char*>(part));
    return last_watched == 0 ? -1 : 0;
}

// Starts counting, and makes the `number`-th `call` (from 1; 0: none) fail with `error`. Keep `call` alive.
void failing_calls_arm(const char* call, int number, int error) {
    calls = 0;
    named = 0;
    call_to_fail = call;
    to_fail = number;
    with_error = error;
    is_armed = true;
}

// The number of times that the call that is to fail was made so far.
int failing_calls_made() { return named; }

// Stops counting; returns how many calls there were.
int failing_calls_disarm() {
    is_armed = false;
    return calls;
}

// Appends each pwrite of the watched library to the file: inode, offset, bytes (8 bytes each), and what is written. It
// is in the order of the calls if one thread makes them. -1: ends that.
void failing_calls_record(int file) { record = file; }

// The name of the `number`-th call, from 1.
const char* failing_calls_name(int number) { return names[number - 1]; }

// `failure`: what the function returns if it fails, with errno set.
#define REAL(name) static const auto real = reinterpret_cast<decltype(&::name)>(::dlsym(RTLD_NEXT, #name))
#define BEFORE(name, failure)                         \
    REAL(name);                                       \
    if (fails(#name, __builtin_return_address(0))) {  \
        errno = with_error;                           \
        return failure;                               \
    }
#define AFTER(name, call, failure)                    \
    REAL(name);                                       \
    const auto result = call;                         \
    if (fails(#name, __builtin_return_address(0))) {  \
        errno = with_error;                           \
        return failure;                               \
    }                                                 \
    return result

int open(const char* path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) != 0 ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    BEFORE(open, -1);
    return real(path, flags, mode);
}
int fcntl(int fd, int what, ...) {
    va_list rest;
    va_start(rest, what);
    void* const argument = va_arg(rest, void*);
    va_end(rest);
    BEFORE(fcntl, -1);
    return real(fd, what, argument);
}
long syscall(long number, ...) noexcept {
    long a[6];
    va_list rest;
    va_start(rest, number);
    for (long& one : a) one = va_arg(rest, long);
    va_end(rest);
    BEFORE(syscall, -1);
    return real(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
int fchmod(int fd, mode_t mode) noexcept {
    BEFORE(fchmod, -1);
    return real(fd, mode);
}
int fstat(int fd, struct stat* s) noexcept {
    BEFORE(fstat, -1);
    return real(fd, s);
}
int lstat(const char* path, struct stat* s) noexcept {
    BEFORE(lstat, -1);
    return real(path, s);
}
int stat(const char* path, struct stat* s) noexcept {
    BEFORE(stat, -1);
    return real(path, s);
}
int fstatvfs(int fd, struct statvfs* s) noexcept {
    BEFORE(fstatvfs, -1);
    return real(fd, s);
}
int fstatfs(int fd, struct statfs* s) noexcept {
    BEFORE(fstatfs, -1);
    return real(fd, s);
}
int eventfd(unsigned count, int flags) noexcept {
    BEFORE(eventfd, -1);
    return real(count, flags);
}
int timerfd_create(int clock, int flags) noexcept {
    BEFORE(timerfd_create, -1);
    return real(clock, flags);
}
int timerfd_settime(int fd, int flags, const itimerspec* next, itimerspec* before) noexcept {
    BEFORE(timerfd_settime, -1);
    return real(fd, flags, next, before);
}
int epoll_create1(int flags) noexcept {
    BEFORE(epoll_create1, -1);
    return real(flags);
}
int epoll_ctl(int poller, int what, int fd, epoll_event* event) noexcept {
    BEFORE(epoll_ctl, -1);
    return real(poller, what, fd, event);
}
int linkat(int from_directory, const char* from, int to_directory, const char* to, int flags) noexcept {
    BEFORE(linkat, -1);
    return real(from_directory, from, to_directory, to, flags);
}
int unlink(const char* path) noexcept {
    BEFORE(unlink, -1);
    return real(path);
}
int ftruncate(int fd, off_t bytes) noexcept {
    BEFORE(ftruncate, -1);
    return real(fd, bytes);
}
int fallocate(int fd, int mode, off_t offset, off_t bytes) {
    BEFORE(fallocate, -1);
    return real(fd, mode, offset, bytes);
}
off_t lseek(int fd, off_t offset, int whence) noexcept {
    BEFORE(lseek, -1);
    return real(fd, offset, whence);
}
ssize_t pread(int fd, void* to, size_t bytes, off_t offset) {
    BEFORE(pread, -1);
    return real(fd, to, bytes, offset);
}
ssize_t recvmsg(int fd, msghdr* message, int flags) {
    BEFORE(recvmsg, -1);
    return real(fd, message, flags);
}
ssize_t pwrite(int fd, const void* from, size_t bytes, off_t offset) {
    BEFORE(pwrite, -1);
    const auto at = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
    if (record >= 0 && at >= first_watched && at < last_watched) {
        struct stat s{};
        ::fstat(fd, &s);
        const std::uint64_t head[] = {s.st_ino, static_cast<std::uint64_t>(offset), bytes};
        iovec parts[] = {{const_cast<std::uint64_t*>(head), sizeof head}, {const_cast<void*>(from), bytes}};
        if (::writev(record, parts, 2) < 0) std::perror("failing_calls_record");
    }
    return real(fd, from, bytes, offset);
}
void* mmap(void* at, size_t bytes, int protection, int flags, int fd, off_t offset) noexcept {
    BEFORE(mmap, MAP_FAILED);
    return real(at, bytes, protection, flags, fd, offset);
}
int madvise(void* at, size_t bytes, int advice) noexcept {
    BEFORE(madvise, -1);
    return real(at, bytes, advice);
}
int munlock(const void* at, size_t bytes) noexcept {
    BEFORE(munlock, -1);
    return real(at, bytes);
}
int mprotect(void* at, size_t bytes, int protection) noexcept {
    BEFORE(mprotect, -1);
    return real(at, bytes, protection);
}
int getrlimit(__rlimit_resource_t which, struct rlimit* limit) noexcept {
    BEFORE(getrlimit, -1);
    return real(which, limit);
}
int sched_getaffinity(pid_t pid, size_t bytes, cpu_set_t* set) noexcept {
    BEFORE(sched_getaffinity, -1);
    return real(pid, bytes, set);
}
FILE* fopen(const char* path, const char* mode) {
    BEFORE(fopen, nullptr);
    return real(path, mode);
}
size_t fread(void* to, size_t size, size_t count, FILE* file) {
    BEFORE(fread, 0);
    return real(to, size, count, file);
}
DIR* opendir(const char* path) {
    BEFORE(opendir, nullptr);
    return real(path);
}
dirent* readdir(DIR* directory) {
    BEFORE(readdir, nullptr);
    return real(directory);
}

int close(int fd) { AFTER(close, real(fd), -1); }
int munmap(void* at, size_t bytes) noexcept { AFTER(munmap, real(at, bytes), -1); }
int fclose(FILE* file) { AFTER(fclose, real(file), EOF); }
int closedir(DIR* directory) { AFTER(closedir, real(directory), -1); }

// What pthread_atfork calls in the library. It returns its error instead of setting errno.
int __register_atfork(void (*prepare)(), void (*parent)(), void (*child)(), void* handle) {
    static const auto real =
        reinterpret_cast<int (*)(void (*)(), void (*)(), void (*)(), void*)>(::dlsym(RTLD_NEXT, "__register_atfork"));
    if (fails("__register_atfork", __builtin_return_address(0))) return with_error;
    return real(prepare, parent, child, handle);
}

}  // extern "C"
