// Stores and loads by pread and pwrite, a block a thread at a time.
//
// A store reads its row twice: for the CRC, and by the system. A load reads into memory of the thread, in pieces that stay
// in its cache, and copies them to the row with the CRC: the row is not the system's to write to, so a block that misses
// its deadline can be reported at once.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <system_error>

#include "tiers/disk_work.hpp"

namespace memlane::tiers {

class DiskThread {
public:
    static constexpr std::size_t kPiece = 128u << 10;

    DiskThread(DiskWork& work, Staging& staging) : work_(work), file_(work.file()), staging_(staging) {}

    // Until the tier closes.
    void run() {
        while (const auto next = work_.wait()) work_.finish(*next, done(*next));
    }

private:
    Fault done(const DiskWork::Work& work) {
        try {
            return work.direction() == Direction::store ? stored(work) : loaded(work);
        } catch (const std::system_error& error) {
            return {Fault::Kind::system, error.code().value()};
        }
    }

    Fault stored(const DiskWork::Work& work) {
        const std::span<const std::byte> row = work_.row(work);
        const Block slot = work.request().slot;
        SlotHeader header = work.request().header;
        header.data_crc = Crc32c::of(row, header.seed());
        // Else the row may be another block's by now, with a right checksum under a wrong key. From here on, a change of
        // the row makes the checksum wrong.
        if (const Fault reason = work_.reason_to_stop(work); reason.kind != Fault::Kind::none) return reason;
        int error = file_.write(slot, header);
        if (error == 0) error = is_direct_from(row) ? write(row, slot) : write_in_pieces(row, slot);
        return error == 0 ? Fault{} : Fault{Fault::Kind::system, error};
    }

    bool is_direct_from(std::span<const std::byte> row) const noexcept {
        const auto address = reinterpret_cast<std::uintptr_t>(row.data());
        return !file_.is_direct() || (address | row.size()) % kSlotAlignment == 0;
    }

    int write(std::span<const std::byte> row, Block slot) const noexcept {
        return os::write_at(file_.data(), row.data(), row.size(), file_.data_at(slot));
    }

    int write_in_pieces(std::span<const std::byte> row, Block slot) const noexcept {
        for (std::size_t at = 0; at < row.size(); at += kPiece) {
            const auto piece = row.subspan(at, std::min(kPiece, row.size() - at));
            const std::size_t whole = slot_bytes_of(piece.size());
            std::memcpy(staging_.data(), piece.data(), piece.size());
            std::memset(staging_.data() + piece.size(), 0, whole - piece.size());
            const int error = os::write_at(file_.data(), staging_.data(), whole, file_.data_at(slot) + at);
            if (error != 0) return error;
        }
        return 0;
    }

    Fault loaded(const DiskWork::Work& work) {
        const std::span<std::byte> row = work_.row(work);
        const Block slot = work.request().slot;
        const auto header = file_.read(slot, work.request().header.digest);
        if (!header) return {Fault::Kind::missing};
        std::uint32_t crc = header->seed();
        for (std::size_t at = 0; at < row.size(); at += kPiece) {
            const auto piece = row.subspan(at, std::min(kPiece, row.size() - at));
            const std::size_t whole = file_.is_direct() ? slot_bytes_of(piece.size()) : piece.size();
            if (!os::read_at(file_.data(), staging_.data(), whole, file_.data_at(slot) + at)) return {Fault::Kind::corrupt};
            if (!work_.copy_in(work, piece, staging_.data(), crc)) return {Fault::Kind::expired};
        }
        return {crc == header->data_crc ? Fault::Kind::none : Fault::Kind::corrupt};
    }

    DiskWork& work_;
    const SlotFile& file_;
    Staging& staging_;
};

}  // namespace memlane::tiers
