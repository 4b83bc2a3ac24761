// The writer of a ring for Python. A message that fits its chunk and finds it free: one crossing, one copy; the GIL
// is kept for messages below 64 KiB.
#pragma once

#include <nanobind/nanobind.h>

#include <cstring>

#include "bindings/outgoing.hpp"
#include "bindings/ring_facts.hpp"
#include "bindings/ring_segment.hpp"
#include "broadcast/ring_writer.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using broadcast::ChunkKind;
using broadcast::RingWriter;

class Writer : public End<Writer, RingWriter> {
public:
    Writer(const RingSegment& ring, std::vector<std::int64_t> ranks, const nb::object& codec, std::uint64_t keep_bytes)
        : End(ring.segment(), std::move(ranks), ring.geometry(), ring.reserved(), keep_bytes),
          encode_(codec.attr("encode")),
          outgoing_(codec.attr("outgoing")) {}

    void send(nb::handle object, nb::handle timeout) {
        const Call call(*this, false);
        Outgoing& message = nb::cast<Outgoing&>(outgoing_);
        const Cleared cleared{message};
        encode_(object);
        const broadcast::FrameTable table = message.table();
        const std::uint64_t bytes = message.is_plain() ? message.stream_bytes() : table.total();
        const ChunkKind kind = message.is_plain() ? ChunkKind::object : ChunkKind::frames;
        const os::Deadline deadline = to_deadline(timeout);
        const std::uint64_t limit = core().ring().geometry().max_chunk_bytes;
        if (bytes <= limit) {
            begin(bytes, deadline, timeout);
            std::byte* const chunk = core().chunk();
            copying(bytes, [&] {
                return message.for_each_part(table, [&](std::uint64_t at, std::uint64_t size, const void* from) {
                    std::memcpy(chunk + at, from, size);
                    return 0;
                });
            });
        } else {
            begin(0, deadline, timeout);
            spill(message, table, bytes, deadline, timeout);
        }
        core().publish(kind, bytes);
    }

    nb::object begin_write(nb::handle timeout) {
        const Call call(*this, false);
        const RingGeometry& g = core().ring().geometry();
        begin(g.max_chunk_bytes, to_deadline(timeout), timeout);
        set_holding(true);
        const std::uint64_t at = core().ring().chunk_at(core().position()) * g.max_chunk_bytes;
        return view({core().segment().mapping(), at, g.max_chunk_bytes});
    }

    void end_write(bool publish) {
        if (is_closed() && !publish) return;  // closed inside the block, which then failed: nothing to take back
        const Call call(*this, true);
        set_holding(false);
        if (publish) core().publish(ChunkKind::raw, core().ring().geometry().max_chunk_bytes);
    }

    void wait_until_ready(nb::handle timeout) {
        const Call call(*this, false);
        const os::Deadline deadline = to_deadline(timeout);
        Interruption look;
        const core::Outcome outcome = [&] {
            const nb::gil_scoped_release no_gil;
            return wait_for_all(core(), RingWriter::kSlot, deadline, look);
        }();
        if (outcome.status != core::Status::ok) raise_outcome(*this, outcome, timeout, "not_ready");
        core().segment().remove_name();
    }

    bool release_reader(std::size_t reader) {
        const Call call(*this, false);
        return core().release_reader(reader);
    }

private:
    struct Cleared {
        Outgoing& message;
        ~Cleared() { message.clear(); }
    };

    void begin(std::uint64_t bytes, os::Deadline deadline, nb::handle timeout) {
        core::Outcome outcome = core().begin_nowait(bytes);
        if (outcome.status == core::Status::would_block) {
            Interruption look;
            const nb::gil_scoped_release no_gil;
            outcome = core().begin(bytes, deadline, look);
        }
        if (outcome.status != core::Status::ok) raise_outcome(*this, outcome, timeout);
    }

    void spill(const Outgoing& message, const broadcast::FrameTable& table, std::uint64_t bytes, os::Deadline deadline,
               nb::handle timeout) {
        const os::FileDescriptor& file = core().segment().file();
        const auto write = [&](std::uint64_t extent) {
            return message.for_each_part(table, [&](std::uint64_t at, std::uint64_t size, const void* from) {
                return os::write_at(file, from, size, extent + at);
            });
        };
        Interruption look;
        const core::Outcome outcome = [&] {
            const nb::gil_scoped_release no_gil;
            return core().spill(bytes, deadline, write, look);
        }();
        if (outcome.status != core::Status::ok) raise_outcome(*this, outcome, timeout);
    }

    const nb::object encode_;
    const nb::object outgoing_;
};

}  // namespace memlane::bindings
