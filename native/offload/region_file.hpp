// The file of a region: creating it, joining it, reserving its space, removing its name.
//
// A start calls `enter`, `await_space` and `mark_mapped`; an end calls `leave`. The first three never block longer
// than the slice they are given: in between, the caller handles deadlines and signals, and then calls again.
//
// A region is alive while somebody holds the locks of its geometry. They are taken before the file has its name
// (by its creator), or under the name lock after seeing the region alive (by a process that joins). The name is
// removed under the same lock. So a file found under that lock without them is dead for good, and nobody joins
// it; or it is not memlane's, and is left alone as long as anybody has it open.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "core/access.hpp"
#include "core/errors.hpp"
#include "core/liveness.hpp"
#include "core/segment.hpp"
#include "core/sync.hpp"
#include "offload/region_layout.hpp"
#include "os/clock.hpp"
#include "os/fork.hpp"
#include "os/mapping.hpp"
#include "os/process.hpp"
#include "os/watch.hpp"

namespace memlane::offload {

// foreign: another process has the file open without any of the locks, or is starting at this very moment.
enum class Entry { waiting, foreign, created, joined };
enum class Space { waiting, complete, build };
enum class Naming { waiting, kept, removed };

struct Departure {
    bool removed_name = false;
    std::string problem;  // what could not be done
};

class RegionFile {
public:
    RegionFile(std::string directory, const std::string& name, const RegionGeometry& geometry, std::string label = {})
        : directory_(std::move(directory)), path_(directory_ + "/" + name), geometry_(geometry), label_(std::move(label)) {}
    RegionFile(const RegionFile&) = delete;
    RegionFile& operator=(const RegionFile&) = delete;
    ~RegionFile() { leave(0); }

    const std::string& path() const noexcept { return path_; }
    const RegionGeometry& geometry() const noexcept { return geometry_; }
    const std::string& label() const noexcept { return label_; }
    const os::FileDescriptor& file() const noexcept { return file_; }
    const std::shared_ptr<os::Mapping>& mapping() const noexcept { return mapping_; }
    bool is_open() const noexcept { return file_.is_open(); }
    // The huge pages of the whole region, once its space is complete.
    std::uint64_t huge_pages() const noexcept { return huge_pages_; }
    bool is_own() const noexcept { return generation_ == os::fork_generation().load(std::memory_order_relaxed); }

    // Tries once to create or to join the region.
    Entry enter(os::Nanoseconds slice) {
        try {
            found_ = os::OwnFile([&] { return os::open_existing(path_); });
        } catch (const std::system_error& error) {
            if (error.code().value() == ENOENT) return create() ? Entry::created : Entry::waiting;
            if (error.code().value() == EAGAIN) return wait(Entry::waiting, slice);  // a peer is in `is_open_elsewhere`
            core::throw_unopened(error, path_, "regions", kRemedy);
        }
        try {
            return join(slice);
        } catch (...) {
            forget();
            throw;
        }
    }

    // Returns whether all the space is there, or the caller has to reserve it, because it created the region or because
    // the builder has died or failed.
    Space await_space(os::Nanoseconds slice) {
        if (const Space space = look_for_space(); space != Space::waiting) return space;
        const os::FileWatch watch(file_.get());
        const Space space = look_for_space();
        if (space == Space::waiting) watch.wait(slice);
        return space;
    }

    // The pid of the process that is reserving the space, or 0.
    std::int64_t builder() const {
        const auto lock = lock_.held_by_other({kBuilder, kPidSpan});
        return lock ? lock->count : 0;
    }

    // Called by the builder once every byte has its space, in so many huge pages.
    void publish(std::uint64_t huge_pages) {
        SYNC_STEP(complete);
        os::resize(file_, geometry_.total_bytes);
        huge_pages_ = huge_pages;
        lock_.take(os::LockKind::shared, ready_lock(huge_pages));
        stop_building();
        os::notify_watchers(file_);
    }

    // Bytes beyond the file's end must not be touched before the file grows.
    void map() {
        try {
            mapping_ = std::make_shared<os::Mapping>(file_, geometry_.total_bytes, 0, os::Mapping::Access::write,
                                                     os::Mapping::Aligned::to_huge_pages);
        } catch (const std::system_error& error) {
            if (error.code().value() == ENOMEM) throw core::ShmExhausted(ENOMEM, geometry_.total_bytes, 0);
            throw;
        }
    }

