// Layout of the broadcast ring: n_reader readers, max_chunks chunks of max_chunk_bytes bytes.
//
//   offset                                length              content
//   c * max_chunk_bytes                   max_chunk_bytes     data of chunk c
//   metadata_offset + c * metadata_size   1                   `written` flag of chunk c
//   the byte after it + r                 1                   flag of reader r for chunk c
//   header_offset                         1024                SegmentHeader
//   section participants                  128 * (1 + n)       slot 0: writer, slot 1 + r: reader r
//   section ring_waits                    128                 the two futex words
//   section parked_readers                n                   one byte per reader that sleeps
//   section chunk_descriptors             64 * max_chunks     what memlane's own writer says about a chunk
//   section extent_leases                 n * leases          rows of one byte per reader, set while it keeps an extent
//
// Only the flags decide who may do what (a process that knows only the documented part uses nothing else):
//
//   written  readers   meaning
//   0        ? ? ?     not written: the writer may write, nobody may read
//   1        0 0 0     just written: every reader may read
//   1        x x x     those whose flag is 0 may still read; the writer may not write
//   1        1 1 1     read by all: the writer may write, nobody may read
//
// But for a ring whose readers want the latest message only: see latest.hpp.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>
#include <utility>

#include "core/layout.hpp"
#include "core/segment.hpp"
#include "core/sync.hpp"
#include "os/clock.hpp"

namespace memlane::broadcast {

struct RingGeometry {
    std::uint64_t n_reader;
    std::uint64_t max_chunk_bytes;
    std::uint64_t max_chunks;

    constexpr std::uint64_t metadata_size() const noexcept { return 1 + n_reader; }
    constexpr std::uint64_t metadata_offset() const noexcept { return max_chunk_bytes * max_chunks; }
    constexpr std::uint64_t total_bytes() const noexcept { return (max_chunk_bytes + metadata_size()) * max_chunks; }
    // Messages that may be lent at a time.
    constexpr std::uint64_t leases() const noexcept { return std::clamp<std::uint64_t>((1u << 18) / n_reader, 4, 256); }
};
static_assert(RingGeometry{2, 100, 3}.metadata_offset() == 300);
static_assert(RingGeometry{2, 100, 3}.total_bytes() == 309);

// Readers wait on `published`, the writer on `consumed`. A message increments one only if somebody sleeps on it.
struct RingWaits {
    std::uint32_t published;
    std::uint32_t reserved_0[15];
    std::uint32_t consumed;
    std::uint8_t writer_parked;
    std::uint8_t reserved_1[3];
    std::uint32_t given_back;  // how often the writer gave back space of chunks; `publish` makes it visible
    std::uint32_t reserved_2;
    std::uint64_t latest;  // 1 + the ticket of the latest message, in a ring of that kind (latest.hpp); 0: none
    std::uint8_t reserved_3[40];
};
static_assert(sizeof(RingWaits) == 128);
static_assert(offsetof(RingWaits, consumed) == 64);

// raw: filled by hand. object: one stream of the queue's serializer. frames: broadcast/frames.hpp. plain: MessagePack,
// whatever the serializer. bytes: an unchanged bytes object.
enum class ChunkKind : std::uint32_t { raw = 0, object = 1, frames = 2, plain = 3, bytes = 4 };

// The writer fills it in before it sets `written`. A descriptor of another lap is stale: the chunk was then filled by
// a process that knows only the documented part, and contains raw bytes.
struct ChunkDescriptor {
    std::uint64_t lap;  // 1 at the first lap of the ring
    ChunkKind kind;
    std::uint32_t lease;  // 1 + the row of extent_leases by which readers may keep the extent; 0: they may not
    std::uint64_t length;
    std::uint64_t extent_offset;
    std::uint64_t extent_bytes;
    std::int64_t published_ns;  // CLOCK_MONOTONIC, of the first message after each tick of the coarse clock; else 0
    std::uint64_t reserved_0[2];
};
static_assert(sizeof(ChunkDescriptor) == 64);

// How long a reader's messages took from being published to being taken, of those that have published_ns: one a tick at
// most, so that the others cost no clock. Only the reader writes it.
struct DeliveryTimes {
    static constexpr std::size_t kBuckets = 31;

    std::uint64_t total_ns;
    std::uint64_t counts[kBuckets];  // [i]: of those below 2^i us that are not below 2^(i-1) us; the last has the rest, too

