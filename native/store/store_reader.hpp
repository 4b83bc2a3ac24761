// A reader's end of the store: it takes a place, and then reads (store/object_reader.hpp).
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "store/object_reader.hpp"

namespace memlane::store {

class StoreReader : public ObjectReader {
public:
    // Looks at entries that seem to be closing, before a successor lets them be.
    static constexpr int kPatience = 1'000'000;

    // Takes the first place that nobody has had; if there is none, one whose reader has closed or died.
    static std::shared_ptr<StoreReader> join(const core::Segment& ring, const ObjectTable& table, int patience = kPatience) {
        core::ParticipantSlot* const slots = table.slots();
        for (const bool used : {false, true})
            for (std::size_t slot = 1; slot < table.participants(); ++slot) {
                const bool is_absent = core::load_acquire(slots[slot].state) == core::SlotState::absent;
                if (is_absent == used) continue;
                try {
                    return std::shared_ptr<StoreReader>(new StoreReader(ring.join_same_mapping(slot), table, slot, patience));
                } catch (const core::RankTaken&) {
                    continue;  // somebody lives there
                }
            }
        throw core::RankTaken("all " + std::to_string(table.geometry().n_readers) +
                              " readers of the storage have attached: " + names_of(table));
    }

private:
    StoreReader(std::shared_ptr<core::Segment> own, const ObjectTable& t, std::size_t slot, int patience)
        : ObjectReader(std::move(own), t, slot) {
        const bool is_successor = core::load_acquire(own_slot().state) != core::SlotState::absent;
        for (std::uint64_t i = 0; is_successor && i < table().capacity(); ++i)
            core::store_relaxed<std::uint32_t>(table().claims(i, slot).pins, 0);  // of whoever was here before
        core::store_relaxed<std::uint64_t>(own_slot().position, 0);
        core::store_relaxed(own_slot().views, 0u);
        participants().join(slot, os::own_identity());
        if (is_successor) mark_stored_as_read(patience);
        if (table().facts().unlink_when_complete == 1 && is_complete(slot)) segment().remove_name_as_peer();
    }

    // Asked behind one's own join(), so that of two who come at once one sees both. The place of one that has left or
    // died may be wanted by another.
    bool is_complete(std::size_t own) const {
        core::full_fence();
        for (std::size_t slot = 1; slot < table().participants(); ++slot) {
            if (slot != own && participants().presence(slot) != core::Presence::attached) return false;
        }
        return true;
    }

    // A successor owes no reads of what was stored before: nobody will tell it the addresses. Entry by entry, pinned, so
    // that none becomes another object's in between; what is referenced later is owed.
    void mark_stored_as_read(int patience) noexcept {
        // What is missed here would be owed for ever. But the writer closes one entry at a time: if many seem to be
        // closing, that is not its doing.
        for (std::uint64_t i = 0; i < table().capacity(); ++i) {
            add_pin(i);
            if (is_live(settled_stamp(i, patience)))
                core::store_release(table().claims(i, slot()).reads, core::load_acquire(table().entry(i).references));
            drop_pin(i);
        }
    }

    static std::string names_of(const ObjectTable& table) {
        std::string text;
        constexpr std::size_t kMost = 8;
        for (std::size_t slot = 1; slot < table.participants() && slot <= kMost; ++slot)
            text += (slot == 1 ? "pid " : ", pid ") + std::to_string(core::load_relaxed(table.slots()[slot].pid));
        return text + (table.participants() > kMost + 1 ? " and others" : "");
    }
};

}  // namespace memlane::store