    // Removes the name once `participants` holders have mapped the region (0: never).
    Naming mark_mapped(std::uint64_t participants, os::Nanoseconds slice) {
        lock_.take(os::LockKind::exclusive, mapped_lock(member_));
        if (participants == 0) return Naming::kept;
        if (!take_name(slice)) return Naming::waiting;
        bool removed = false;
        std::uint64_t mapped = 1;
        for (std::int64_t i = 0; i < kMostMembers && lock_.held_by_other({kMapped + i, kMostMembers - i}); ++i)
            if (lock_.held_by_other(mapped_lock(i))) ++mapped;
        if (mapped >= participants) {
            SYNC_STEP(unlink);
            removed = os::unlink_if_same(file_, path_);
        }
        let_name_go();
        return removed ? Naming::removed : Naming::kept;
    }

    // Call it with the lock held under which views are made (the GIL): another thread may be making one.
    std::shared_ptr<os::Mapping> take_mapping() noexcept { return std::exchange(mapping_, nullptr); }

    // Releases everything but the mapping; the last holder to leave removes the name. Waits at most `patience` for a process
    // that is joining or leaving at this moment. In a forked child it only closes the child's copies.
    Departure leave(os::Nanoseconds patience) noexcept {
        Departure departure;
        if (!is_open()) return departure;
        if (is_own()) {
            try {
                depart(departure, patience);
            } catch (const std::exception& error) {
                departure.problem = error.what();
            }
        }
        SYNC_STEP(unlock);
        lock_.release();
        if (is_own()) os::notify_watchers(file_);  // wakes processes that wait for one of the locks
        file_.close();
        return departure;
    }

private:
    // Joins the file that was found, if a region holds it. Until then no forked child has it: an open file without locks is
    // another's.
    Entry join(os::Nanoseconds slice) {
        core::check_owner(path_, os::facts_of(found_.file()), kRemedy);
        lock_ = core::LivenessLock(found_.file());
        SYNC_STEP(lock);
        if (!take_name(slice)) return forget();
        if (os::facts_of(found_.file()).links == 0) return forget();
        const std::optional<RegionGeometry> seen = geometry_of_others();
        if (!seen) {
            const bool is_foreign = is_anothers();
            if (!is_foreign) {
                SYNC_STEP(sweep);
                os::unlink_if_same(found_.file(), path_);
            }
            forget();
            return is_foreign ? wait(Entry::foreign, slice) : Entry::waiting;
        }
        if (*seen != geometry_) throw_mismatch(*seen);
        if ((os::facts_of(found_.file()).mode & 07777) != 0600)
            throw core::SegmentRefused(path_ + " does not have mode 0600, which regions must have");
        if (std::string label = label_of_others(); !label.empty()) label_ = std::move(label);
        take_place();
        file_ = found_.share();
        os::try_lock(file_, os::LockKind::shared, ours_lock());
        let_name_go();
        return Entry::joined;
    }

    // Takes the locks of a holder and of the builder before the file has a name.
    bool create() {
        file_ = os::create_unnamed(directory_);
        lock_ = core::LivenessLock(file_);
        SYNC_STEP(lock);
        take_place();
        is_builder_ = lock_.take(os::LockKind::exclusive, builder_lock(os::own_pid()));
        SYNC_STEP(link);
        try {
            os::link_name(file_, path_);
        } catch (const std::system_error& error) {
            if (error.code().value() != EEXIST) throw;
            forget();
            return false;
        }
        // Reopened by its name, so that /proc shows that name for its descriptors and mappings.
        os::FileDescriptor named = os::open_existing(path_);
        if (os::facts_of(named).is_same_file(os::facts_of(file_))) file_ = std::move(named);
        os::try_lock(file_, os::LockKind::shared, ours_lock());
        return true;
    }

    // True if anybody else uses a file that no memlane region holds. A mapping of a dead region that survives
    // in a forked child does not count.
    bool is_anothers() {
        if (lock_.held_by_other(ours_lock())) return false;
        found_.close();  // then only the lock's description is open here
        const bool is_used = os::is_open_elsewhere(lock_.file());
        found_ = os::OwnFile([&] { return os::reopen(lock_.file()); });
        return is_used;
    }

    // Waits until somebody closes the file or removes its name. Nothing of it is open here meanwhile: processes
    // that start at the same time would take each other for foreign holders.
    Entry wait(Entry entry, os::Nanoseconds slice) const {
        os::FileWatch(path_).wait(slice);
        return entry;
    }

    // Drops everything, so that the next attempt starts afresh.
    Entry forget() noexcept {
        if (lock_.is_open()) {
            lock_.release();
            os::notify_watchers(file_.is_open() ? file_ : found_.file());
        }
        file_.close();
        found_.close();
        has_place_ = is_builder_ = false;
        return Entry::waiting;
    }

