// A reader's end of the store: takes a place, then reads (store/object_reader.hpp).
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "store/object_reader.hpp"

namespace memlane::store {

class StoreReader : public ObjectReader {
public:
    // How many times a successor looks at entries that are closing, over the whole table, before it skips them.
    static constexpr int kPatience = 1'000'000;

    // Takes the first place that was never used; if there is none, one whose reader has closed or died.
    static std::shared_ptr<StoreReader> join(const core::Segment& ring, const ObjectTable& table, int patience = kPatience) {
        core::ParticipantSlot* const slots = table.slots();
        for (const bool used : {false, true})
            for (std::size_t slot = 1; slot < table.participants(); ++slot) {
                const bool is_absent = core::load_acquire(slots[slot].state) == core::SlotState::absent;
                if (is_absent == used) continue;
                try {
                    return std::shared_ptr<StoreReader>(new StoreReader(ring.join_same_mapping(slot), table, slot, patience));
                } catch (const core::RankTaken&) {
                    continue;  // held by a living process
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
            core::store_relaxed<std::uint32_t>(table().usage(i, slot).pins, 0);  // left by the previous reader
        core::store_relaxed<std::uint64_t>(own_slot().position, 0);
        core::store_relaxed(own_slot().views, 0u);
        participants().join(slot, os::own_identity());
        if (is_successor) mark_stored_as_read(patience);
        if (table().facts().unlink_when_complete == 1 && is_complete(slot)) segment().remove_name_as_peer();
    }

    // Called after this reader's join(), so that of two readers joining at once at least one sees both. A place
    // whose reader has left or died may still be taken again, so it counts as missing.
    bool is_complete(std::size_t own) const {
        core::full_fence();
        for (std::size_t slot = 1; slot < table().participants(); ++slot) {
            if (slot != own && participants().presence(slot) != core::Presence::attached) return false;
        }
        return true;
    }

    // A successor owes no reads of what was stored before it joined: nobody will tell it the addresses. It pins
    // each entry in turn, so that none becomes another object's meanwhile. It owes reads of later references.
    void mark_stored_as_read(int patience) noexcept {
        // An entry missed here would be owed for ever, so closing entries are waited for. But the writer closes
        // one entry at a time: if many appear to be closing, the table is damaged.
        for (std::uint64_t i = 0; i < table().capacity(); ++i) {
            add_pin(i);
            if (is_live(settled_stamp(i, patience)))
                core::store_release(table().usage(i, slot()).reads, core::load_acquire(table().entry(i).references));
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