    // `published` may be anything, as a peer wrote it.
    void add(os::Nanoseconds published, os::Nanoseconds now) noexcept {
        if (published > now) return;
        constexpr os::Nanoseconds kMost = 3600 * os::kSecond;
        const os::Nanoseconds taken = now - std::max(published, now - kMost);
        const std::size_t bucket = std::bit_width(static_cast<std::uint64_t>(taken / 1000));
        core::add_single_writer(total_ns, static_cast<std::uint64_t>(taken));
        core::add_single_writer<std::uint64_t>(counts[std::min(bucket, kBuckets - 1)], 1);
    }
};
static_assert(sizeof(DeliveryTimes) == 256);

// `space_each`: bytes of every chunk that the creator reserves. `features`: of core/layout.hpp, as the creator wants them.
inline core::SegmentPlan plan_of(const RingGeometry& g, std::uint64_t space_each = 0, std::uint64_t features = 0) {
    return {core::System::broadcast,
            {g.n_reader, g.max_chunk_bytes, g.max_chunks, 0},
            g.total_bytes(),
            {{core::Section::participants, sizeof(core::ParticipantSlot), 1 + g.n_reader},
             {core::Section::ring_waits, sizeof(RingWaits), 1},
             {core::Section::parked_readers, 1, g.n_reader},
             {core::Section::chunk_descriptors, sizeof(ChunkDescriptor), g.max_chunks},
             {core::Section::extent_leases, static_cast<std::uint32_t>(g.n_reader), g.leases()},
             {core::Section::delivery_times, sizeof(DeliveryTimes), g.n_reader}},
            space_each,
            features};
}

// Bytes of extent_leases. A reader that closed or was released no longer keeps an extent, unless it is kept for good.
inline constexpr std::uint8_t kNotKept = 0, kKept = 1, kKeptForGood = 2;

// Named access to the ring's bytes. Keeps the mapping, not the segment, because views may outlive close().
class Ring {
public:
    Ring(const core::Segment& segment, const RingGeometry& geometry)
        : geometry_(geometry),
          mapping_(segment.mapping()),
          waits_(segment.section<RingWaits>(core::Section::ring_waits)),
          parked_(segment.section<std::uint8_t>(core::Section::parked_readers)),
          descriptors_(segment.section<ChunkDescriptor>(core::Section::chunk_descriptors)),
          leases_(segment.section<std::uint8_t>(core::Section::extent_leases)),
          deliveries_(segment.section<DeliveryTimes>(core::Section::delivery_times)),
          slots_(segment.section<core::ParticipantSlot>(core::Section::participants)),
          is_latest_((segment.features() & core::kLatestOnly) != 0) {}

    // The same ring in another mapping, which begins with it.
    Ring in(std::shared_ptr<os::Mapping> other) const noexcept {
        Ring moved = *this;
        const auto move = [&](auto*& at) {
            at = reinterpret_cast<std::remove_reference_t<decltype(at)>>(other->base() + offset_of(at));
        };
        move(moved.waits_);
        move(moved.parked_);
        move(moved.descriptors_);
        move(moved.leases_);
        move(moved.deliveries_);
        move(moved.slots_);
        moved.mapping_ = std::move(other);
        return moved;
    }

    const RingGeometry& geometry() const noexcept { return geometry_; }
    // Where something of the ring lies in its file.
    std::uint64_t offset_of(const void* at) const noexcept {
        return static_cast<std::uint64_t>(static_cast<const std::byte*>(at) - mapping_->base());
    }
    std::uint64_t chunk_at(std::uint64_t position) const noexcept { return position % geometry_.max_chunks; }
    std::uint64_t lap_at(std::uint64_t position) const noexcept { return position / geometry_.max_chunks + 1; }

    // In a ring of the latest message a ticket takes the place of a position in chunk_at() and lap_at().
    bool is_latest() const noexcept { return is_latest_; }
    std::uint64_t ticket_of(std::uint64_t position, std::uint64_t chunk) const noexcept {
        return position * geometry_.max_chunks + chunk;
    }
    std::uint64_t position_of(std::uint64_t ticket) const noexcept { return ticket / geometry_.max_chunks; }

    std::byte* data(std::uint64_t chunk) const noexcept { return mapping_->base() + chunk * geometry_.max_chunk_bytes; }
    std::uint8_t& written(std::uint64_t chunk) const noexcept { return *flags(chunk); }
    std::uint8_t& consumed_by(std::uint64_t chunk, std::uint64_t reader) const noexcept {
        return flags(chunk)[1 + reader];
    }
    // The same byte, in a ring of the latest message.
    std::uint8_t& kept_by(std::uint64_t chunk, std::uint64_t reader) const noexcept { return consumed_by(chunk, reader); }
    ChunkDescriptor& descriptor(std::uint64_t chunk) const noexcept { return descriptors_[chunk]; }
    std::uint8_t& lease(std::uint64_t row, std::uint64_t reader) const noexcept {
        return leases_[row * geometry_.n_reader + reader];
    }
    DeliveryTimes& deliveries(std::uint64_t reader) const noexcept { return deliveries_[reader]; }
    core::ParticipantSlot& slot_of(std::uint64_t reader) const noexcept { return slots_[1 + reader]; }
    RingWaits& waits() const noexcept { return *waits_; }
    bool is_same_memory(const Ring& other) const noexcept { return mapping_ == other.mapping_; }
    // Copies of this object, and others that keep the memory mapped.
    std::size_t holders() const noexcept { return static_cast<std::size_t>(mapping_.use_count()); }
    std::span<std::uint8_t> parked_readers() const noexcept { return {parked_, geometry_.n_reader}; }

private:
    std::uint8_t* flags(std::uint64_t chunk) const noexcept {
        return reinterpret_cast<std::uint8_t*>(mapping_->base()) + geometry_.metadata_offset() +
               chunk * geometry_.metadata_size();
    }

    RingGeometry geometry_;
    std::shared_ptr<os::Mapping> mapping_;
    RingWaits* waits_;
    std::uint8_t* parked_;
    ChunkDescriptor* descriptors_;
    std::uint8_t* leases_;
    DeliveryTimes* deliveries_;
    core::ParticipantSlot* slots_;
    bool is_latest_;
};

}  // namespace memlane::broadcast
