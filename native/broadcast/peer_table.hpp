// What an end with a network tells observers: its queue's participants as it knows them, in a segment without a name, which
// lasts as long as its process has it.
//
// Only its end writes, and nobody waits for what it writes. Observers read it beside that, so they check each number.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "broadcast/ring_layout.hpp"
#include "core/segment.hpp"

namespace memlane::broadcast {

// What a slot has no room for, of a participant on another host. Read by `memlane.inspect`.
struct PeerFacts {
    std::uint32_t is_remote;
    std::uint32_t is_in_the_way;  // its window is full
    std::uint32_t condition;      // 1: its connection is lost; 2: it is dead
    std::uint32_t reserved_0;
    char address[64];  // UTF-8, then zeros; as the two below
    char doing[96];    // words for its state
    char more[80];     // further facts in words
};
static_assert(sizeof(PeerFacts) == 256);

class PeerTable {
public:
    // Throws what creating a segment throws.
    PeerTable(const RingGeometry& g, const core::SegmentId& queue, const std::string& name, bool is_writer,
              bool has_late_readers)
        : rows_(1 + g.n_reader) {
        const core::SegmentPlan plan{core::System::peers,
                                     {g.n_reader, g.max_chunk_bytes, g.max_chunks, is_writer ? 0u : 1u},
                                     0,
                                     {{core::Section::participants, sizeof(core::ParticipantSlot), rows_},
                                      {core::Section::peer_facts, sizeof(PeerFacts), rows_}},
                                     0,
                                     has_late_readers ? core::kLateReaders : 0};
        segment_ = core::Segment::create(plan, queue, name, {}, std::nullopt);
        segment_->remove_name();
    }

    const std::shared_ptr<core::Segment>& segment() const noexcept { return segment_; }
    std::size_t rows() const noexcept { return rows_; }

    // In a forked child the table is still its parent's.
    void write(std::size_t row, const core::ParticipantSlot& slot, const PeerFacts& facts) noexcept {
        if (!segment_->is_open() || !segment_->is_own() || row >= rows_) return;
        copy(slot, segment_->section<core::ParticipantSlot>(core::Section::participants) + row);
        copy(facts, segment_->section<PeerFacts>(core::Section::peer_facts) + row);
    }

    void close() noexcept { segment_->abandon(); }

private:
    template <class Row>
    static void copy(const Row& now, Row* shown) noexcept {
        std::array<std::uint64_t, sizeof(Row) / sizeof(std::uint64_t)> words;
        std::memcpy(words.data(), &now, sizeof now);
        auto* const to = reinterpret_cast<std::uint64_t*>(shown);
        for (std::size_t i = 0; i < words.size(); ++i) core::store_relaxed(to[i], words[i]);
    }

    std::size_t rows_;
    std::shared_ptr<core::Segment> segment_;
};

}  // namespace memlane::broadcast
