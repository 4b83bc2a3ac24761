// Stores and loads by io_uring, many at a time, on one thread: for O_DIRECT, where each of them waits for the disk.
//
// All blocks go through memory of the thread. A load must, for the reason in disk_threads.hpp; a store may, because the CRC
// passes over it anyway, and gains more than the copy costs: this memory is registered and in huge pages, while the pieces
// of a row that are contiguous for a disk are mostly of 4 KiB (measured here: 64 KiB 0.82 -> 1.13 GB/s, 1 MiB 0.70 -> 1.25).
//
// A block that the ring refuses, or moves in part, is moved by pread or pwrite: what those say counts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <system_error>
#include <utility>
#include <vector>

#include "os/event.hpp"
#include "os/io_uring.hpp"
#include "os/mapping.hpp"
#include "tiers/disk_work.hpp"

namespace memlane::tiers {

class DiskRing {
public:
    static constexpr std::size_t kBlocks = 32;
    static constexpr std::size_t kStaging = 64u << 20;  // so of large slots fewer, but at least two

    // Throws system_error where there can be none.
    explicit DiskRing(DiskWork& work)
        : work_(work),
          file_(work.file()),
          bell_(work.make_bell()),
          inside_(std::clamp<std::size_t>(kStaging / file_.slot_bytes(), 2, kBlocks)),
          staging_(inside_.size() * file_.slot_bytes()),
          ring_(static_cast<unsigned>(inside_.size() + 1)) {
        ring_.try_register({staging_.data(), staging_.bytes()});
        for (std::size_t at = 0; at < inside_.size(); ++at) free_.push_back(at);
    }

    // Until the tier closes.
    void run() {
        while (const auto first = work_.wait()) {
            begin(*first);
            begin_others();
            while (free_.size() < inside_.size()) {
                wait();
                while (const auto result = ring_.take()) take(*result);
                begin_others();
            }
        }
    }

private:
    static constexpr os::IoUring::Tag kBell = ~os::IoUring::Tag{0};  // the tag of a block is its place in inside_
    static constexpr std::size_t kPiece = 1u << 20;                  // of a copy to a row: a deadline waits for one
    static constexpr std::size_t kAtOnce = 512u << 10;               // that wait for a call: less is slower at 64 KiB

    // A block that the system reads or writes.
    struct Inside {
        DiskWork::Work work;
        SlotHeader header;
        std::span<std::byte> memory;  // a whole slot
    };

    void begin_others() {
        while (!free_.empty()) {
            const auto next = work_.next();
            if (!next) return;
            begin(*next);
        }
    }

    void begin(const DiskWork::Work& work) {
        const std::size_t at = free_.back();
        const bool is_store = work.direction() == Direction::store;
        const Fault fault = tried([&] { return is_store ? begin_store(work, at) : begin_load(work, at); });
        if (fault.kind == Fault::Kind::none) {
            free_.pop_back();
        } else {
            work_.finish(work, fault);
        }
    }

    Fault begin_store(const DiskWork::Work& work, std::size_t at) {
        const std::span<const std::byte> row = work_.row(work);
        SlotHeader header = work.request().header;
        header.data_crc = Crc32c::copy(staged(at).data(), row, header.seed());
        std::memset(staged(at).data() + row.size(), 0, staged(at).size() - row.size());
        // The row may have been another block's already.
        if (const Fault reason = work_.reason_to_stop(work); reason.kind != Fault::Kind::none) return reason;
        if (const int error = file_.write(work.request().slot, header); error != 0) return {Fault::Kind::system, error};
        inside_[at] = Inside{work, header, staged(at)};
        ring_.write(at, file_.data(), staged(at), file_.data_at(work.request().slot));
        send();
        return {};
    }

    Fault begin_load(const DiskWork::Work& work, std::size_t at) {
        const auto header = file_.read(work.request().slot, work.request().header.digest);
        if (!header) return {Fault::Kind::missing};
        inside_[at] = Inside{work, *header, staged(at)};
        ring_.read(at, file_.data(), staged(at), file_.data_at(work.request().slot));
        return {};
    }

    // The disk begins while the next are copied. What is refused stays queued.
    void send() {
        if (ring_.queued() * file_.slot_bytes() >= kAtOnce) static_cast<void>(ring_.submit(false));
    }

    // Until the system is done with some block, or more are there.
    void wait() {
        if (!std::exchange(is_listening_, true)) ring_.watch(kBell, bell_);
        if (ring_.submit(true) == 0) return;
        bool is_stuck = true;
        while (const auto tag = ring_.take_back()) {
            if (*tag != kBell) is_stuck = false;
            take({*tag, 0});
        }
        if (is_stuck) ring_.wait();
    }

    void take(os::IoUring::Result result) {
        if (result.tag == kBell) {
            is_listening_ = false;
            os::take_event(bell_);
            return;
        }
        const auto inside = std::exchange(inside_[result.tag], std::nullopt);
        free_.push_back(result.tag);
        const bool is_whole = result.value >= 0 && static_cast<std::size_t>(result.value) == inside->memory.size();
        const bool is_store = inside->work.direction() == Direction::store;
        work_.finish(inside->work, tried([&] { return is_store ? stored(*inside, is_whole) : loaded(*inside, is_whole); }));
        if (is_store) return;
        begin_others();  // a copy to a row takes its time: the disk has the next meanwhile (1 MiB: 1.62 -> 2.27 GB/s)
        send();
    }

    Fault stored(const Inside& block, bool is_whole) {
        if (is_whole) return {};
        const int error = os::write_at(file_.data(), block.memory.data(), block.memory.size(), at_of(block));
        return error == 0 ? Fault{} : Fault{Fault::Kind::system, error};
    }

    Fault loaded(const Inside& block, bool is_whole) {
        if (!is_whole && !os::read_at(file_.data(), block.memory.data(), block.memory.size(), at_of(block))) {
            return {Fault::Kind::corrupt};
        }
        const std::span<std::byte> row = work_.row(block.work);
        std::uint32_t crc = block.header.seed();
        for (std::size_t at = 0; at < row.size(); at += kPiece) {
            const auto piece = row.subspan(at, std::min(kPiece, row.size() - at));
            if (!work_.copy_in(block.work, piece, block.memory.data() + at, crc)) return {Fault::Kind::expired};
        }
        return {crc == block.header.data_crc ? Fault::Kind::none : Fault::Kind::corrupt};
    }

    template <class Try>
    static Fault tried(const Try& what) {
        try {
            return what();
        } catch (const std::system_error& error) {
            return {Fault::Kind::system, error.code().value()};
        }
    }

    std::span<std::byte> staged(std::size_t at) const noexcept {
        return {staging_.data() + at * file_.slot_bytes(), file_.slot_bytes()};
    }
    std::uint64_t at_of(const Inside& block) const noexcept { return file_.data_at(block.work.request().slot); }

    DiskWork& work_;
    const SlotFile& file_;
    const os::FileDescriptor& bell_;
    bool is_listening_ = false;
    std::vector<std::optional<Inside>> inside_;
    std::vector<std::size_t> free_;  // places, the last used is the next
    os::OwnMemory staging_;
    os::IoUring ring_;
};

}  // namespace memlane::tiers
