// io_uring: reads and writes that the kernel takes out of one ring, and whose results it puts into another. Raw system
// calls, nothing is linked. One thread at a time.
#pragma once

#include <poll.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "os/file.hpp"
#include "os/fork.hpp"
#include "os/mapping.hpp"

namespace memlane::os {

// The kernel's interface, as include/uapi/linux/io_uring.h of Linux 5.6 has it: the headers of a machine that builds wheels
// are older than the kernels that run them. Fields that are not used here have no names.
namespace uring {

inline constexpr long kSetup = 425, kEnter = 426, kRegister = 427;  // system calls, the same on every processor
inline constexpr std::uint64_t kRings = 0, kEntries = 0x10000000;   // offsets to map
inline constexpr std::uint32_t kSetupCoopTaskrun = 1u << 8;         // 5.19
inline constexpr std::uint32_t kHasSingleMap = 1u << 0, kHasPlainReads = 1u << 3;  // features; the latter came with them
inline constexpr std::uint32_t kGetEvents = 1u << 0;
inline constexpr unsigned kRegisterBuffers = 0;
enum class Operation : std::uint8_t { read_fixed = 4, write_fixed = 5, poll_add = 6, read = 22, write = 23 };

struct QueueOffsets {  // of the requests, in bytes
    std::uint32_t head, tail, mask, entries, flags, dropped, array, reserved[3];
};
struct ResultOffsets {
    std::uint32_t head, tail, mask, entries, overflow, results, flags, reserved[3];
};
struct Parameters {
    std::uint32_t requests, results, flags, thread_cpu, thread_idle, features, worker_fd, reserved[3];
    QueueOffsets queue;
    ResultOffsets done;
};
struct Request {
    Operation operation;
    std::uint8_t flags;
    std::uint16_t priority;
    std::int32_t fd;
    std::uint64_t offset;
    std::uint64_t address;
    std::uint32_t bytes;
    std::uint32_t events;  // of poll_add
    std::uint64_t tag;
    std::uint64_t reserved[3];
};
struct Done {
    std::uint64_t tag;
    std::int32_t value;
    std::uint32_t flags;
};
static_assert(sizeof(Parameters) == 120 && sizeof(Request) == 64 && sizeof(Done) == 16);

}  // namespace uring

class IoUring {
public:
    using Tag = std::uint64_t;
    struct Result {
        Tag tag;
        std::int32_t value;  // bytes, or -errno
    };

    // For so many requests at a time, those that are not taken yet included. Throws system_error where the kernel has no
    // io_uring (5.6 and later do), or a policy forbids it.
    explicit IoUring(unsigned requests)
        : file_([&] { return made(requests, parameters_); }),
          rings_(file_.file(), bytes_of_rings(parameters_), uring::kRings),
          entries_(file_.file(), parameters_.requests * sizeof(uring::Request), uring::kEntries) {
        // Else a forked child would keep the ring, and with it the registered memory, after the parent has closed it.
        rings_.keep_from_children();
        entries_.keep_from_children();
        for (unsigned at = 0; at < parameters_.requests; ++at) queue_field(parameters_.queue.array + at * sizeof at) = at;
    }

    // The kernel then looks up these pages once, not for each request. If it refuses (RLIMIT_MEMLOCK, say), nothing else
    // changes. Once.
    void try_register(std::span<std::byte> memory) noexcept {
        const iovec range{memory.data(), memory.size()};
        if (::syscall(uring::kRegister, file_.file().get(), uring::kRegisterBuffers, &range, 1) == 0) registered_ = memory;
    }

    // These three only queue.
    void read(Tag tag, const FileDescriptor& file, std::span<std::byte> to, std::uint64_t offset) noexcept {
        queue(tag, is_registered(to) ? uring::Operation::read_fixed : uring::Operation::read, file, to, offset);
    }
    void write(Tag tag, const FileDescriptor& file, std::span<const std::byte> from, std::uint64_t offset) noexcept {
        queue(tag, is_registered(from) ? uring::Operation::write_fixed : uring::Operation::write, file, from, offset);
    }
    // Has a result once the file is readable.
    void watch(Tag tag, const FileDescriptor& file) noexcept {
        queue(tag, uring::Operation::poll_add, file, {}, 0).events = POLLIN;
    }

