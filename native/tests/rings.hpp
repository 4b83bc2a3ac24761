// Rings for tests: created in /dev/shm without leaving a name, and joined by threads through one mapping, because a
// race detector sees races through the same mapping only.
#pragma once

#include <cstring>
#include <memory>
#include <utility>

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

inline std::shared_ptr<core::Segment> new_segment(const RingGeometry& geometry) {
    static int count = 0;
    const core::SegmentId id = new_id();
    const std::string name = "memlane-test-" + std::to_string(::getpid()) + "-" + std::to_string(count++);
    auto segment = core::Segment::create(broadcast::plan_of(geometry), id, name, {{0, geometry.total_bytes()}},
                                         RingWriter::kSlot);
    segment->remove_name();
    return segment;
}

inline std::unique_ptr<RingReader> new_reader(core::Segment& segment, const RingGeometry& geometry, std::size_t r,
                                              std::uint64_t first = 0) {
    return std::make_unique<RingReader>(segment.join_same_mapping(1 + r), geometry, r, 0, first);
}

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
