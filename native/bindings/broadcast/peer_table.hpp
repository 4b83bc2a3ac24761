// The table of a network end's peers as Python holds it.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "bindings/ends/held_segment.hpp"
#include "bindings/python/failures.hpp"
#include "broadcast/peer_table.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class PeerTable : public HeldSegment {
public:
    PeerTable(const broadcast::RingGeometry& g, const nb::bytes& queue, const std::string& name, bool is_writer,
              bool has_late_readers)
        : PeerTable(broadcast::PeerTable(g, to_array<core::SegmentId>(queue), name, is_writer, has_late_readers)) {}

    // `slot` and `facts` have the sizes of the structs: Python packs them.
    void write(std::size_t row, const nb::bytes& slot, const nb::bytes& facts) {
        core::ParticipantSlot one;
        broadcast::PeerFacts other;
        if (slot.size() != sizeof one || facts.size() != sizeof other || row >= table_.rows())
            raise_error(Error::InvalidArgument, "a row of a table of peers has 128 and 256 bytes");
        std::memcpy(&one, slot.c_str(), sizeof one);
        std::memcpy(&other, facts.c_str(), sizeof other);
        table_.write(row, one, other);
    }

    void close() noexcept { table_.close(); }

private:
    explicit PeerTable(broadcast::PeerTable table) : HeldSegment(table.segment()), table_(std::move(table)) {}

    broadcast::PeerTable table_;
};

}  // namespace memlane::bindings
