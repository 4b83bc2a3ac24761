// A pair of a disk tier's files as other processes see it, whether a tier has it open or not: what is in it, and the removal of
// blocks while no tier has it open. What an open tier is asked for: tier_request.hpp.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/access.hpp"
#include "core/errors.hpp"
#include "os/file.hpp"
#include "os/file_lock.hpp"
#include "tiers/slot_layout.hpp"
#include "tiers/slot_uses.hpp"

namespace memlane::tiers {

class PairOutside {
public:
    // `path`.headers. Throws system_error, SegmentRefused, SegmentForeign, LayoutMismatch.
    explicit PairOutside(const std::string& path) : path_(path + ".headers") {
        headers_ = os::try_open(path_, O_RDWR | O_NOFOLLOW | O_NONBLOCK);
        if (!headers_.is_open()) os::throw_errno("cannot open " + path_);
        uses_ = os::try_open(path + ".uses", O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
        if (uses_.is_open() && !os::facts_of(uses_).is_regular()) uses_.close();
        core::check_owner(path_, os::facts_of(headers_), "run this as that user");
        read_pair();
    }

    const PairHeader& pair() const noexcept { return pair_; }

    // The process that has it open; 0: its number is unknown; nullopt: none has.
    std::optional<std::uint64_t> owner() const {
        if (!os::is_locked(headers_, kPairLock)) return std::nullopt;
        std::uint64_t pid = 0;
        return os::read_at(headers_, &pid, sizeof pid, kPidAt) ? pid : 0;
    }

    struct Stored {
        std::uint64_t blocks = 0;
        std::uint32_t oldest = 0, newest = 0;  // when they were stored, in seconds since 1970; 0: unknown
        std::uint32_t last_use = 0;            // as far as it was written
        std::uint64_t hits = 0;
    };
    // What each namespace has. Throws system_error.
    std::map<Namespace, Stored> stored() const {
        std::map<Namespace, Stored> found;
        const std::vector<std::uint64_t> uses = uses_.is_open() ? SlotUses::read(uses_, pair_.slots) : std::vector<std::uint64_t>(pair_.slots);
        for_each_header(headers_, pair_, [&](std::uint64_t slot, const SlotHeader& header) {
            if (header.bytes != pair_.row_bytes) return;
            const SlotUse use = SlotUse::of(uses[slot], header.stored);
            Stored& of = found[header.name_space];
            of.oldest = of.blocks++ == 0 ? header.stored : std::min(of.oldest, header.stored);
            of.newest = std::max(of.newest, header.stored);
            of.last_use = std::max(of.last_use, static_cast<std::uint32_t>(use.at / SlotUse::kSecond));
            of.hits += use.hits;
        });
        return found;
    }

    // Removes all blocks, or those of a namespace; false: a tier has the files open. Throws system_error.
    bool remove(const std::optional<Namespace>& name_space) {
        if (!os::try_lock(headers_, os::LockKind::exclusive, kPairLock)) return false;
        struct Unlock {
            const os::FileDescriptor& file;
            ~Unlock() { os::unlock(file, kPairLock); }
        } unlock{headers_};
        read_pair();  // a tier may have had it open since, with another capacity
        std::uint64_t next = pair_.first_sequence;
        for_each_header(headers_, pair_, [&](std::uint64_t slot, const SlotHeader& header) {
            next = std::max(next, header.sequence + 1);
            if (name_space && header.name_space == *name_space) write(SlotHeader(), header_at(slot));
        });
        if (!name_space) {
            pair_.first_sequence = next;
            pair_.crc = pair_.own_crc();
            write(pair_, 0);
        }
        return true;
    }

private:
    void read_pair() {
        const bool is_there = os::read_at(headers_, &pair_, sizeof pair_, 0);
        const bool is_unfinished = is_there ? pair_.magic == decltype(pair_.magic){} : os::facts_of(headers_).bytes == 0;
        if (is_unfinished) os::throw_errno(path_ + " is being made", EAGAIN);
        if (!is_there || pair_.magic != kPairMagic) throw core::SegmentRefused(path_ + " is no disk tier's");
        if (pair_.version != kPairVersion) throw core::LayoutMismatch(path_ + " has format " + std::to_string(pair_.version));
        if (pair_.crc != pair_.own_crc()) throw core::SegmentRefused("the first page of " + path_ + " is damaged");
    }

    template <class What>
    void write(const What& what, std::uint64_t at) const {
        if (const int error = os::write_at(headers_, &what, sizeof what, at); error != 0) os::throw_errno("cannot write " + path_, error);
    }

    std::string path_;
    os::FileDescriptor headers_, uses_;
    PairHeader pair_;
};

}  // namespace memlane::tiers
