// A reader of a ring (chunks, descriptors, extents) while a peer writes anywhere into the file, and then the writer.
// Reads stay within the file, and the memory that is allocated for them never exceeds the file's space.
//
// Record 0 says which messages are sent and how they are read; the others are scribbles.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "broadcast/frames.hpp"
#include "broadcast/ring_reader.hpp"
#include "broadcast/ring_writer.hpp"
#include "fuzz/identity.hpp"
#include "fuzz/scribbler.hpp"

namespace memlane::fuzz {
namespace {

using namespace broadcast;

constexpr std::uint64_t kChunkBytes = 8192;
constexpr std::uint64_t kSmall = 100;
constexpr std::uint64_t kLarge = 20'000;

RingGeometry geometry_of(bool is_latest) { return {2, kChunkBytes, is_latest ? 4u : 2u}; }

std::shared_ptr<core::Segment> new_segment(bool is_latest) {
    static const core::SegmentId id = own_id();
    const RingGeometry geometry = geometry_of(is_latest);
    auto segment = core::Segment::create(plan_of(geometry, 0, is_latest ? core::kLatestOnly : 0), id, core::name_from(id),
                                         {{0, geometry.total_bytes()}}, RingWriter::kSlot);
    segment->remove_name();
    return segment;
}

void send(RingWriter& writer, unsigned what) {
    const bool is_large = what & 1;
    const ChunkKind kind = what & 2 ? ChunkKind::frames : what & 4 ? ChunkKind::object : ChunkKind::plain;
    const FrameTable table(is_large ? kLarge - 4400 : kSmall, {4096});
    const std::uint64_t bytes = kind == ChunkKind::frames ? table.total() : is_large ? kLarge : kSmall;
    std::vector<std::byte> message(bytes, std::byte{0xC0});
    if (kind == ChunkKind::frames) {
        const MessageHeader header = table.header();
        std::memcpy(message.data(), &header, sizeof header);
        std::memcpy(message.data() + sizeof header, table.sizes().data(), table.sizes().size_bytes());
    }
    const bool fits = bytes <= kChunkBytes && !writer.is_next_kept();
    auto claim = writer.begin_nowait(fits ? bytes : 0).loan;
    if (!claim) return;
    if (fits) {
        std::memcpy(claim->chunk(), message.data(), bytes);
    } else {
        const auto write = [&](ExtentWriter& to) { return to.put(0, bytes, message.data()); };
        const auto look = [](core::LookReason) { return true; };
        const bool lends = writer.ring().is_latest();
        if (claim->spill(bytes, os::Deadline::after(0), write, look, lends).status != core::Status::ok) return;
    }
    claim->publish(kind, bytes);
}

void touch(const std::byte* from, std::uint64_t bytes) {
    const auto load = [&](std::uint64_t at) { static_cast<void>(*const_cast<const volatile std::byte*>(from + at)); };
    for (std::uint64_t i = 0; i < bytes; i += 512) load(i);
    if (bytes > 0) load(bytes - 1);
}

void copy(const RingReader::Sample& sample, const ChunkDescriptor& message, const Frame& frame) {
    const std::unique_ptr<std::byte[]> own(new std::byte[frame.bytes]);
    sample.copy_out(message, frame.offset, frame.bytes, own.get());
}

std::optional<FrameTable> table_of(const RingReader::Sample& sample, const ChunkDescriptor& message) {
    return FrameTable::parse(message.length, [&](std::uint64_t offset, std::uint64_t bytes, void* to) {
        return sample.copy_out(message, offset, bytes, to);
    });
}

// The same steps as in bindings/broadcast/ring_reader.hpp.
void receive(RingReader& reader, bool is_view) {
    if (reader.holds_next()) return;
    auto sample = reader.begin_nowait().loan;
    if (!sample) return;
    const auto message = sample->descriptor();
    if (!message) return sample->finish(0);
    const bool is_extent = message->extent_bytes > 0;
    const os::FileFacts file = os::facts_of(reader.segment().file());
    FUZZ_CHECK(message->length <= (is_extent ? file.allocated : kChunkBytes));
    if (!is_extent) sample->ensure(message->length);
    if (message->kind != ChunkKind::frames) {
        copy(*sample, *message, {0, message->length});
        return sample->finish(message->length);
    }
    const auto table = table_of(*sample, *message);
    if (!table) return sample->finish(0);
    copy(*sample, *message, table->stream());
    if (!is_view || !sample->can_keep(*message)) {
        for (const Frame& frame : table->buffers()) copy(*sample, *message, frame);
        return sample->finish(message->length);
    }
    const auto at = sample->locate(*message);
    if (!at) return sample->finish(0);
    const auto offset = static_cast<std::uint64_t>(at->begin - at->mapping->base());
    FUZZ_CHECK(offset <= at->mapping->bytes() && message->length <= at->mapping->bytes() - offset);
    const std::uint64_t hold = reader.new_hold();
    sample->keep(hold, message->length, &*message);
    for (const Frame& frame : table->buffers()) touch(at->begin + frame.offset, frame.bytes);
    reader.release_held(hold);
}

// A system error is as valid a result as any other.
template <class Step>
void attempt(Step&& step) {
    try {
        step();
    } catch (const core::ShmExhausted&) {
    } catch (const std::system_error&) {
    }
}

}  // namespace

void try_input(Input input) {
    if (input.size() < sizeof(Scribble)) return;
    const unsigned sent = input[0] | input[1] << 8, read = input[2];
    const bool is_latest = input[3] & 2;
    const RingGeometry geometry = geometry_of(is_latest);
    const auto segment = new_segment(is_latest);
    RingWriter writer(segment, geometry, kChunkBytes, input[3] & 1 ? 1 << 20 : 0);
    RingReader reader(segment->join_same_mapping(1), geometry, 0);
    send(writer, sent);
    send(writer, sent >> 4);
    const os::Mapping everything(segment->file(), os::facts_of(segment->file()).bytes);
    const std::uint64_t header = plan_of(geometry).header_offset();
    Scribbler peer(input.subspan(sizeof(Scribble)));
    peer.add_region(reinterpret_cast<std::byte*>(segment->section<ChunkDescriptor>(core::Section::chunk_descriptors)), 128);
    peer.add_region(segment->mapping()->base() + header, segment->bytes() - header);
    peer.add_region(everything.base(), 64);
    peer.add_region(everything.base(), everything.bytes());
    if (everything.bytes() > segment->bytes())
        peer.add_region(everything.base() + segment->bytes(), everything.bytes() - segment->bytes());
    peer.begin();
    for (unsigned i = 0; i < 4; ++i) {
        attempt([&] { receive(reader, read >> i & 1); });
        if (read >> 4 & 1) attempt([&] { send(writer, sent >> (8 + i)); });
    }
    attempt([&] { writer.blocking_slots(); });
    attempt([&] { writer.release_reader(1); });
    attempt([&] { send(writer, sent >> 12); });
    for (std::size_t slot = 0; slot < 3; ++slot) attempt([&] { reader.participants().presence(slot); });
    reader.announce_close();
}

}  // namespace memlane::fuzz
