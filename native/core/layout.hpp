// Layout of a segment behind its documented part: a header, and the sections that its directory lists.
//
//   0                       documented bytes of the system (a ring's chunks and flags)
//   header_offset           SegmentHeader, 1024 bytes, on a page boundary
//   ...                     sections in the order of the plan, each on a 128-byte boundary
//   trailer_end             extents or sections that a system appends later
//
// The header contains its own offset, so an observer can find it without knowing the geometry: no other page begins
// with the magic and contains its own offset.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace memlane::core {

inline constexpr std::uint64_t kMagic = 0x31454e414c4d454dULL;  // "MEMLANE1", little-endian
// Major: raise it for what a process of an earlier version would get wrong; such a segment cannot be used. 3: a ring's
// writer gives space of chunks back (RingWaits::given_back), so a reader that does not look at that count would touch
// pages without space. 4: a ring has a section more, of delivery times. Minor: raise it for fields in reserved bytes that may
// be ignored. 4.1: `openings`. 4.2: `answers_to`. 4.3: `label`.
inline constexpr std::uint32_t kLayoutMajor = 5;
inline constexpr std::uint32_t kLayoutMinor = 0;
// Features, of a ring: readers attach at any time, and their first message is at `admitted`.
inline constexpr std::uint64_t kLateReaders = 1;
// The documented flags say nothing: readers get the latest message only (broadcast/latest.hpp).
inline constexpr std::uint64_t kLatestOnly = 2;
inline constexpr std::uint64_t kUnderstoodFeatures = kLateReaders | kLatestOnly;

inline constexpr std::size_t kPage = 4096;
inline constexpr std::size_t kCacheLine = 64;
inline constexpr std::size_t kSectionAlignment = 128;
inline constexpr std::size_t kMaxSections = 24;

enum class System : std::uint32_t { broadcast = 1, store = 2, tier = 3, peers = 4 };
enum class Section : std::uint32_t {
    participants = 1,
    ring_waits = 2,
    parked_readers = 3,
    chunk_descriptors = 4,
    store_facts = 5,
    object_table = 6,
    extent_leases = 7,
    tier_facts = 8,
    delivery_times = 9,
    peer_facts = 10,
};

struct SectionEntry {
    Section kind;
    std::uint32_t stride;  // bytes of one element
    std::uint64_t offset;  // in the file
    std::uint64_t count;   // elements
    std::uint64_t reserved;
};
static_assert(sizeof(SectionEntry) == 32);

using Geometry = std::array<std::uint64_t, 4>;
using SegmentId = std::array<std::uint8_t, 16>;

struct SegmentHeader {
    std::uint64_t magic;  // stored last (SYNC header): a process that sees it sees a complete segment
    std::uint32_t layout_major;
    std::uint32_t layout_minor;
    std::uint64_t header_offset;
    std::uint64_t trailer_end;
    SegmentId id;
    std::uint64_t must_understand;
    std::uint64_t reserved_0;

    System system;
    std::uint32_t section_count;
    Geometry geometry;  // meaning depends on the system; a ring: n_reader, max_chunk_bytes, max_chunks, 0
    std::uint64_t reserved_1;
    std::uint64_t space_each;  // a ring: bytes of every chunk that are reserved at creation; 0: unknown
    std::uint64_t reserved_2;

    std::uint32_t membership;  // futex word: somebody joined or left
    std::uint32_t reserved_3[3];
    // Set by either end of a ring, for observers: the id of the ring whose messages are answered in this one; zeros: none.
    std::uint64_t answers_to[2];
    char label[40];  // by either end, for observers: what people call it (label_of), then zeros
    std::uint32_t reserved_4[14];

    SectionEntry sections[kMaxSections];
};
static_assert(sizeof(SegmentHeader) == 1024);
static_assert(offsetof(SegmentHeader, system) == 64);
static_assert(offsetof(SegmentHeader, membership) == 128);
static_assert(offsetof(SegmentHeader, answers_to) == 144);
static_assert(sizeof(SegmentId) == sizeof(SegmentHeader::answers_to));
static_assert(offsetof(SegmentHeader, label) == 160);
static_assert(offsetof(SegmentHeader, sections) == 256);

// A participant's slot: its identity in the first 64 bytes, counters in the second. Only the process that holds the
// slot's lock writes to it, but for `admitted` and `openings`. The two are on separate cache lines because peers poll the first.
enum class SlotState : std::uint32_t { absent = 0, attached = 1, closed = 2, released = 3 };
// What its process does in memlane. waiting: for a message, or for a free chunk. attaching: in wait_until_ready.
// in_block: between the two ends of acquire_read or acquire_write. copying: encodes a message and copies it in. decoding: copies
// one out and decodes it.
enum class SlotActivity : std::uint32_t { elsewhere = 0, waiting = 1, attaching = 2, in_block = 3, copying = 4, decoding = 5 };

struct ParticipantSlot {
    SlotState state;
    std::uint32_t rank;  // 1 + a reader's rank; 0: none, or unknown
    std::uint64_t pid;
    std::uint64_t start_ticks;
    std::uint64_t pid_namespace;
    std::uint64_t skipped;  // of a reader of the latest: messages that were published, and that it will not get
    std::uint32_t reading;  // of the same: 1 + the chunk whose message it reads; 0: none
    union {
        std::uint32_t absent_elsewhere;  // in the writer's slot: readers on other hosts that have not attached
        std::uint32_t openings;          // in a reader's, by the writer: how often it was opened again (reopen)
    };
    std::uint64_t leased_bytes;  // of extents that leases keep; of the latest, also of what views keep
    std::uint64_t admitted;  // in a reader's slot, by the writer: 1 + the position of its first message; 0: that of the ring,
                             // or, with late readers and in a place that was opened again, not known yet

    std::uint64_t position;          // messages published or consumed
    std::int64_t last_progress_ns;   // CLOCK_MONOTONIC, as of its last tick
    SlotActivity activity;
    std::uint32_t views;  // messages kept because something still refers to them; and the bits below
    std::uint64_t bytes;
    std::uint64_t waits;   // calls that had to wait
    std::uint64_t spills;  // messages written to an extent
    std::int64_t views_since_ns;  // when the oldest view was taken; on the same clock
    std::int64_t activity_since_ns;  // on the same clock; 0 while elsewhere, copying or decoding
};
// In `views` of a participant that has left, and was not killed: something in its process still refers to the mapping of
// the ring, or to the chunks that are counted.
inline constexpr std::uint32_t kViewsOfRing = 1u << 31;
inline constexpr std::uint32_t kViewsLeft = 1u << 30;
static_assert(sizeof(ParticipantSlot) == 128);
static_assert(offsetof(ParticipantSlot, skipped) == 32);
static_assert(offsetof(ParticipantSlot, absent_elsewhere) == 44 && offsetof(ParticipantSlot, openings) == 44);
static_assert(offsetof(ParticipantSlot, leased_bytes) == 48);
static_assert(offsetof(ParticipantSlot, admitted) == 56);
static_assert(offsetof(ParticipantSlot, position) == 64);

// Lock bytes lie far beyond the end of the file: one per participant, one shared by users that are not participants.
inline constexpr std::int64_t kLockBase = std::int64_t{1} << 62;
inline constexpr std::int64_t kUserLock = kLockBase + (std::int64_t{1} << 31);
inline constexpr std::int64_t kLockSpan = std::int64_t{1} << 32;

constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t to) noexcept {
    return (value + to - 1) / to * to;
}

}  // namespace memlane::core
