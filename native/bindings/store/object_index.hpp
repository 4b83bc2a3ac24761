// What a storage's writer knows about its objects besides the shared table: keys, references, touches; and
// every step that changes these together with the table and the ring. No Python code runs between the changes
// of a step, so a signal handler finds all of it done, or nothing.
//
// Looking up a key may run Python code, which may raise: before anything has changed, or while it can be undone.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "bindings/python/byte_views.hpp"
#include "bindings/store/store_end.hpp"
#include "bindings/store/store_ring.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

// Protected by the GIL. The ring holds a weak reference only, so dropping a storage leaves its ring usable.
class StoredObjects final : public store::Tenant {
public:
    StoredObjects(std::weak_ptr<store::StoreWriter> end, nb::dict key_index, nb::dict id_index, nb::dict writer_flag,
                  nb::set kept)
        : keys(std::move(key_index)),
          ids(std::move(id_index)),
          references(std::move(writer_flag)),
          touched(std::move(kept)),
          writer_(std::move(end)) {}

    // Raises if the storage is closed, or a parent process's.
    std::shared_ptr<store::StoreWriter> writer() const {
        const auto writer = writer_.lock();
        if (!writer) raise_error(Error::Closed, "this storage is closed");
        if (!writer->segment().is_own()) raise_failure(nb::none(), "wrong_process");
        return writer;
    }

    // Null if the table must not be used: the storage is closed, or a parent process's.
    std::shared_ptr<store::StoreWriter> own_writer() const {
        const auto writer = writer_.lock();
        return writer && writer->segment().is_own() ? writer : nullptr;
    }

    std::uint64_t obstacle(std::uint64_t offset, std::uint64_t bytes) override {
        const auto writer = own_writer();
        return writer ? writer->obstacle(offset, bytes) : 0;
    }

    // Evicts an object, unless it is touched or being read.
    bool release(std::uint32_t id) override {
        const nb::int_ number(id);
        if (touched.contains(number)) return false;
        if (const auto writer = own_writer(); writer && writer->is_in_use(id)) return false;
        if (!ids.contains(number)) {  // allocated by the ring's owner
            forget(id);
            return true;
        }
        const nb::object key = ids[number];
        const nb::object where = keys[key];
        nb::del(keys[key]);
        // Looked up only now: comparing the key may have closed the storage, or forked.
        if (const auto writer = own_writer(); writer && !writer->evict(id)) {  // pinned since
            keys[key] = where;
            return false;
        }
        nb::del(ids[number]);
        forget(id);
        return true;
    }

    void forget_all() override {
        if (const auto writer = own_writer())
            for (const auto [number, key] : ids) writer->clear(nb::cast<std::uint32_t>(number));
        keys.clear();
        ids.clear();
        references.clear();
        touched.clear();
    }

    // Undoes a put that did not finish.
    void take_back(std::uint32_t id) {
        if (const auto writer = own_writer()) writer->take_back(id);
        const nb::int_ number(id);
        if (ids.contains(number)) nb::del(ids[number]);
        forget(id);
    }

    void forget(std::uint32_t id) {
        const nb::int_ number(id);
        if (references.contains(number)) nb::del(references[number]);
        touched.discard(number);
    }

    nb::dict keys;        // key -> (address, id)
    nb::dict ids;         // id -> key
    nb::dict references;  // by id
    nb::set touched;      // ids

private:
    std::weak_ptr<store::StoreWriter> writer_;
};

// Space for an object until it is published. Dropped before that, the object was never there.
class Reservation {
public:
    Reservation(const ByteRingSegment& ring, std::shared_ptr<StoredObjects> objects, std::uint32_t id,
                store::Allocations::Spot spot, std::uint64_t total, std::uint64_t size)
        : ring_(ring), objects_(std::move(objects)), id_(id), spot_(spot), total_(total), size_(size) {
        ring_.write_header(spot_.address, id_, total_);
    }
    Reservation(Reservation&&) noexcept = default;
    ~Reservation() { drop(); }

    std::uint32_t id() const noexcept { return id_; }
    // The 4 count bytes, metadata and data, without the allocation's padding.
    nb::object view() const { return ring_.view(offset(), size_); }

    // Makes the bytes an object, with no references yet.
    void offer() {
        const auto writer = objects_->writer();
        is_offered_ = true;
        writer->offer(id_, spot_.address, size_);
    }

    // Returns its address and id, by which readers get it.
    nb::object publish(nb::handle key) {
        const nb::object where = nb::make_tuple(spot_.address, id_);
        objects_->keys[key] = where;
        objects_->ids[nb::int_(id_)] = key;
        ring_.allocations().add(spot_, id_, total_);
        is_published_ = true;
        return where;
    }

    // The rest of a put once there is space for it.
    nb::object store(nb::handle key, const Parts& metadata, std::size_t metadata_bytes, const Parts& data) {
        const auto mapping = ring_.segment()->mapping();  // another thread may close the ring while the GIL is released
        std::byte* const at = mapping->base() + offset();
        std::memset(at, 0, store::kCountBytes);
        metadata.copy_to(at + store::kCountBytes);
        data.copy_to(at + store::kCountBytes + metadata_bytes);
        offer();
        objects_->writer()->refer(id_, 1);
        objects_->references[nb::int_(id_)] = 1;
        return publish(key);
    }

    void drop() noexcept {
        if (!objects_ || is_published_ || !is_offered_) return;
        is_offered_ = false;
        objects_->take_back(id_);
    }

private:
    std::uint64_t offset() const noexcept { return spot_.address % ring_.ring_bytes() + sizeof(store::AllocationHeader); }

