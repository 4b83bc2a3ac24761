// Layout of the object table, which a storage adds to the file of its ring, and the rules for accessing an object.
//
//   section store_facts      128                      what the storage was made for, and counters
//   section participants     128 * (1 + n)            slot 0: writer, slot 1 + r: reader r
//   section object_table     stride * capacity        object `id` has entry `id % capacity`
//
// An entry, `stride` bytes (a multiple of 64):
//
//   0    64         ObjectEntry
//   64   8 * (1+n)  Usage by every participant, by slot
//
// The capacity is a power of two, so it divides 2**31 and ids keep their entries when they wrap. In the ring,
// an object is an allocation at a multiple of 64: 8 bytes of header, 4 bytes of read count, metadata, data.
//
//   entry       pins    meaning
//   live        any     may be read, once pinned
//   closing     any     the writer is looking for pins; readers that pinned the live entry go on reading
//   retired     any     may not be read: new pins are refused; the writer may reuse the entry and its space
//
// An orphan is a live entry that clear() has removed from the writer's index. Its references are 0, so no
// reader owes reads of it. The writer retires it when it needs the entry or its space.
//
// A reader pins, then checks that the entry is live; the writer marks it as closing, then looks for pins. Both have
// a full fence between the two steps, so at least one sees the other. If there is a pin, the entry is live again.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/layout.hpp"
#include "store/appendix.hpp"
#include "store/byte_ring.hpp"

namespace memlane::store {

struct StoreGeometry {
    std::uint64_t n_readers;
    std::uint64_t max_objects;      // stored at once, at most
    std::uint64_t max_object_size;  // 4 count bytes, metadata and data

