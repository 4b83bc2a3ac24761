// A byte ring as Python holds it: creating it, attaching to it, memoryviews of it, and the calls of its one writer.
#pragma once

#include <nanobind/nanobind.h>

#include <cerrno>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <utility>

#include "bindings/ends/held_segment.hpp"
#include "bindings/python/gil.hpp"
#include "core/sweep.hpp"
#include "store/byte_ring.hpp"
#include "store/byte_ring_writer.hpp"
#include "store/ring_space.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

// Why there is no room for an allocation, for the caller, which raises the error.
struct NoRoom {
    bool is_obstructed;  // by orphans that are still pinned
};

// Python passes only offsets and sizes that lie in the ring.
class ByteRingSegment : public HeldSegment {
public:
    static ByteRingSegment create(std::uint64_t bytes, const nb::bytes& id, const std::string& name) {
        const core::SegmentId segment_id = to_array<core::SegmentId>(id);
        check_memory_for(bytes);
        const WithoutGil no_gil;
        core::sweep_dead_segments(core::kMostPerCreation);
        if (!core::free_name(name)) throw core::SegmentExists(name);
        try {
            const std::uint64_t first = store::RingSpace::first_piece(bytes);
            return {core::Segment::create(store::plan_of(bytes), segment_id, name, {{0, first}}, std::nullopt, bytes - first),
                    bytes, first};
        } catch (const std::system_error& error) {
            if (error.code().value() == EEXIST) throw core::SegmentExists(name);
            throw;
        }
    }

    static ByteRingSegment attach(std::uint64_t bytes, const std::string& name) {
        const WithoutGil no_gil;
        return {core::Segment::attach(name, store::plan_of(bytes), std::nullopt, std::nullopt), bytes, 0};
    }

    static ByteRingSegment attach_through(std::int64_t pid, int descriptor, std::uint64_t bytes, const std::string& name,
                                          const nb::bytes& id) {
        const auto segment_id = to_array<core::SegmentId>(id);
        const WithoutGil no_gil;
        const core::OpenFile holder{pid, descriptor};
        return {core::Segment::attach_through(holder, name, store::plan_of(bytes), segment_id, std::nullopt), bytes, 0};
    }

    int descriptor() const noexcept { return segment_->file().get(); }
    std::uint64_t ring_bytes() const noexcept { return bytes_; }

    // Raises if the ring is closed or a parent process's.
    void check() const {
        if (!segment_->is_own()) raise_failure(nb::none(), "wrong_process");
        check_open();
    }

    nb::object view(std::uint64_t offset, std::uint64_t bytes) const {
        check();
        return shared_view(segment_->mapping(), offset, bytes);
    }
    nb::tuple read_header(std::uint64_t offset) const {
        check();
        if (!space_->has(offset, sizeof(store::AllocationHeader))) return nb::make_tuple(0, 0);
        const store::AllocationHeader header = store::read_header(segment_->mapping()->base() + offset);
        const std::uint64_t size = header.size < 0 ? 0 : static_cast<std::uint64_t>(header.size);
        const bool has_space = size <= bytes_ - offset && space_->has(offset, size);
        return nb::make_tuple(header.id, has_space ? header.size : 0);
    }

    // The calls of the writer. To a signal handler, each is one step.

    store::Allocations& allocations() const noexcept { return writer_->allocations; }
    void set_tenant(const std::shared_ptr<store::Tenant>& tenant) const { writer_->tenant = tenant; }

    store::Room room_for(std::uint64_t bytes) const {
        return writer_->room_for(bytes, [this](std::uint64_t end) {
            if (space_->is_taken(end)) return;
            {
                const WithoutGil no_gil;
                const std::lock_guard not_closed_meanwhile(*in_use_);
                if (segment_->is_open()) space_->take(end);
            }
            check();
        });
    }
    // Checks again: Python code (a key, a signal handler) may have closed the ring since the last check.
    void write_header(std::uint64_t address, std::uint32_t id, std::uint64_t bytes) const {
        check();
        store::write_header(segment_->mapping()->base() + address % bytes_,
                            {static_cast<std::int32_t>(id), static_cast<std::int32_t>(bytes)});
    }

    // Allocates an allocation of `bytes` bytes, header included. Returns its address and id, or NoRoom.
    nb::object allocate(std::uint64_t bytes) const {
        check();
        const store::Room room = room_for(bytes);
        if (room.spot) {
            const std::uint32_t id = allocations().id_end();
            write_header(room.spot->address, id, bytes);
            allocations().add(*room.spot, id, bytes);
            return nb::make_tuple(room.spot->address, id);
        }
        if (room.shortage) throw *room.shortage;
        return nb::cast(NoRoom{room.is_obstructed});
    }

    // Returns the ids of the allocations freed. `is_free(allocation)` may run Python code.
    template <class IsFree>
    nb::list free(std::uint64_t most, IsFree&& is_free) const {
        nb::list freed;
        writer_->free(most, is_free, [&](std::uint32_t id) { freed.append(id); });
        return freed;
    }
    // Calls `is_free(id, offset of the data, bytes of the data)`.
    nb::list free_if(std::uint64_t most, const nb::object& is_free) const {
        check();
        return free(most, [&](const store::Allocation& allocation) {
            constexpr std::uint64_t header = sizeof(store::AllocationHeader);
            const std::uint64_t data = allocation.address % bytes_ + header;
            return nb::cast<bool>(nb::bool_(is_free(allocation.id, data, allocation.bytes - header)));
        });
    }
    void clear() const { writer_->clear(); }

    nb::dict addresses() const {
        nb::dict found;
        for (const store::Allocation& allocation : allocations().all()) found[nb::int_(allocation.id)] = allocation.address;
        return found;
    }

    void close() const {
        const auto alone = until_unused();
        segment_->close();
    }
    void abandon() const noexcept {
        const auto alone = until_unused();
        segment_->abandon();
    }

private:
    ByteRingSegment(std::shared_ptr<core::Segment> segment, std::uint64_t bytes, std::uint64_t reserved)
        : HeldSegment(std::move(segment)),
          bytes_(bytes),
          space_(std::make_shared<store::RingSpace>(*segment_, bytes, reserved)),
          writer_(std::make_shared<store::ByteRingWriter>(bytes)) {}

    // Called with the GIL, so that nobody begins meanwhile. In a forked child a thread that it lacks may hold the lock.
    std::unique_lock<std::mutex> until_unused() const {
        return segment_->is_own() ? std::unique_lock(*in_use_) : std::unique_lock<std::mutex>();
    }

    std::shared_ptr<std::mutex> in_use_ = std::make_shared<std::mutex>();  // held while the ring grows without the GIL
    std::uint64_t bytes_;
    std::shared_ptr<store::RingSpace> space_;
    std::shared_ptr<store::ByteRingWriter> writer_;
};

}  // namespace memlane::bindings
