// Rings for tests: created in /dev/shm without leaving a name, and joined by threads through one mapping, because a
// race detector sees races through the same mapping only.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "broadcast/ring_reader.hpp"
#include "broadcast/ring_writer.hpp"
#include "check.hpp"

namespace memlane::testing {

using broadcast::ChunkKind;
using broadcast::RingGeometry;
using broadcast::RingReader;
using broadcast::RingWriter;

inline constexpr auto keep_waiting = [](core::LookReason) { return false; };

// The loan of a begin() that must have succeeded.
template <class Loan>
Loan must(core::Taken<Loan> taken) {
    CHECK(taken.status == core::Status::ok);
    return std::move(*taken.loan);
}

inline void put(RingWriter::Claim claim, std::uint64_t value) {
    std::memcpy(claim.chunk(), &value, sizeof value);
    claim.publish(ChunkKind::object, sizeof value);
}
inline std::uint64_t take(RingReader::Sample sample) {
    const auto descriptor = sample.descriptor();
    CHECK(descriptor && descriptor->length == sizeof(std::uint64_t));
    std::uint64_t value = 0;
    CHECK(sample.copy_out(*descriptor, 0, sizeof value, &value));
    sample.finish(sizeof value);
    return value;
}

// A different id for every call.
inline core::SegmentId new_id() {
    static std::uint64_t count = 0;
    const std::uint64_t parts[] = {static_cast<std::uint64_t>(::getpid()), ++count};
    core::SegmentId id;
    std::memcpy(id.data(), parts, sizeof parts);
    return id;
}

inline std::shared_ptr<core::Segment> new_segment(const RingGeometry& geometry, std::uint64_t features = 0) {
    static int count = 0;
    const core::SegmentId id = new_id();
    const std::string name = "memlane-test-" + std::to_string(::getpid()) + "-" + std::to_string(count++);
    auto segment = core::Segment::create(broadcast::plan_of(geometry, 0, features), id, name,
                                         {{0, geometry.total_bytes()}}, RingWriter::kSlot);
    segment->remove_name();
    return segment;
}

inline std::unique_ptr<RingReader> new_reader(core::Segment& segment, const RingGeometry& geometry, std::size_t r,
                                              std::uint64_t first = 0) {
    return std::make_unique<RingReader>(segment.join_same_mapping(1 + r), geometry, r, 0, 0, first);
}

// A writer that sends messages through extents, and a reader that takes leases of them.
struct Lent {
    explicit Lent(std::uint64_t bytes = 2 * core::kPage, std::uint64_t pool_bytes = 1u << 20)
        : text(bytes), writer(segment, geometry, 64, pool_bytes) {}

    // Returns the offset of the message's extent.
    std::uint64_t send(unsigned char value) {
        writer.tend(true);
        auto claim = must(writer.begin_nowait(0));
        std::fill(text.begin(), text.end(), value);
        const auto fill = [&](broadcast::ExtentWriter& to) { return to.put(0, text.size(), text.data()); };
        CHECK(claim.spill(text.size(), os::Deadline::never(), fill, keep_waiting, true).status == core::Status::ok);
        claim.publish(ChunkKind::object, text.size());
        return writer.ring().descriptor(0).extent_offset;
    }
    std::unique_ptr<broadcast::Lease> take() {
        auto sample = must(reader.begin_nowait());
        auto lease = sample.lease(*sample.descriptor());
        CHECK(lease != nullptr);
        sample.finish(1);
        return lease;
    }

    RingGeometry geometry{1, 64, 1};
    std::vector<unsigned char> text;
    std::shared_ptr<core::Segment> segment = new_segment(geometry);
    RingWriter writer;
    std::unique_ptr<RingReader> reader_end = new_reader(*segment, geometry, 0);
    RingReader& reader = *reader_end;
};

// Sets every counter in the segment to a few steps before it wraps. Call it before the ends are created.
inline void start_counters_near_their_ends(core::Segment& segment) {
    auto& waits = *segment.section<broadcast::RingWaits>(core::Section::ring_waits);
    waits.published = UINT32_MAX - 1;
    waits.consumed = UINT32_MAX - 1;
    segment.header().membership = UINT32_MAX;
    auto* slots = segment.section<core::ParticipantSlot>(core::Section::participants);
    for (std::uint64_t i = 0; i < 1 + segment.header().geometry[0]; ++i) {
        slots[i].bytes = UINT64_MAX - 1;
        slots[i].waits = UINT64_MAX;
        slots[i].spills = UINT64_MAX;
    }
}

}  // namespace memlane::testing
