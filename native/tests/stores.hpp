// Storages for tests: created in /dev/shm without leaving a name, with all ends on one mapping.
#pragma once

#include <cstring>
#include <memory>
#include <string>

#include "check.hpp"
#include "store/store_reader.hpp"
#include "store/store_writer.hpp"

namespace memlane::testing {

using store::Object;
using store::StoreReader;
using store::StoreWriter;

// Fixed places of `bytes` bytes, used by the ids in turn, replace the ring's allocation.
struct Store {
    std::uint64_t places;
    std::uint64_t bytes;
    std::shared_ptr<core::Segment> ring = new_ring(places * bytes);
    std::shared_ptr<StoreWriter> writer = StoreWriter::create(*ring, places * bytes, {2, 8, bytes}, {});
    std::shared_ptr<StoreReader> one = join();
    std::shared_ptr<StoreReader> two = join();

    std::shared_ptr<StoreReader> join() const { return StoreReader::join(*ring, writer->table()); }
    std::uint64_t address_of(std::uint32_t id) const noexcept { return id % places * bytes; }
    std::uint64_t size() const noexcept { return bytes - sizeof(store::AllocationHeader); }
    std::byte* payload(std::uint64_t address) const noexcept {
        return ring->mapping()->base() + address + sizeof(store::AllocationHeader) + store::kCountBytes;
    }
    std::uint64_t payload_bytes() const noexcept { return size() - store::kCountBytes; }

    void put(std::uint32_t id) const {
        CHECK(is_free(id));
        fill(id);
    }
    bool is_free(std::uint32_t id) const { return writer->admits(id) && writer->obstacle(address_of(id), bytes) == 0; }
    // Stores an object whose place is free.
    void fill(std::uint32_t id) const {
        const std::uint64_t address = address_of(id);
        store::write_header(ring->mapping()->base() + address,
                            {static_cast<std::int32_t>(id), static_cast<std::int32_t>(bytes)});
        std::memset(payload(address) - store::kCountBytes, 0, store::kCountBytes);
        std::memset(payload(address), static_cast<int>(id % 251), payload_bytes());
        writer->offer(id, address, size());
        writer->refer(id, 1);
    }

    static std::shared_ptr<core::Segment> new_ring(std::uint64_t size) {
        static int count = 0;
        const std::string name = "memlane-test-" + std::to_string(::getpid()) + "-store-" + std::to_string(count++);
        auto segment = core::Segment::create(store::plan_of(size), {}, name, {{0, size}}, std::nullopt);
        segment->remove_name();
        return segment;
    }
};

}  // namespace memlane::testing
