// What the machine itself needs: to wake N processes from a futex, and for a copy.
//
//     floor futex READERS MESSAGES     one-way times in ns, all readers pooled, one per line
//     floor copy BYTES SECONDS         GB/s
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

namespace {

constexpr int kMaxMessages = 4096;
constexpr int kMaxReaders = 64;
constexpr unsigned kDeadline = 60;  // seconds, for the whole program

struct alignas(64) Word {
    std::atomic<std::uint32_t> value;
};

struct Shared {
    Word published;
    Word seen[kMaxReaders];
    std::int64_t sent[kMaxMessages];
    std::int64_t received[kMaxReaders][kMaxMessages];
};

std::int64_t now() {
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1'000'000'000LL + t.tv_nsec;
}

void sleep_ns(long ns) {
    const timespec t{0, ns};
    nanosleep(&t, nullptr);
}

void futex(std::atomic<std::uint32_t>* word, int operation, std::uint32_t value) {
    syscall(SYS_futex, word, operation, value, nullptr, nullptr, 0);
}

Shared* share() {
    void* at = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (at == MAP_FAILED) std::exit(1);
    return new (at) Shared{};
}

bool is_child() {
    const bool child = fork() == 0;
    if (child) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        alarm(kDeadline);
    }
    return child;
}

void measure_futex(int readers, int messages) {
    Shared& shared = *share();
    for (int r = 0; r < readers; ++r) {
        if (!is_child()) continue;
        for (int i = 0; i < messages; ++i) {
            std::uint32_t seen;
            while ((seen = shared.published.value.load()) <= static_cast<std::uint32_t>(i))
                futex(&shared.published.value, FUTEX_WAIT, seen);
            shared.received[r][i] = now();
            shared.seen[r].value = i + 1;
        }
        _exit(0);
    }
    for (int i = 0; i < messages; ++i) {
        for (int r = 0; r < readers; ++r)
            while (shared.seen[r].value.load() < static_cast<std::uint32_t>(i)) sleep_ns(100'000);
        sleep_ns(1'000'000);
        shared.sent[i] = now();
        shared.published.value = i + 1;
        futex(&shared.published.value, FUTEX_WAKE, INT_MAX);
    }
    while (wait(nullptr) > 0) {}
    for (int r = 0; r < readers; ++r)
        for (int i = 0; i < messages; ++i)
            std::printf("%lld\n", static_cast<long long>(shared.received[r][i] - shared.sent[i]));
}

void measure_copy(std::size_t bytes, double seconds) {
    const auto from = std::make_unique<char[]>(bytes);
    const auto to = std::make_unique<char[]>(bytes);
    std::memset(from.get(), 1, bytes);
    std::memset(to.get(), 2, bytes);
    const std::int64_t start = now();
    std::int64_t copies = 0;
    while (now() - start < seconds * 1e9) {
        std::memcpy(to.get(), from.get(), bytes);
        asm volatile("" ::"r"(to.get()) : "memory");
        ++copies;
    }
    std::printf("%f\n", static_cast<double>(copies) * static_cast<double>(bytes) / static_cast<double>(now() - start));
}

}  // namespace

int main(int count, char** arguments) {
    alarm(kDeadline);
    const auto number = [&](int i) { return i < count ? std::atof(arguments[i]) : 0.0; };
    const char* what = count > 1 ? arguments[1] : "";
    if (!std::strcmp(what, "futex") && number(2) <= kMaxReaders && number(3) <= kMaxMessages)
        measure_futex(static_cast<int>(number(2)), static_cast<int>(number(3)));
    else if (!std::strcmp(what, "copy"))
        measure_copy(static_cast<std::size_t>(number(2)), number(3));
    else
        return 2;
}
