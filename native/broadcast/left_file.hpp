// The file of a queue that has no end left: gives back all space that no surviving view shows.
//
// A mapping of one lent array keeps the whole file. The end that leaves last gives the space back. If that one was
// killed, a process does so whose own end had left before, and that keeps arrays or views: at its next call that creates,
// attaches or closes an end.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "broadcast/lease.hpp"
#include "broadcast/ring_layout.hpp"
#include "core/access.hpp"
#include "core/liveness.hpp"
#include "core/segment.hpp"

namespace memlane::broadcast {

// Call it when no other process holds the segment. Lent arrays have been copied by now. Spared are
//   - the ring, if anything refers to its mapping, or a slot was never claimed: a process that knows only the
//     documented part may be reading in its place, and that part is all that it can see;
//   - what a view shows that an end has left behind, unless the message has been overwritten since;
//   - all extents, if a lent page could not be copied, or a reader with views was replaced (the writer's slot says so), or, in
//     a ring of the latest message, if a view shows one.
inline void give_back_file(const os::FileDescriptor& file, const Ring& ring, const core::ParticipantSlot* slots,
                           std::uint64_t ring_bytes) {
    using Range = std::pair<std::uint64_t, std::uint64_t>;  // begin and end
    const RingGeometry& g = ring.geometry();
    core::SlotState writer{};
    // Not through the mapping: touching a page that was given back would take space, or raise SIGBUS.
    os::read_at(file, &writer, sizeof writer, ring.offset_of(&slots[0].state));
    if (writer == core::SlotState::absent) return;  // given back already
    const std::uint64_t end = os::facts_of(file).bytes;
    std::vector<Range> spared;
    bool is_ring_used = false;
    for (std::uint64_t i = 0; i < 1 + g.n_reader; ++i) {
        const std::uint32_t views = core::load_relaxed(slots[i].views);
        is_ring_used |= core::load_acquire(slots[i].state) == core::SlotState::absent || (views & core::kViewsOfRing) != 0;
        if ((views & core::kViewsLeft) == 0) continue;
        if (i == 0) {
            spared.emplace_back(std::min(ring_bytes, end), end);
            continue;
        }
        if (ring.is_latest()) {
            // Nothing says which extent a row was of.
            bool keeps_extents = false;
            for (std::uint64_t row = 0; row < g.leases(); ++row)
                keeps_extents |= core::load_relaxed(ring.lease(row, i - 1)) != kNotKept;
            if (keeps_extents) spared.emplace_back(std::min(ring_bytes, end), end);
            for (std::uint64_t chunk = 0; chunk < g.max_chunks; ++chunk)
                if (core::load_acquire(ring.kept_by(chunk, i - 1)) != kNotKept)
                    spared.emplace_back(chunk * g.max_chunk_bytes, (chunk + 1) * g.max_chunk_bytes);
            continue;
        }
        const std::uint64_t next = core::load_relaxed(slots[i].position);
        for (std::uint64_t age = std::min(next, g.max_chunks); age > 0; --age) {
            const std::uint64_t chunk = ring.chunk_at(next - age);
            const auto d = core::private_copy(ring.descriptor(chunk));
            if (d.lap != ring.lap_at(next - age) || core::load_acquire(ring.consumed_by(chunk, i - 1)) != 0) continue;
            const std::uint64_t begin = d.extent_bytes > 0 ? d.extent_offset : chunk * g.max_chunk_bytes;
            const std::uint64_t bytes = d.extent_bytes > 0 ? d.extent_bytes : g.max_chunk_bytes;
            if (begin < end) spared.emplace_back(begin, begin + std::min(bytes, end - begin));
        }
    }
    if (is_ring_used) spared.emplace_back(0, ring_bytes);
    for (std::uint64_t row = 0; row < g.leases(); ++row)
        for (std::uint64_t r = 0; r < g.n_reader; ++r)
            if (core::load_relaxed(ring.lease(row, r)) == kKeptForGood) spared.emplace_back(std::min(ring_bytes, end), end);
    std::sort(spared.begin(), spared.end());
    spared.emplace_back(end, end);
    std::uint64_t at = 0;
    for (const auto& [begin, until] : spared) {
        if (begin > at) os::punch_hole(file, at, begin - at);
        at = std::max(at, until);
    }
}

// The file of an end that has left, kept open by the arrays and views that it left behind. Maps the ring once more,
// because the ring's own mapping may be what keeps it.
class LeftFile {
public:
    LeftFile(const core::Segment& segment, const Ring& ring, const core::ParticipantSlot* slots)
        : file_(os::reopen(segment.file())),
          ring_(ring.in(std::make_shared<os::Mapping>(file_, segment.bytes()))),
          slots_(reinterpret_cast<const core::ParticipantSlot*>(ring_.data(0) + ring.offset_of(slots))),
          ring_bytes_(segment.bytes()) {}

    // True once there is nothing left to do.
    bool try_give_back() noexcept {
        try {
            if (os::facts_of(file_).links != 0) return false;  // others may attach until a sweep has removed the name
            core::LivenessLock lock(file_);
            if (!lock.take_all()) return false;
            give_back_file(file_, ring_, slots_, ring_bytes_);
            file_.close();  // last: it is left to the mappings
            return true;
        } catch (const std::exception&) {  // no descriptor, or no /proc: later, or with the last array
            return false;
        }
    }

private:
    os::FileDescriptor file_;
    const Ring ring_;
    const core::ParticipantSlot* const slots_;
    const std::uint64_t ring_bytes_;
};

inline void note_left_file(const std::shared_ptr<LeftFile>& file) {
    Leases& all = Leases::all();
    const std::lock_guard guard(all.mutex);
    all.left.push_back(file);
}

// A few microseconds for each file that this process keeps.
inline void look_at_left_files() noexcept {
    Leases& all = Leases::all();
    try {
        std::vector<std::weak_ptr<LeftFile>> left;
        {
            const std::lock_guard guard(all.mutex);
            left.swap(all.left);
        }
        for (const std::weak_ptr<LeftFile>& one : left)
            if (const auto file = one.lock(); file && !file->try_give_back()) note_left_file(file);
    } catch (const std::exception&) {  // no memory: the space goes with the last array
    }
}

}  // namespace memlane::broadcast