    constexpr std::uint64_t capacity() const noexcept { return std::bit_ceil(max_objects); }
    constexpr std::uint64_t stride() const noexcept {
        return core::align_up(64 + 8 * (1 + n_readers), core::kCacheLine);
    }
    friend bool operator==(const StoreGeometry&, const StoreGeometry&) = default;
};
static_assert(StoreGeometry{7, 100, 1}.stride() == 128);
static_assert(StoreGeometry{7, 100, 1}.capacity() == 128);
static_assert(kIdEnd % StoreGeometry{1, 65'536, 1}.capacity() == 0);

// Random bytes known only to processes with access to the segment; they sign data that leaves it.
using Secret = std::array<std::byte, 32>;

struct StoreFacts {
    std::uint64_t n_readers;
    std::uint64_t max_objects;
    std::uint64_t max_object_size;
    Secret secret;
    std::uint64_t unlink_when_complete;  // 1: the name is unlinked once all readers have attached

    std::uint64_t puts;  // written by the writer, like all fields below
    std::uint64_t hits;  // references beyond the first
    std::uint64_t evictions;
    std::uint64_t objects;  // stored now
    std::uint64_t bytes;    // of the stored objects
    std::uint64_t reserved_1[3];
};
static_assert(sizeof(StoreFacts) == 128);
static_assert(offsetof(StoreFacts, secret) == 24);
static_assert(offsetof(StoreFacts, puts) == 64);

// stamp: the id, and above it the state.
inline constexpr std::uint64_t kLive = std::uint64_t{1} << 32;
inline constexpr std::uint64_t kClosing = std::uint64_t{2} << 32;
inline constexpr std::uint64_t kRetired = std::uint64_t{4} << 32;
constexpr std::uint64_t live_stamp(std::uint32_t id) noexcept { return kLive | id; }
constexpr std::uint64_t closing_stamp(std::uint32_t id) noexcept { return kClosing | id; }
constexpr std::uint64_t retired_stamp(std::uint32_t id) noexcept { return kRetired | id; }
constexpr bool is_live(std::uint64_t stamp) noexcept { return (stamp & kLive) != 0; }
constexpr bool is_closing(std::uint64_t stamp) noexcept { return (stamp & kClosing) != 0; }

struct ObjectEntry {
    std::uint64_t stamp;
    std::uint64_t address;  // as returned by the ring
    std::uint64_t size;     // 4 count bytes, metadata and data
    std::uint32_t references;
    std::uint32_t reserved_0;
    std::uint64_t reserved_1[4];
};
static_assert(sizeof(ObjectEntry) == 64);

// One participant's reads and pins of one object. `reads` counts up to the object's references; the writer's
// counts those it made in place of readers. `pins` counts the reads in progress in that process.
struct Usage {
    std::uint32_t reads;
    std::uint32_t pins;
};
static_assert(sizeof(Usage) == 8);

inline constexpr std::uint32_t kMostReferences = INT32_MAX;  // the most that the documented read count can hold
inline constexpr std::uint64_t kCountBytes = 4;

inline std::vector<core::PlannedSection> sections_of(const StoreGeometry& g) {
    return {{core::Section::store_facts, sizeof(StoreFacts), 1},
            {core::Section::participants, sizeof(core::ParticipantSlot), 1 + g.n_readers},
            {core::Section::object_table, static_cast<std::uint32_t>(g.stride()), g.capacity()}};
}

// Typed access to the table and the ring's bytes. Keeps both mappings, because views may outlive close().
class ObjectTable {
public:
    // The caller has checked exists_in().
    static ObjectTable add(core::Segment& ring, std::uint64_t ring_bytes, const StoreGeometry& g, const Secret& secret,
                           bool unlink_when_complete) {
        Appendix appendix = Appendix::add(ring, sections_of(g), [&](const Appendix& added) {
            StoreFacts& facts = *added.section<StoreFacts>(core::Section::store_facts);
            facts.n_readers = g.n_readers;
            facts.max_objects = g.max_objects;
            facts.max_object_size = g.max_object_size;
            facts.secret = secret;
            facts.unlink_when_complete = unlink_when_complete ? 1 : 0;
        });
        return {ring, ring_bytes, std::move(appendix), g};
    }

    static bool exists_in(const core::Segment& ring) { return find_sections(ring).has_value(); }

    // `max_objects` is the writer's choice; the other parameters must match.
    static ObjectTable find(const core::Segment& ring, std::uint64_t ring_bytes, std::uint64_t n_readers,
                            std::uint64_t max_object_size) {
        std::optional<Appendix> appendix = find_sections(ring);
        if (!appendix) throw core::LayoutMismatch(ring.name() + " is a ring without a storage");
        const core::SectionEntry& table = appendix->entry(core::Section::object_table);
        const core::SectionEntry& slots = appendix->entry(core::Section::participants);
        const core::SectionEntry& facts = appendix->entry(core::Section::store_facts);
        const auto check = [&](bool fits) {
            if (!fits) throw core::LayoutMismatch(ring.name() + " has a damaged section directory");
        };
        check(facts.stride == sizeof(StoreFacts) && facts.count == 1);  // before they are read
        const auto seen = core::private_copy(*appendix->section<StoreFacts>(core::Section::store_facts));
        const StoreGeometry g{seen.n_readers, seen.max_objects, seen.max_object_size};
        if (g.n_readers != n_readers || g.max_object_size != max_object_size)
            throw core::LayoutMismatch(ring.name() + " has a storage for " + std::to_string(g.n_readers) +
                                       " readers and objects of " + std::to_string(g.max_object_size) +
                                       " bytes, not for " + std::to_string(n_readers) +
                                       " readers and objects of " + std::to_string(max_object_size) + " bytes");
        check(g.max_objects > 0 && g.max_objects <= kIdEnd && table.count == g.capacity() && table.stride == g.stride() &&
              slots.count == 1 + g.n_readers && slots.stride == sizeof(core::ParticipantSlot));
        return {ring, ring_bytes, std::move(*appendix), g};
    }

    const StoreGeometry& geometry() const noexcept { return geometry_; }
    StoreFacts& facts() const noexcept { return *facts_; }
    core::ParticipantSlot* slots() const noexcept {
        return appendix_.section<core::ParticipantSlot>(core::Section::participants);
    }
    std::uint64_t capacity() const noexcept { return geometry_.capacity(); }
    std::size_t participants() const noexcept { return 1 + geometry_.n_readers; }
    std::uint64_t index_of(std::uint32_t id) const noexcept { return id & (geometry_.capacity() - 1); }
    ObjectEntry& entry(std::uint64_t index) const noexcept {
        return *reinterpret_cast<ObjectEntry*>(entries_ + index * geometry_.stride());
    }
    Usage& usage(std::uint64_t index, std::size_t slot) const noexcept {
        return reinterpret_cast<Usage*>(&entry(index) + 1)[slot];
    }

    const std::shared_ptr<os::Mapping>& ring_mapping() const noexcept { return ring_; }
    std::uint64_t ring_bytes() const noexcept { return ring_bytes_; }
    // Where the allocation of an address lies in the ring's mapping.
    std::uint64_t offset_of(std::uint64_t address) const noexcept { return address % ring_bytes_; }
    std::byte* at(std::uint64_t offset) const noexcept { return ring_->base() + offset; }

private:
    ObjectTable(const core::Segment& ring, std::uint64_t ring_bytes, Appendix appendix, const StoreGeometry& g)
        : geometry_(g),
          ring_bytes_(ring_bytes),
          ring_(ring.mapping()),
          appendix_(std::move(appendix)),
          facts_(appendix_.section<StoreFacts>(core::Section::store_facts)),
          entries_(appendix_.section<std::byte>(core::Section::object_table)) {}

    static std::optional<Appendix> find_sections(const core::Segment& ring) {
        return Appendix::find(
            ring, {core::Section::store_facts, core::Section::participants, core::Section::object_table});
    }

    StoreGeometry geometry_;
    std::uint64_t ring_bytes_;
    std::shared_ptr<os::Mapping> ring_;
    Appendix appendix_;
    StoreFacts* facts_;
    std::byte* entries_;
};

}  // namespace memlane::store
