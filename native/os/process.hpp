// Facts about processes, from /proc. Used to describe a process, never to decide that it is dead.
#pragma once

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace memlane::os {

// A pid alone identifies no process: pids are reused, and each pid namespace has its own.
struct ProcessIdentity {
    std::uint64_t pid = 0;
    std::uint64_t start_ticks = 0;    // field 22 of /proc/<pid>/stat
    std::uint64_t pid_namespace = 0;  // inode of /proc/<pid>/ns/pid
};

struct ProcessStat {
    bool found = false;
    char state = '?';
    std::uint64_t start_ticks = 0;
};

inline ProcessStat read_process_stat(std::uint64_t pid) noexcept {
    char path[64];
    std::snprintf(path, sizeof path, "/proc/%llu/stat", static_cast<unsigned long long>(pid));
    std::FILE* file = std::fopen(path, "re");
    if (file == nullptr) return {};
    char text[1024];
    const std::size_t n = std::fread(text, 1, sizeof text - 1, file);
    std::fclose(file);
    text[n] = '\0';
    // The command name in field 2 may contain spaces and parentheses, so fields are counted from the last ')'.
    const char* at = std::strrchr(text, ')');
    ProcessStat stat;
    unsigned long long start = 0;
    if (at == nullptr || std::sscanf(at + 1,
                                     " %c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                                     &stat.state, &start) != 2)
        return {};
    stat.found = true;
    stat.start_ticks = start;
    return stat;
}

inline std::uint64_t own_pid_namespace() noexcept {
    struct stat s{};
    return ::stat("/proc/self/ns/pid", &s) == 0 ? static_cast<std::uint64_t>(s.st_ino) : 0;
}

inline std::int64_t own_pid() noexcept { return ::getpid(); }

inline ProcessIdentity own_identity() noexcept {
    const auto pid = static_cast<std::uint64_t>(::getpid());
    return {pid, read_process_stat(pid).start_ticks, own_pid_namespace()};
}

enum class Activity { running, stopped, unknown };

// What a live process is doing; `unknown` if /proc does not show that process (another pid namespace, a reused pid).
inline Activity activity_of(const ProcessIdentity& who) noexcept {
    if (who.pid_namespace == 0 || who.pid_namespace != own_pid_namespace()) return Activity::unknown;
    const ProcessStat stat = read_process_stat(who.pid);
    if (!stat.found || stat.start_ticks != who.start_ticks) return Activity::unknown;
    return stat.state == 'T' || stat.state == 't' ? Activity::stopped : Activity::running;
}

// Threads started while this exists block all signals except faults; the caller's threads handle them.
class SignalsBlocked {
public:
    SignalsBlocked() noexcept {
        sigset_t all;
        ::sigfillset(&all);
        for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) ::sigdelset(&all, fault);  // faulthandler reports them
        ::pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;
    ~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

private:
    sigset_t before_;
};

inline unsigned usable_cores() noexcept {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1;
    return static_cast<unsigned>(CPU_COUNT(&set));
}

}  // namespace memlane::os
