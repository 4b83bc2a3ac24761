// The bytes of a disk tier's pair of files. OPENER.headers: a page that describes the pair, then 64 bytes a slot.
// OPENER.data: the slots, each one row, at multiples of 4096 bytes. One process writes; others may read.
//
// There is no journal and no fsync. A header has the key's digest, and the CRC of the data seeded with it, so that the two may
// reach the disk in any order, or only one of them: whatever does not fit together is a miss.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/layout.hpp"
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
    std::uint32_t reserved = 0;
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
inline std::uint64_t slot_bytes_of(std::uint64_t row_bytes) noexcept { return core::align_up(row_bytes, kSlotAlignment); }

}  // namespace memlane::tiers
