// Layout of the byte ring: allocations of any size, one after the other, with one writer.
//
//   offset               length                 content
//   0                    data_buffer_size       the ring; an allocation lies at `address % data_buffer_size`
//   header_offset        1024                   SegmentHeader
//   behind it            by its directory       what a storage adds (store/object_table.hpp)
//
// An allocation, little-endian and signed; neither header nor data crosses the end of the ring:
//
//   0   4          id, below 2**31
//   4   4          bytes of the whole allocation, these 8 included
//   8   size - 8   data
//
// Only the writer knows where allocations lie; other processes get an address and an id from it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "core/layout.hpp"
#include "core/segment.hpp"
#include "core/sync.hpp"

namespace memlane::store {

struct AllocationHeader {
    std::int32_t id;
    std::int32_t size;
};
static_assert(sizeof(AllocationHeader) == 8);
static_assert(offsetof(AllocationHeader, size) == 4);

inline constexpr std::uint64_t kIdEnd = std::uint64_t{1} << 31;  // the id after the last one is 0

inline core::SegmentPlan plan_of(std::uint64_t data_buffer_size) {
    return {core::System::store, {data_buffer_size, 0, 0, 0}, data_buffer_size, {}};
}

// Allocations of the raw ring may be unaligned, so headers are never accessed through a typed pointer.
inline AllocationHeader read_header(const std::byte* at) noexcept {
    AllocationHeader header;
    core::copy_privately(&header, at, sizeof header);
    return header;
}
inline void write_header(std::byte* at, AllocationHeader header) noexcept { std::memcpy(at, &header, sizeof header); }

}  // namespace memlane::store
