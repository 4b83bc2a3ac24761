// One end of a storage as Python holds it, and an object that it has pinned.
//
// `get`, `view` and the like may run in several threads at once; the GIL serializes the calls that they make
// here. The writer's own calls are kept apart in Python (memlane.store.ring).
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/ends/participant.hpp"
#include "bindings/python/buffer.hpp"
#include "bindings/python/byte_views.hpp"
#include "bindings/python/failures.hpp"
#include "store/object_reader.hpp"
#include "store/store_reader.hpp"
#include "store/store_writer.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using store::Object;
using store::ObjectReader;

// An address or id as Python code gives it: anything with `__index__` but a bool. None if it is negative or
// beyond 63 bits, where nothing is stored.
inline std::optional<std::uint64_t> number_from(const char* name, nb::handle value) {
    if (!PyLong_CheckExact(value.ptr()))
        return number_from(name, installed(Function::integer)(name, value));
    int overflow = 0;
    const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    return overflow == 0 && number >= 0 ? std::optional<std::uint64_t>(number) : std::nullopt;
}

// An object whose bytes do not change until this and every buffer made from it are gone.
class PinnedObject {
public:
    PinnedObject(const std::shared_ptr<ObjectReader>& end, std::shared_ptr<os::Mapping> shown, const Object& object)
        : ring_(end->table().ring_mapping()),
          shown_(std::move(shown)),
          object_(object),
          lease_(nullptr, [end = std::weak_ptr(end), ring = ring_, shown = shown_, object](void*) {
              if (const auto reader = end.lock(); reader && reader->segment().is_own()) reader->unpin(object);
          }) {}

    // Metadata and data, read-only.
    nb::object data() const {
        std::byte* const at = shown_->base() + object_.offset + store::kCountBytes;
        return view_of(nb::cast(Buffer(lease_, at, object_.size - store::kCountBytes, true)));
    }
    nb::object count() const { return shared_view(ring_, object_.offset, store::kCountBytes); }
    ViewLease lease() const { return {lease_, shown_->base() + object_.offset, object_.size}; }
    const Object& object() const noexcept { return object_; }

    // Buffers that still exist keep the pin.
    void release() noexcept { lease_.reset(); }

private:
    std::shared_ptr<os::Mapping> ring_;
    std::shared_ptr<os::Mapping> shown_;
    Object object_;
    std::shared_ptr<void> lease_;
};

template <class Core>
class StoreEnd {
public:
    explicit StoreEnd(std::shared_ptr<Core> core) : core_(std::move(core)) {}
    StoreEnd(const StoreEnd&) = delete;
    StoreEnd& operator=(const StoreEnd&) = delete;
    ~StoreEnd() { finish(false); }

    Core& core() const {
        if (!core_) raise_error(Error::Closed, "this storage is closed");
        if (!core_->segment().is_own()) raise_failure(nb::none(), "wrong_process");
        return *core_;
    }
    void check() const { core(); }
    std::weak_ptr<Core> weak() const noexcept { return core_; }
    bool is_closed() const noexcept { return !core_; }

    // None unless an object is stored under that id at that address.
    std::optional<PinnedObject> pin(nb::handle address, nb::handle id) const {
        const auto at = number_from("address", address);
        const auto number = number_from("monotonic_id", id);
        Core& end = core();  // not earlier: numbers that are not ints run Python, which may close this end
        if (!at || !number || *at / 2 >= end.table().ring_bytes() || *number >= store::kIdEnd) return std::nullopt;
        std::shared_ptr<os::Mapping> shown = end.shown();  // first: a failure here leaves nothing pinned
        const auto object = end.pin(*at, static_cast<std::uint32_t>(*number));
        if (!object) return std::nullopt;
        return PinnedObject(core_, std::move(shown), *object);
    }

    // True if all bytes read so far were the object's own.
    bool is_valid(const PinnedObject& pinned) const { return core().is_valid(pinned.object()); }

    void note_progress() const { core().note_progress(); }

    std::size_t slot() const { return core().slot(); }
    std::vector<std::int64_t> ranks() const {
        std::vector<std::int64_t> places(core().table().geometry().n_readers);
        for (std::size_t i = 0; i < places.size(); ++i) places[i] = static_cast<std::int64_t>(i);
        return places;
    }
    nb::tuple participant(std::size_t slot) const {
        return participant_of(core().participants(), core().table().participants(), core().slot(), slot);
    }

    nb::bytes secret() const {
        const store::Secret secret = core().table().facts().secret;
        return nb::bytes(secret.data(), secret.size());
    }

