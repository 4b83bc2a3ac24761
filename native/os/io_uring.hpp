// io_uring: reads and writes that the kernel takes out of one ring, and whose results it puts into another. Raw system
// calls, nothing is linked. One thread at a time.
#pragma once

#include <linux/io_uring.h>
#include <poll.h>
#include <sys/syscall.h>
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
          rings_(file_.file(), bytes_of_rings(parameters_), IORING_OFF_SQ_RING),
          entries_(file_.file(), parameters_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {
        // Else a forked child would keep the ring, and with it the registered memory, after the parent has closed it.
        rings_.keep_from_children();
        entries_.keep_from_children();
        for (unsigned at = 0; at < parameters_.sq_entries; ++at) queue_field(parameters_.sq_off.array + at * sizeof at) = at;
    }

    // The kernel then looks up these pages once, not for each request. If it refuses (RLIMIT_MEMLOCK, say), nothing else
    // changes. Once.
    void try_register(std::span<std::byte> memory) noexcept {
        const iovec range{memory.data(), memory.size()};
        if (::syscall(SYS_io_uring_register, file_.file().get(), IORING_REGISTER_BUFFERS, &range, 1) == 0) registered_ = memory;
    }

    // These three only queue.
    void read(Tag tag, const FileDescriptor& file, std::span<std::byte> to, std::uint64_t offset) noexcept {
        queue(tag, is_registered(to) ? IORING_OP_READ_FIXED : IORING_OP_READ, file, to, offset);
    }
    void write(Tag tag, const FileDescriptor& file, std::span<const std::byte> from, std::uint64_t offset) noexcept {
        queue(tag, is_registered(from) ? IORING_OP_WRITE_FIXED : IORING_OP_WRITE, file, from, offset);
    }
    // Has a result once the file is readable.
    void watch(Tag tag, const FileDescriptor& file) noexcept {
        queue(tag, IORING_OP_POLL_ADD, file, {}, 0).poll32_events = POLLIN;
    }

    // What the kernel has not taken.
    unsigned queued() const noexcept {
        return tail_ - queue_field(parameters_.sq_off.head).load(std::memory_order_acquire);
    }

    // Hands over what is queued, and waits for a result if `waits`. 0 or an errno; then some may still be queued.
    int submit(bool waits) noexcept {
        for (;;) {
            const unsigned count = queued();
            const long taken = ::syscall(SYS_io_uring_enter, file_.file().get(), count, waits ? 1 : 0,
                                         waits ? IORING_ENTER_GETEVENTS : 0, nullptr, 0);
            if (taken < 0 && errno != EINTR) return errno;
            if (taken == 0 && count > 0) return EAGAIN;
            if (queued() == 0 && taken >= 0) return 0;
        }
    }

    // The last of what is queued, which the kernel then never takes.
    std::optional<Tag> take_back() noexcept {
        if (queued() == 0) return std::nullopt;
        --tail_;
        queue_field(parameters_.sq_off.tail).store(tail_, std::memory_order_release);
        return entry(tail_).user_data;
    }

    std::optional<Result> take() noexcept {
        auto head = queue_field(parameters_.cq_off.head);
        const unsigned at = head.load(std::memory_order_relaxed);
        if (at == queue_field(parameters_.cq_off.tail).load(std::memory_order_acquire)) return std::nullopt;
        const auto* const results = reinterpret_cast<const io_uring_cqe*>(rings_.base() + parameters_.cq_off.cqes);
        const io_uring_cqe& result = results[at & (parameters_.cq_entries - 1)];
        const Result taken{result.user_data, result.res};
        head.store(at + 1, std::memory_order_release);
        return taken;
    }

    // Until there is a result, by another call than submit() makes. A signal may end it.
    void wait() const noexcept {
        pollfd ready{file_.file().get(), POLLIN, 0};
        ::poll(&ready, 1, -1);
    }

private:
    static FileDescriptor made(unsigned requests, io_uring_params& parameters) {
        // The results need no interrupt of the thread, which looks for them.
        parameters.flags = IORING_SETUP_COOP_TASKRUN;
        long fd = ::syscall(SYS_io_uring_setup, requests, &parameters);
        if (fd < 0 && errno == EINVAL) {  // before 5.19
            parameters = {};
            fd = ::syscall(SYS_io_uring_setup, requests, &parameters);
        }
        FileDescriptor file = beyond_standard_streams(FileDescriptor(static_cast<int>(fd)));
        if (!file.is_open()) throw_errno("cannot make an io_uring");
        constexpr unsigned kNeeded = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_RW_CUR_POS;  // the latter came with plain reads
        if ((parameters.features & kNeeded) != kNeeded) throw_errno("cannot use an io_uring", ENOSYS);
        return file;
    }

    static std::size_t bytes_of_rings(const io_uring_params& made) noexcept {
        return std::max<std::size_t>(made.sq_off.array + made.sq_entries * sizeof(unsigned),
                                     made.cq_off.cqes + made.cq_entries * sizeof(io_uring_cqe));
    }

    std::atomic_ref<unsigned> queue_field(std::size_t offset) const noexcept {
        return std::atomic_ref(*reinterpret_cast<unsigned*>(rings_.base() + offset));
    }
    io_uring_sqe& entry(unsigned at) const noexcept {
        return reinterpret_cast<io_uring_sqe*>(entries_.base())[at & (parameters_.sq_entries - 1)];
    }
    bool is_registered(std::span<const std::byte> memory) const noexcept {
        return memory.data() >= registered_.data() && memory.data() + memory.size() <= registered_.data() + registered_.size();
    }

    io_uring_sqe& queue(Tag tag, io_uring_op what, const FileDescriptor& file, std::span<const std::byte> memory,
                        std::uint64_t offset) noexcept {
        io_uring_sqe& made = entry(tail_);
        made = {};
        made.opcode = static_cast<std::uint8_t>(what);
        made.fd = file.get();
        made.off = offset;
        made.addr = reinterpret_cast<std::uintptr_t>(memory.data());
        made.len = static_cast<std::uint32_t>(memory.size());
        made.user_data = tag;
        queue_field(parameters_.sq_off.tail).store(++tail_, std::memory_order_release);
        return made;
    }

    io_uring_params parameters_{};
    OwnFile file_;
    Mapping rings_, entries_;
    std::span<std::byte> registered_;
    unsigned tail_ = 0;  // of what is queued
};

}  // namespace memlane::os
