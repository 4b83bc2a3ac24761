// The shared memory of a ring as Python holds it: creating it, attaching to it, memoryviews of it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "bindings/ends/held_segment.hpp"
#include "bindings/python/gil.hpp"
#include "broadcast/left_file.hpp"
#include "broadcast/ring_layout.hpp"
#include "core/participants.hpp"
#include "core/sweep.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using broadcast::RingGeometry;

class RingSegment : public HeldSegment {
public:
    RingSegment(std::shared_ptr<core::Segment> segment, const RingGeometry& geometry, std::uint64_t reserved)
        : HeldSegment(std::move(segment)), geometry_(geometry), reserved_(reserved) {}

    static RingSegment create(const RingGeometry& g, const nb::bytes& id, const std::string& name,
                              std::uint64_t reserved_bytes, std::optional<std::size_t> slot, bool has_late_readers,
                              bool is_latest) {
        const auto segment_id = to_array<core::SegmentId>(id);
        const std::uint64_t each = std::min(reserved_bytes, g.max_chunk_bytes);
        check_memory_for(g.max_chunks * (each + g.metadata_size()));
        const WithoutGil no_gil;
        core::sweep_dead_segments(core::kMostPerCreation);
        broadcast::look_at_left_files();
        std::vector<core::ReservedRange> ranges;
        if (each == g.max_chunk_bytes) {
            ranges.push_back({0, g.total_bytes()});
        } else {
            ranges.push_back({0, each, g.max_chunk_bytes, g.max_chunks});
            ranges.push_back({g.metadata_offset(), g.metadata_size() * g.max_chunks});
        }
        const std::uint64_t features = (has_late_readers ? core::kLateReaders : 0) | (is_latest ? core::kLatestOnly : 0);
        const core::SegmentPlan plan = broadcast::plan_of(g, each, features);
        return {core::Segment::create(plan, segment_id, name, ranges, slot), g, each};
    }

    static RingSegment attach(const RingGeometry& g, const std::string& name, const std::optional<nb::bytes>& id,
                              std::optional<std::size_t> slot) {
        std::optional<core::SegmentId> segment_id;
        if (id) segment_id = to_array<core::SegmentId>(*id);
        const WithoutGil no_gil;
        broadcast::look_at_left_files();
        return attached(core::Segment::attach(name, broadcast::plan_of(g), segment_id, slot), g);
    }

    static RingSegment attach_through(std::int64_t pid, int descriptor, const RingGeometry& g, const std::string& name,
                                      const nb::bytes& id, std::size_t slot) {
        const auto segment_id = to_array<core::SegmentId>(id);
        const WithoutGil no_gil;
        broadcast::look_at_left_files();
        return attached(core::Segment::attach_through({pid, descriptor}, name, broadcast::plan_of(g), segment_id, slot), g);
    }

    const RingGeometry& geometry() const noexcept { return geometry_; }
    std::uint64_t reserved() const noexcept { return reserved_; }
    bool is_latest() const noexcept { return (segment_->features() & core::kLatestOnly) != 0; }
    int descriptor() const noexcept { return segment_->file().get(); }

    // For each reader's place, the number of times that it was opened again.
    std::vector<std::uint32_t> openings() {
        check_open();
        const core::Participants participants(*segment_);
        std::vector<std::uint32_t> all(geometry_.n_reader);
        for (std::size_t r = 0; r < all.size(); ++r) all[r] = participants.openings(1 + r);
        return all;
    }

    // For observers: the messages here answer those of the ring with that id.
    void note_work(const nb::bytes& id) {
        check_open();
        std::uint64_t words[2];
        std::memcpy(words, to_array<core::SegmentId>(id).data(), sizeof words);
        for (std::size_t i = 0; i < 2; ++i) core::store_relaxed(segment_->header().answers_to[i], words[i]);
    }

    // A memoryview of bytes that Python knows to lie in the ring. Reserves the space of every chunk in them.
    nb::object view(std::uint64_t offset, std::uint64_t bytes) {
        check_open();
        const std::uint64_t end = std::min(offset + bytes, geometry_.metadata_offset());
        // Each time, because a queue's writer gives back what its chunks do not need.
        if (reserved_ < geometry_.max_chunk_bytes && offset < end) segment_->reserve(offset, end - offset);
        return shared_view(segment_->mapping(), offset, bytes);
    }

    // Tells nobody: a ring without a queue has no participants.
    void close() { segment_->close(); }
    void abandon() noexcept { segment_->abandon(); }

private:
    static RingSegment attached(const std::shared_ptr<core::Segment>& segment, const RingGeometry& g) {
        // A header that states more space than the file has is not trusted: a reader would touch pages without space.
        const std::uint64_t each = std::min(segment->space_each(), g.max_chunk_bytes);
        return {segment, g, os::facts_of(segment->file()).allocated < each * g.max_chunks ? 0 : each};
    }

    RingGeometry geometry_;
    std::uint64_t reserved_;
};

}  // namespace memlane::bindings
