// The calls of the readers and the writer of a store, with arbitrary addresses and ids, while a peer writes anywhere
// into the object table and the byte ring. A pinned object lies within the ring.
//
// Records with region 255 are calls, all others scribbles.
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

#include "fuzz/scribbler.hpp"
#include "stores.hpp"

namespace memlane::fuzz {
namespace {

using testing::Store;

constexpr std::uint8_t kCall = 255;
constexpr int kPatience = 100;  // the default would cost 0.1 s per input whose entries are all closing

class Calls {
public:
    explicit Calls(Store& store) : store_(store), reader_(store.one) {}

    void call(const Scribble& s) {
        const auto id = static_cast<std::uint32_t>(s.offset);
        switch (s.width % 12) {
            case 0: return read(*reader_, s.value, id);
            case 1: return read(*store_.writer, s.value, id);
            case 2: return store_.writer->clear(id % 8);
            case 3: store_.writer->retire(id % 8); return;
            case 4: store_.writer->blockers(id, static_cast<std::uint32_t>(s.value)); return;
            case 5: store_.writer->orphan_blockers(); return;
            case 6: store_.writer->is_read(id, static_cast<std::uint32_t>(s.value)); return;
            case 7:
                if (store_.is_free(id % 8)) store_.fill(id % 8);
                return;
            case 8: return replace(true);
            case 9: return replace(false);
            case 10:  // kept across other calls
                if (const auto object = reader_->pin(s.value, id)) held_.push_back(*object);
                return;
            default:
                if (held_.empty()) return;
                reader_->unpin(held_.back());
                held_.pop_back();
        }
    }

private:
    void read(store::ObjectReader& reader, std::uint64_t address, std::uint32_t id) const {
        const auto object = reader.pin(address, id);
        if (!object) return;
        const std::uint64_t ring = reader.table().ring_bytes();
        FUZZ_CHECK(object->offset <= ring && object->size <= ring - object->offset && object->size >= store::kCountBytes);
        const std::byte* const from = reader.table().at(object->offset);
        std::vector<std::byte> own(from + store::kCountBytes, from + object->size);
        reader.is_valid(*object);
        reader.count(*object);
        if (&reader == store_.writer.get()) store_.writer->count(*object);
        reader.note_progress();
        reader.unpin(*object);
    }

    // Replaces the reader by a successor, after it has closed or died.
    void replace(bool announces) {
        held_.clear();
        if (announces) reader_->announce_close();
        reader_->segment().abandon();
        store_.one.reset();
        reader_.reset();
        try {
            reader_ = store::StoreReader::join(*store_.ring, store_.writer->table(), kPatience);
        } catch (const core::RankTaken&) {  // the table says that no place is free
            reader_ = store_.two;
        }
    }

    Store& store_;
    std::shared_ptr<store::StoreReader> reader_;
    std::vector<store::Object> held_;
};

}  // namespace

void try_input(Input input) {
    Store store{3, 256};
    for (std::uint32_t id = 0; id < 3; ++id) store.put(id);
    const store::ObjectTable& table = store.writer->table();
    std::byte* const ring = store.ring->mapping()->base();

    std::vector<Scribble> records(input.size() / sizeof(Scribble));
    if (!records.empty()) std::memcpy(records.data(), input.data(), records.size() * sizeof(Scribble));
    std::vector<Scribble> calls;
    std::vector<Scribble> scribbles;
    for (const Scribble& s : records) (s.region == kCall ? calls : scribbles).push_back(s);

    Scribbler peer({reinterpret_cast<const std::uint8_t*>(scribbles.data()), scribbles.size() * sizeof(Scribble)});
    peer.add_region(ring, table.ring_bytes());
    peer.add_region(reinterpret_cast<std::byte*>(&table.entry(0)), table.capacity() * table.geometry().stride());
    peer.add_region(reinterpret_cast<std::byte*>(table.slots()), table.participants() * sizeof(core::ParticipantSlot));
    peer.add_region(reinterpret_cast<std::byte*>(&table.facts()), sizeof(store::StoreFacts));
    peer.add_region(reinterpret_cast<std::byte*>(&store.ring->header()), 512);
    Calls all(store);
    peer.begin();
    for (const Scribble& call : calls) all.call(call);
}

}  // namespace memlane::fuzz