    ByteRingSegment ring_;
    std::shared_ptr<StoredObjects> objects_;
    std::uint32_t id_;
    store::Allocations::Spot spot_;
    std::uint64_t total_;
    std::uint64_t size_;
    bool is_offered_ = false;
    bool is_published_ = false;
};

class ObjectIndex {
public:
    ObjectIndex(const ByteRingSegment& ring, const StoreWriter& end, nb::dict keys, nb::dict ids, nb::dict references,
                nb::set touched)
        : ring_(ring),
          objects_(std::make_shared<StoredObjects>(end.weak(), std::move(keys), std::move(ids), std::move(references),
                                                   std::move(touched))) {
        ring_.set_tenant(objects_);
    }

    // Stores an object with one reference, evicting the oldest objects as needed. Returns its address and id,
    // or NoRoom. `is_free(id, offset, bytes)`, if given, decides in place of the table.
    nb::object put(nb::handle key, nb::handle metadata, std::size_t metadata_bytes, nb::handle parts, std::size_t bytes,
                   const nb::object& is_free) const {
        const Parts head(nb::make_tuple(metadata), metadata_bytes);
        const Parts body(parts, bytes);
        NoRoom why{};
        std::optional<Reservation> space = find(store::kCountBytes + metadata_bytes + bytes, is_free, why);
        return space ? space->store(key, head, metadata_bytes, body) : nb::cast(why);
    }
    nb::object reserve(std::uint64_t size, const nb::object& is_free) const {
        NoRoom why{};
        std::optional<Reservation> space = find(size, is_free, why);
        return space ? nb::cast(std::move(*space)) : nb::cast(why);
    }

    // Sets how many times every reader is to read it, in total.
    void refer(std::uint32_t id, std::uint32_t references) const {
        const auto writer = objects_->writer();
        objects_->references[nb::int_(id)] = nb::int_(references);  // first: it may raise
        if (writer->knows(id)) writer->refer(id, references);
    }

    // Takes one reference back, leaving `left`. Returns false, with nothing changed, if a reader has already read it.
    bool drop_reference(std::uint32_t id, std::uint32_t left) const {
        const auto writer = objects_->writer();
        const nb::int_ number(id), references(left);
        if (writer->knows(id) && !writer->drop_reference(id, left)) return false;
        objects_->references[number] = references;  // replaces a value, so it needs no memory
        return true;
    }

    // Evicts up to 2 x max_object_size, oldest first; returns the ids.
    nb::list free(const nb::object& is_free) const {
        const std::uint64_t most = 2 * objects_->writer()->table().geometry().max_object_size;
        if (!is_free.is_none()) return ring_.free_if(most, is_free);
        return ring_.free(most, [this](const store::Allocation& allocation) { return has_been_read(allocation); });
    }

    // Every reference cycle back to this object passes through these dicts, which can be cleared.
    static int traverse(PyObject* self, visitproc visit, void* arg) noexcept {
        Py_VISIT(Py_TYPE(self));
        if (!nb::inst_ready(self)) return 0;
        const StoredObjects& objects = *nb::inst_ptr<ObjectIndex>(self)->objects_;
        Py_VISIT(objects.keys.ptr());
        Py_VISIT(objects.ids.ptr());
        Py_VISIT(objects.references.ptr());
        return 0;
    }

private:
    static constexpr std::uint64_t kAlignment = 64;  // of allocations: counts never cross a cache line, padded arrays are aligned

    std::optional<Reservation> find(std::uint64_t size, const nb::object& is_free, NoRoom& why) const {
        std::uint64_t total = size + sizeof(store::AllocationHeader);
        if (const std::uint64_t padded = core::align_up(total, kAlignment); padded <= ring_.ring_bytes()) total = padded;
        for (;;) {
            ring_.check();
            store::Room room;
            if (const auto id = next_id()) {
                room = ring_.room_for(total);
                if (room.spot) return Reservation(ring_, objects_, *id, *room.spot, total, size);
            } else {
                room.is_obstructed = objects_->ids.size() < most_objects();
            }
            if (nb::len(free(is_free)) > 0) continue;
            if (room.shortage) throw *room.shortage;
            why.is_obstructed = room.is_obstructed;
            return std::nullopt;
        }
    }

    std::uint64_t most_objects() const { return objects_->writer()->table().geometry().max_objects; }
    // None if the storage is full, or every entry holds a stored object or a pinned orphan.
    std::optional<std::uint32_t> next_id() const {
        if (objects_->ids.size() >= most_objects()) return std::nullopt;
        return objects_->writer()->admitted_from(ring_.allocations().id_end());
    }

    // Allocations that do not belong to the storage have no references, and it must not free them.
    bool has_been_read(const store::Allocation& allocation) const {
        const nb::int_ number(allocation.id);
        if (!objects_->references.contains(number)) return false;
        const auto references = nb::cast<std::int64_t>(objects_->references[number]);
        ring_.check();
        const std::byte* const count =
            ring_.segment()->mapping()->base() + ring_.allocations().offset_of(allocation) + sizeof(store::AllocationHeader);
        return objects_->writer()->is_read_at(allocation.id, count,
                                              static_cast<std::uint64_t>(std::max<std::int64_t>(references, 0)));
    }

    ByteRingSegment ring_;
    std::shared_ptr<StoredObjects> objects_;
};

}  // namespace memlane::bindings
