// The header of a segment: planning, filling in, finding and copying it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "core/layout.hpp"
#include "core/sync.hpp"
#include "os/file.hpp"

namespace memlane::core {

struct PlannedSection {
    Section kind;
    std::uint32_t stride;
    std::uint64_t count;
};

// What a system puts into a segment. The same plan creates the segment and checks it at attach.
struct SegmentPlan {
    System system;
    Geometry geometry;
    std::uint64_t documented_bytes;
    std::vector<PlannedSection> sections;
    // Chosen by the creator; not compared at attach.
    std::uint64_t space_each = 0;
    std::uint64_t features = 0;

    std::uint64_t header_offset() const noexcept { return align_up(documented_bytes, kPage); }
};

inline std::vector<SectionEntry> place_sections(const SegmentPlan& plan) {
    std::vector<SectionEntry> placed;
    std::uint64_t at = plan.header_offset() + sizeof(SegmentHeader);
    for (const PlannedSection& s : plan.sections) {
        at = align_up(at, kSectionAlignment);
        placed.push_back({s.kind, s.stride, at, s.count, 0});
        at += s.stride * s.count;
    }
    return placed;
}

inline std::uint64_t trailer_end_of(const SegmentPlan& plan) {
    const std::vector<SectionEntry> placed = place_sections(plan);
    if (placed.empty()) return plan.header_offset() + kPage;
    return align_up(placed.back().offset + placed.back().stride * placed.back().count, kPage);
}

// Call it when the rest of the segment is ready: the magic, stored last, marks the segment as complete.
inline void fill_in(SegmentHeader& h, const SegmentPlan& plan, const SegmentId& id,
                    const std::vector<SectionEntry>& sections, std::uint64_t bytes) {
    h.layout_major = kLayoutMajor;
    h.layout_minor = kLayoutMinor;
    h.header_offset = plan.header_offset();
    h.trailer_end = bytes;
    h.id = id;
    h.must_understand = plan.features;
    h.system = plan.system;
    h.section_count = static_cast<std::uint32_t>(sections.size());
    h.geometry = plan.geometry;
    h.space_each = plan.space_each;
    std::copy(sections.begin(), sections.end(), h.sections);  // not memcpy, because there may be none
    SYNC_STORE(header);
    store_release(h.magic, kMagic);
}

// A private copy of a complete header, which later writes of a peer cannot change; nullopt if there is none. Checks
// with pread first, because touching a hole of a mapped tmpfs file would allocate a page, or raise SIGBUS if no space
// is left. Copies after the acquire, because what was read before it may be older than the magic.
inline std::optional<SegmentHeader> copy_header(const os::FileDescriptor& file, const SegmentHeader& mapped,
                                                std::uint64_t offset) {
    std::uint64_t magic = 0;
    if (!os::read_at(file, &magic, sizeof magic, offset) || magic != kMagic) return std::nullopt;
    SYNC_LOAD(header);
    if (load_acquire(mapped.magic) != kMagic) return std::nullopt;
    SegmentHeader seen;
    if (!os::read_at(file, &seen, sizeof seen, offset) || seen.header_offset != offset) return std::nullopt;
    return seen;
}

// What people call the segment; empty: nothing. Letters, digits and `._-[]/` only, as a peer may have written anything.
inline std::string label_of(const SegmentHeader& h) {
    std::string label;
    for (const char& each : h.label) {
        const char seen = load_relaxed(each);
        const bool is_letter = (seen >= 'a' && seen <= 'z') || (seen >= 'A' && seen <= 'Z') || (seen >= '0' && seen <= '9');
        if (!is_letter && (seen == 0 || std::strchr("._-[]/", seen) == nullptr)) break;
        label += seen;
    }
    return label;
}
inline void set_label(SegmentHeader& h, const std::string& label) noexcept {
    for (std::size_t i = 0; i < sizeof h.label; ++i) store_relaxed(h.label[i], i < label.size() ? label[i] : '\0');
}

inline std::string to_text(const Geometry& g) {
    std::string text = "(";
    for (std::size_t i = 0; i < g.size(); ++i) {
        if (i > 0) text += ", ";
        text += std::to_string(g[i]);
    }
    return text + ")";
}

// Finds the header without knowing the geometry. Reads the first 1024 bytes of every page that has space.
inline std::optional<SegmentHeader> find_header(const os::FileDescriptor& file) {
    std::uint64_t at = 0;
    while (const auto data = os::next_data(file, at)) {
        at = align_up(*data, kPage);
        SegmentHeader seen;
        if (!os::read_at(file, &seen, sizeof seen, at)) break;
        if (seen.magic == kMagic && seen.header_offset == at) return seen;
        at += kPage;
    }
    return std::nullopt;
}

}  // namespace memlane::core
