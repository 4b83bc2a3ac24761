// A block as remote tiers store it: a header, whose CRC is of the key and the row, and the row.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "tiers/crc32c.hpp"

namespace memlane::tiers {

struct StagedHeader {
    std::array<char, 4> magic{};
    std::uint32_t bytes = 0;  // of the row
    std::uint32_t crc = 0;
    std::uint32_t reserved = 0;
};
static_assert(sizeof(StagedHeader) == 16);

// Copies the row of a value to where it belongs, if it is what was stored under a key of that CRC. The value is in the cache
// of the processor for the second pass.
inline bool place(std::span<const std::byte> value, std::uint32_t crc_of_key, std::span<std::byte> row) noexcept {
    constexpr std::array<char, 4> kMagic{'M', 'L', 'T', '1'};
    StagedHeader header;
    if (value.size() != sizeof header + row.size()) return false;
    std::memcpy(&header, value.data(), sizeof header);
    const auto stored = value.subspan(sizeof header);
    if (header.magic != kMagic || header.bytes != row.size()) return false;
    if (header.crc != Crc32c::of(stored, crc_of_key)) return false;
    std::memcpy(row.data(), stored.data(), row.size());
    return true;
}

}  // namespace memlane::tiers