    void take_place() {
        const std::int64_t pid = os::own_pid();
        member_ = 0;
        while (!lock_.take(os::LockKind::exclusive, member_lock(member_, pid)))
            if (++member_ == kMostMembers) throw core::RankTaken(path_ + " has no place for another holder");
        const auto numbers = geometry_.numbers();
        for (std::size_t i = 0; i < numbers.size(); ++i)
            lock_.take(os::LockKind::shared, number_lock(i, numbers[i]));
        for (std::size_t i = 0; i < kLabelWords; ++i)
            if (const std::uint64_t word = label_word(label_, i)) lock_.take(os::LockKind::shared, label_lock(i, word));
        has_place_ = true;
    }

    void let_name_go() {
        lock_.drop(name_lock());
        os::notify_watchers(lock_.file());
    }

    std::optional<RegionGeometry> geometry_of_others() const {
        std::uint64_t seen[4];
        for (std::size_t i = 0; i < 4; ++i) {
            const auto lock = lock_.held_by_other(number_lock(i, kNumberSpan - 1));
            if (!lock) return std::nullopt;
            seen[i] = static_cast<std::uint64_t>(lock->count);
        }
        return RegionGeometry{seen[0], seen[1], seen[2], seen[3]};
    }

    std::string label_of_others() const {
        std::string label;
        for (std::size_t i = 0; i < kLabelWords; ++i) {
            const auto lock = lock_.held_by_other(label_lock(i, kLabelSpan - 1));
            if (!lock) break;
            label += letters_of(static_cast<std::uint64_t>(lock->count));
        }
        return label;
    }

    // Closing a watch takes milliseconds, so there is one only if there is something to wait for.
    bool take_name(os::Nanoseconds slice) {
        if (lock_.take(os::LockKind::exclusive, name_lock())) return true;
        const os::FileWatch watch(lock_.file().get());
        if (lock_.take(os::LockKind::exclusive, name_lock())) return true;
        watch.wait(slice);
        return false;
    }

    Space look_for_space() {
        if (is_builder_) return Space::build;
        // In this order: while this process holds the builder's lock, nobody else can complete the region.
        is_builder_ = lock_.take(os::LockKind::exclusive, builder_lock(os::own_pid()));
        if (learns_complete()) {
            if (is_builder_) stop_building();
            return Space::complete;
        }
        return is_builder_ ? Space::build : Space::waiting;
    }

    void stop_building() {
        is_builder_ = false;
        lock_.drop(builder_lock(os::own_pid()));
    }

    bool learns_complete() {
        const auto lock = lock_.held_by_other(ready_lock(0));
        if (!lock) return false;
        huge_pages_ = static_cast<std::uint64_t>(lock->count - 1);
        return lock_.take(os::LockKind::shared, ready_lock(huge_pages_));
    }

    void depart(Departure& departure, os::Nanoseconds patience) {
        const os::FileFacts facts = os::facts_of(file_);
        // A new builder needs the room. A file that was complete may be in use, even if all who knew that have died.
        if (is_builder_ && facts.bytes < geometry_.total_bytes) os::resize(file_, 0);
        if (!has_place_ || facts.links == 0) return;
        const os::Nanoseconds until = os::monotonic_now() + patience;
        while (!take_name(std::min(until - os::monotonic_now(), 100 * os::kMillisecond))) {
            if (os::monotonic_now() < until) continue;
            departure.problem = "a process has been stopped while joining or leaving";
            return;
        }
        if (geometry_of_others()) return;
        SYNC_STEP(unlink);
        departure.removed_name = os::unlink_if_same(file_, path_);
    }

    static constexpr const char* kRemedy = "choose another instance_id, or run all its workers as one user";

    [[noreturn]] void throw_mismatch(const RegionGeometry& seen) const {
        std::set<std::int64_t> pids;
        for (std::int64_t i = 0; i < kMostMembers && lock_.held_by_other(members_from(i)); ++i)
            if (const auto member = lock_.held_by_other({kMembers + i * kPidSpan, kPidSpan})) pids.insert(member->count);
        std::string text = path_ + " is in use with " + to_text(seen) + ", not with " + to_text(geometry_) + ". End";
        for (const std::int64_t pid : pids) text += " pid " + std::to_string(pid) + ",";
        throw core::LayoutMismatch(text + " or choose another instance_id");
    }

    std::string directory_;
    std::string path_;
    RegionGeometry geometry_;
    std::string label_;  // that of the region, once it is joined
    std::uint64_t generation_ = os::fork_generation().load();
    os::OwnFile found_;           // until it is joined
    os::FileDescriptor file_;     // mapped; has the kOurs lock only
    core::LivenessLock lock_;     // all other locks
    std::shared_ptr<os::Mapping> mapping_;
    std::int64_t member_ = 0;
    std::uint64_t huge_pages_ = 0;
    bool has_place_ = false;
    bool is_builder_ = false;
};

}  // namespace memlane::offload
