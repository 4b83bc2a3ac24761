// Sections appended to a segment after its creation, on pages of their own behind everything that is there.
//
// They have a mapping of their own: the segment's mapping stays where it is, because views refer to it.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/errors.hpp"
#include "core/layout.hpp"
#include "core/segment.hpp"
#include "core/sync.hpp"
#include "os/mapping.hpp"

namespace memlane::store {

class Appendix {
public:
    // Called by the only process that appends to this segment. `fill(appendix)` runs before anybody can find
    // the sections. ShmExhausted leaves the segment unchanged.
    template <class Fill>
    static Appendix add(core::Segment& segment, const std::vector<core::PlannedSection>& plan, Fill&& fill) {
        core::SegmentHeader& header = segment.header();
        const std::uint64_t begin = segment.bytes();  // not from the header: a peer may have changed it
        std::vector<core::SectionEntry> entries;
        std::uint64_t end = begin;
        for (const core::PlannedSection& s : plan) {
            end = core::align_up(end, core::kSectionAlignment);
            entries.push_back({s.kind, s.stride, end, s.count, 0});
            end += s.stride * s.count;
        }
        const std::uint64_t bytes = core::align_up(end, core::kPage) - begin;
        const std::uint64_t free = os::free_bytes(segment.file());
        if (bytes > free) throw core::ShmExhausted(ENOSPC, bytes, free);
        if (const int error = os::reserve(segment.file(), begin, bytes)) {
            if (core::is_exhaustion(error)) throw core::ShmExhausted(error, bytes, free);
            os::throw_errno("cannot append " + std::to_string(bytes) + " bytes to a segment", error);
        }
        Appendix appendix = segment.with_memory(bytes, [&] {
            Appendix mapped(segment.file(), begin, begin + bytes, std::move(entries));
            mapped.mapping_->populate(0, bytes);
            return mapped;
        });
        fill(appendix);
        const std::uint32_t count = segment.section_count();
        std::memcpy(header.sections + count, appendix.entries_.data(), appendix.entries_.size() * sizeof(core::SectionEntry));
        header.trailer_end = begin + bytes;
        SYNC_STORE(append);
        core::store_release(header.section_count, count + static_cast<std::uint32_t>(appendix.entries_.size()));
        return appendix;
    }

    // The sections of these kinds that the directory lists now; none if one is missing. Checked against the
    // file, so no byte beyond it is touched. The caller checks that a section is as large as its type.
    static std::optional<Appendix> find(const core::Segment& segment, const std::vector<core::Section>& kinds) {
        const core::SegmentHeader& header = segment.header();
        SYNC_LOAD(append);
        const std::uint32_t listed = std::min<std::uint32_t>(core::load_acquire(header.section_count), core::kMaxSections);
        const os::FileFacts file = os::facts_of(segment.file());
        std::vector<core::SectionEntry> entries;
        std::uint64_t begin = UINT64_MAX;
        std::uint64_t end = 0;
        for (const core::Section kind : kinds) {
            for (std::uint32_t i = 0; i < listed; ++i) {
                const auto entry = core::private_copy(header.sections[i]);
                if (entry.kind != kind) continue;
                const bool fits = entry.offset % core::kSectionAlignment == 0 && entry.offset >= segment.bytes() &&
                                  entry.offset <= file.bytes && entry.stride > 0 && entry.count > 0 &&
                                  entry.count <= (file.bytes - entry.offset) / entry.stride &&
                                  entry.stride * entry.count <= file.allocated;  // reading a hole would allocate it
                if (!fits) throw core::LayoutMismatch(segment.name() + " has a damaged section directory");
                entries.push_back(entry);
                begin = std::min(begin, entry.offset);
                end = std::max(end, entry.offset + entry.stride * entry.count);
                break;
            }
        }
        if (entries.size() != kinds.size()) return std::nullopt;
        return segment.with_memory(end - begin, [&] { return Appendix(segment.file(), begin, end, std::move(entries)); });
    }

    const core::SectionEntry& entry(core::Section kind) const noexcept {
        return *std::find_if(entries_.begin(), entries_.end(), [&](const core::SectionEntry& e) { return e.kind == kind; });
    }
    template <class T>
    T* section(core::Section kind) const noexcept {
        return reinterpret_cast<T*>(mapping_->base() + (entry(kind).offset - begin_));
    }

private:
    Appendix(const os::FileDescriptor& file, std::uint64_t begin, std::uint64_t end, std::vector<core::SectionEntry> entries)
        : begin_(begin),
          mapping_(std::make_shared<os::Mapping>(file, end - begin_, begin_)),
          entries_(std::move(entries)) {}

    std::uint64_t begin_;  // of the mapping in the file
    std::shared_ptr<os::Mapping> mapping_;
    std::vector<core::SectionEntry> entries_;  // private copy, checked
};

}  // namespace memlane::store
