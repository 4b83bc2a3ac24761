// A hostile file under a segment's name: attaching to it as a ring, a queue and a storage, and the first calls after
// that. The file was created as a segment; the peer changes it before and during the attach.
//
// Record 0 says what the file is, what it is attached as, and how long it is; the others are scribbles.
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>

#include "broadcast/ring_reader.hpp"
#include "broadcast/ring_writer.hpp"
#include "fuzz/identity.hpp"
#include "fuzz/scribbler.hpp"
#include "store/store_reader.hpp"
#include "store/store_writer.hpp"

namespace memlane::fuzz {
namespace {

constexpr std::uint64_t kRingBytes = 8192;
const broadcast::RingGeometry kGeometry{2, 1000, 3};
const store::StoreGeometry kStore{2, 8, 2000};

const std::string& name() {
    static const std::string own = core::name_from(own_id());
    return own;
}

struct Unlinked {
    ~Unlinked() {
        std::error_code ignored;
        std::filesystem::remove("/dev/shm/" + name(), ignored);
    }
};

void put(store::StoreWriter& writer, std::uint32_t id) {
    const std::uint64_t address = id * 512;
    std::byte* const ring = writer.table().ring_mapping()->base();
    store::write_header(ring + address, {static_cast<std::int32_t>(id), 512});
    writer.offer(id, address, 504);
    writer.refer(id, 1);
}

void read_all(store::ObjectReader& reader) {
    for (std::uint32_t id = 0; id < 3; ++id) {
        const auto object = reader.pin(id * 512, id);
        if (!object) continue;
        FUZZ_CHECK(object->offset <= kRingBytes && object->size <= kRingBytes - object->offset);
        reader.is_valid(*object);
        reader.count(*object);
        reader.unpin(*object);
    }
}

template <class Step>
void attempt(Step&& step) {
    try {
        step();
    } catch (const core::LayoutMismatch&) {
    } catch (const core::SegmentMissing&) {
    } catch (const core::SegmentRefused&) {
    } catch (const core::RankTaken&) {
    } catch (const core::ShmExhausted&) {
    } catch (const std::system_error&) {
    }
}

void attach_ring(bool is_queue) {
    const auto segment = core::Segment::attach(name(), broadcast::plan_of(kGeometry), own_id(),
                                               is_queue ? std::optional<std::size_t>(1) : std::nullopt);
    if (!is_queue) return;
    broadcast::RingReader reader(segment, kGeometry, 0, 0, kGeometry.max_chunk_bytes);
    if (auto sample = reader.begin_nowait().loan) {
        sample->descriptor();
        sample->finish(0);
    }
}

void attach_storage() {
    const auto ring = core::Segment::attach(name(), store::plan_of(kRingBytes), std::nullopt, std::nullopt);
    const auto table = store::ObjectTable::find(*ring, kRingBytes, kStore.n_readers, kStore.max_object_size);
    for (int i = 0; i < 2; ++i) {  // the second may succeed the first in its place
        const auto reader = store::StoreReader::join(*ring, table);
        read_all(*reader);
        reader->announce_close();
    }
}

}  // namespace

void try_input(Input input) {
    if (input.size() < sizeof(Scribble)) return;
    const bool is_store = input[0] & 1, is_other = input[0] & 2, is_queue = input[0] & 4, is_late = input[0] & 8;
    const Unlinked unlinked;
    std::shared_ptr<core::Segment> segment;
    std::shared_ptr<store::StoreWriter> writer;
    if (is_store) {
        segment = core::Segment::create(store::plan_of(kRingBytes), own_id(), name(), {{0, kRingBytes}}, std::nullopt);
        if (!is_late) writer = store::StoreWriter::create(*segment, kRingBytes, kStore, {});
        for (std::uint32_t id = 0; writer && id < 3; ++id) put(*writer, id);
    } else {
        segment = core::Segment::create(broadcast::plan_of(kGeometry), own_id(), name(), {{0, kGeometry.total_bytes()}}, 0);
    }
    // Only before it is mapped: truncating a file under a mapping ends in SIGBUS, which no process can prevent.
    std::uint64_t length = os::facts_of(segment->file()).bytes;
    if (input[1] & 1) {
        std::uint32_t by;
        std::memcpy(&by, input.data() + 4, sizeof by);
        length = input[1] & 2 ? length + (std::uint64_t{by} << (input[2] % 24)) : std::max<std::uint64_t>(length, 4096) - by % 4096;
        os::resize(segment->file(), length);
    }
    const std::uint64_t shown = std::min<std::uint64_t>(length, 64 << 10);
    const os::Mapping everything(segment->file(), shown);
    const std::uint64_t header = is_store ? store::plan_of(kRingBytes).header_offset() : broadcast::plan_of(kGeometry).header_offset();
    Scribbler peer(input.subspan(sizeof(Scribble)));
    if (header + 1024 <= shown) {
        peer.add_region(everything.base() + header, 256);
        peer.add_region(everything.base() + header + 256, 32 * 6);
    }
    peer.add_region(everything.base(), shown);
    peer.begin();
    if (is_late) attempt([&] { writer = store::StoreWriter::create(*segment, kRingBytes, kStore, {}); });
    attempt([&] { is_store == is_other ? attach_ring(is_queue) : attach_storage(); });
    if (writer) attempt([&] { read_all(*writer); });
}

}  // namespace memlane::fuzz
