// The bytes of a disk tier's pair of files. OPENER.headers: a page that describes the pair, then 64 bytes a slot.
// OPENER.data: the slots, each one row, at multiples of 4096 bytes. One process writes; others may read.
//
// There is no journal and no fsync. A header has the key's digest, and the CRC of the data seeded with it, so that the two may
// reach the disk in any order, or only one of them: whatever does not fit together is a miss.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "core/layout.hpp"
#include "os/file.hpp"
#include "os/file_lock.hpp"
#include "tiers/crc32c.hpp"

namespace memlane::tiers {

inline constexpr std::array<char, 8> kPairMagic{'M', 'E', 'M', 'L', 'T', 'I', 'E', 'R'};
inline constexpr std::uint32_t kPairVersion = 1;
inline constexpr std::uint64_t kSlotAlignment = 4096;

using Digest = std::array<std::byte, 24>;
using Namespace = std::array<std::byte, 16>;

struct SlotHeader {
    Digest digest{};
    Namespace name_space{};
    std::uint64_t sequence = 0;
    std::uint32_t bytes = 0;
    std::uint32_t data_crc = 0;
    std::uint32_t stored = 0;  // when, in seconds since 1970; 0: unknown
    std::uint32_t crc = 0;  // of what stands before it

    // What the CRC of the data begins with.
    std::uint32_t seed() const noexcept {
        return Crc32c::of(std::as_bytes(std::span(name_space)), Crc32c::of(std::as_bytes(std::span(digest))));
    }
    std::uint32_t own_crc() const noexcept {
        return Crc32c::of(std::as_bytes(std::span(this, 1)).first(offsetof(SlotHeader, crc)));
    }
    bool is_valid() const noexcept { return crc == own_crc(); }  // of zeroes it is not zero
};
static_assert(sizeof(SlotHeader) == 64);

struct PairHeader {
    std::array<char, 8> magic{};
    std::uint32_t version = 0;
    std::uint32_t crc = 0;  // of what stands behind it
    std::uint64_t row_bytes = 0;
    std::uint64_t slots = 0;
    std::uint64_t first_sequence = 0;  // slots with less are empty

    std::uint32_t own_crc() const noexcept {
        return Crc32c::of(std::as_bytes(std::span(this, 1)).subspan(offsetof(PairHeader, row_bytes)));
    }
};
static_assert(sizeof(PairHeader) == 40);

// Where things are in their files.
inline std::uint64_t header_at(std::uint64_t slot) noexcept { return core::kPage + slot * sizeof(SlotHeader); }
inline constexpr std::uint64_t kPidAt = 512;  // of the owner; in the first page, outside of what has a CRC
inline std::uint64_t slot_bytes_of(std::uint64_t row_bytes) noexcept { return core::align_up(row_bytes, kSlotAlignment); }

// The lock of the one process that writes.
inline constexpr os::LockRange kPairLock{core::kLockBase, 1};

// Calls `each` with the number and the header of each slot that is not empty. Throws system_error.
template <class Each>
void for_each_header(const os::FileDescriptor& headers, const PairHeader& pair, const Each& each) {
    constexpr std::uint64_t kAtATime = 1 << 14;
    std::vector<SlotHeader> read(std::min(kAtATime, pair.slots));
    for (std::uint64_t first = 0; first < pair.slots; first += read.size()) {
        const std::uint64_t count = std::min<std::uint64_t>(read.size(), pair.slots - first);
        if (!os::read_at(headers, read.data(), count * sizeof(SlotHeader), header_at(first))) return;
        for (std::uint64_t i = 0; i < count; ++i)
            if (read[i].is_valid() && read[i].sequence >= pair.first_sequence) each(first + i, read[i]);
    }
}

}  // namespace memlane::tiers