    // max_objects, puts, hits, evictions, objects, bytes
    nb::tuple counters() const {
        const store::StoreFacts& facts = core().table().facts();
        return nb::make_tuple(core().table().geometry().max_objects, core::load_relaxed(facts.puts),
                              core::load_relaxed(facts.hits), core::load_relaxed(facts.evictions),
                              core::load_relaxed(facts.objects), core::load_relaxed(facts.bytes));
    }

    // The reads that each reader still owes, by place, of all stored objects. Scans the whole table.
    std::vector<std::uint64_t> outstanding() const {
        const store::ObjectTable& table = core().table();
        std::vector<std::uint64_t> sums(table.geometry().n_readers, 0);
        for (std::uint64_t i = 0; i < table.capacity(); ++i) {
            const store::ObjectEntry& entry = table.entry(i);
            if (!store::is_live(core::load_acquire(entry.stamp))) continue;
            const std::uint32_t references = core::load_relaxed(entry.references);
            for (std::size_t r = 0; r < sums.size(); ++r) {
                const std::uint32_t reads = core::load_relaxed(table.usage(i, 1 + r).reads);
                sums[r] += references > reads ? references - reads : 0;
            }
        }
        return sums;
    }

    // `announce` tells the peers; otherwise this looks like a death to them.
    void finish(bool announce) noexcept {
        if (!core_) return;
        if (announce && core_->segment().is_own()) core_->announce_close();
        core_->segment().abandon();
        core_.reset();  // the only owner, so a late unpin cannot touch the pins of a successor
    }

    // Ends a read, and counts it if `counts`. False, with nothing changed, if it read any bytes not the object's own.
    bool finish_read(const PinnedObject& pinned, bool counts) const {
        if (!is_valid(pinned)) return false;
        if (counts) core().count(pinned.object());
        core().note_progress();
        return true;
    }

    // Counts one more read of the object whose read count `view` shows.
    void count(nb::handle view) const {
        const ByteView bytes(view, ByteView::Access::write);
        if (bytes.size() < store::kCountBytes) raise_error(Error::InvalidArgument, "a read count has 4 bytes");
        if (const auto object = object_of(bytes)) {
            core().count(*object);
            core().unpin(*object);
        } else {
            store::add_to_documented_count(static_cast<std::byte*>(bytes.data()));
        }
    }

private:
    // Pins the object whose read count `bytes` is.
    std::optional<Object> object_of(const ByteView& bytes) const {
        const store::ObjectTable& table = core().table();
        const std::byte* const ring = table.ring_mapping()->base();
        const auto* const at = static_cast<const std::byte*>(bytes.data());
        if (at < ring + sizeof(store::AllocationHeader) || at > ring + table.ring_bytes() - store::kCountBytes) return std::nullopt;
        const auto offset = static_cast<std::uint64_t>(at - ring) - sizeof(store::AllocationHeader);
        const store::AllocationHeader header = store::read_header(ring + offset);
        const auto id = static_cast<std::uint32_t>(header.id);
        const std::uint64_t address = core::load_relaxed(table.entry(table.index_of(id)).address);
        if (header.id < 0 || table.offset_of(address) != offset) return std::nullopt;
        return core().pin(address, id);
    }

    std::shared_ptr<Core> core_;
};

class StoreReader : public StoreEnd<store::StoreReader> {
public:
    using StoreEnd::StoreEnd;
};

class StoreWriter : public StoreEnd<store::StoreWriter> {
public:
    using StoreEnd::StoreEnd;

    // True if every reader has read object `id` `references` times. The table decides; for bytes that are no
    // object of it, the count in them does.
    bool is_read(std::uint32_t id, nb::handle view, std::uint64_t references) const {
        const ByteView bytes(view, ByteView::Access::read);
        if (bytes.size() < store::kCountBytes) raise_error(Error::InvalidArgument, "a read count has 4 bytes");
        return core().is_read_at(id, static_cast<const std::byte*>(bytes.data()), references);
    }

    // (slot, reads that it owes, pins) of every participant that keeps object `id`.
    nb::list blockers(std::uint32_t id, std::uint32_t references) const { return to_list(core().blockers(id, references)); }
    // The same for orphans.
    nb::list orphan_blockers() const { return to_list(core().orphan_blockers()); }

private:
    static nb::list to_list(const std::vector<store::StoreWriter::Blocker>& blockers) {
        nb::list list;
        for (const auto& blocker : blockers) list.append(nb::make_tuple(blocker.slot, blocker.owes, blocker.pins));
        return list;
    }
};

}  // namespace memlane::bindings