    // What the kernel has not taken.
    unsigned queued() const noexcept {
        return tail_ - queue_field(parameters_.queue.head).load(std::memory_order_acquire);
    }

    // Hands over what is queued, and waits for a result if `waits`. 0 or an errno; then some may still be queued.
    int submit(bool waits) noexcept {
        for (;;) {
            const unsigned count = queued();
            const long taken = ::syscall(uring::kEnter, file_.file().get(), count, waits ? 1 : 0,
                                         waits ? uring::kGetEvents : 0, nullptr, 0);
            if (taken < 0 && errno != EINTR) return errno;
            if (taken == 0 && count > 0) return EAGAIN;
            if (queued() == 0 && taken >= 0) return 0;
        }
    }

    // The last of what is queued, which the kernel then never takes.
    std::optional<Tag> take_back() noexcept {
        if (queued() == 0) return std::nullopt;
        --tail_;
        queue_field(parameters_.queue.tail).store(tail_, std::memory_order_release);
        return entry(tail_).tag;
    }

    std::optional<Result> take() noexcept {
        auto head = queue_field(parameters_.done.head);
        const unsigned at = head.load(std::memory_order_relaxed);
        if (at == queue_field(parameters_.done.tail).load(std::memory_order_acquire)) return std::nullopt;
        const auto* const results = reinterpret_cast<const uring::Done*>(rings_.base() + parameters_.done.results);
        const uring::Done& result = results[at & (parameters_.results - 1)];
        const Result taken{result.tag, result.value};
        head.store(at + 1, std::memory_order_release);
        return taken;
    }

    // Until there is a result, by another call than submit() makes. A signal may end it.
    void wait() const noexcept {
        pollfd ready{file_.file().get(), POLLIN, 0};
        ::poll(&ready, 1, -1);
    }

private:
    static FileDescriptor made(unsigned requests, uring::Parameters& parameters) {
        // The results need no interrupt of the thread, which looks for them.
        parameters.flags = uring::kSetupCoopTaskrun;
        long fd = ::syscall(uring::kSetup, requests, &parameters);
        if (fd < 0 && errno == EINVAL) {  // before 5.19
            parameters = {};
            fd = ::syscall(uring::kSetup, requests, &parameters);
        }
        FileDescriptor file = beyond_standard_streams(FileDescriptor(static_cast<int>(fd)));
        if (!file.is_open()) throw_errno("cannot make an io_uring");
        constexpr unsigned kNeeded = uring::kHasSingleMap | uring::kHasPlainReads;
        if ((parameters.features & kNeeded) != kNeeded) throw_errno("cannot use an io_uring", ENOSYS);
        return file;
    }

    static std::size_t bytes_of_rings(const uring::Parameters& made) noexcept {
        return std::max<std::size_t>(made.queue.array + made.requests * sizeof(unsigned),
                                     made.done.results + made.results * sizeof(uring::Done));
    }

    std::atomic_ref<unsigned> queue_field(std::size_t offset) const noexcept {
        return std::atomic_ref(*reinterpret_cast<unsigned*>(rings_.base() + offset));
    }
    uring::Request& entry(unsigned at) const noexcept {
        return reinterpret_cast<uring::Request*>(entries_.base())[at & (parameters_.requests - 1)];
    }
    bool is_registered(std::span<const std::byte> memory) const noexcept {
        return memory.data() >= registered_.data() && memory.data() + memory.size() <= registered_.data() + registered_.size();
    }

    uring::Request& queue(Tag tag, uring::Operation what, const FileDescriptor& file, std::span<const std::byte> memory,
                        std::uint64_t offset) noexcept {
        uring::Request& made = entry(tail_);
        made = {};
        made.operation = what;
        made.fd = file.get();
        made.offset = offset;
        made.address = reinterpret_cast<std::uintptr_t>(memory.data());
        made.bytes = static_cast<std::uint32_t>(memory.size());
        made.tag = tag;
        queue_field(parameters_.queue.tail).store(++tail_, std::memory_order_release);
        return made;
    }

    uring::Parameters parameters_{};
    OwnFile file_;
    Mapping rings_, entries_;
    std::span<std::byte> registered_;
    unsigned tail_ = 0;  // of what is queued
};

}  // namespace memlane::os
