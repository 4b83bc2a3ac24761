// The life of a segment: created without a name, reserved, locked, filled in, published, named; attached to; unlinked.
//
// A failure on the way leaves nothing behind: until `link_name`, the
// last step, the file has no name and disappears with its descriptor.
#pragma once

#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "core/access.hpp"
#include "core/errors.hpp"
#include "core/layout.hpp"
#include "core/liveness.hpp"
#include "core/segment_header.hpp"
#include "core/sync.hpp"
#include "os/mapping.hpp"

namespace memlane::core {

inline constexpr const char* kDirectory = "/dev/shm";
inline constexpr const char* kNamePrefix = "memlane-";

// Bytes of the documented part to reserve at creation: `count` pieces, `stride` apart. The trailer is always reserved.
struct ReservedRange {
    std::uint64_t offset;
    std::uint64_t bytes;
    std::uint64_t stride = 0;
    std::uint64_t count = 1;
};

inline constexpr const char* kWhyRemoved =
    "its creator has closed it or died, or all its readers have attached";
inline constexpr const char* kWhyMissing =
    "its creator has closed it or died, or all its readers have attached, or it was made on another "
    "host or in a container, which has a /dev/shm of its own";

// True for names that memlane generates: the prefix and 32 hexadecimal digits. Sweeps look at no others.
inline bool is_segment_name(const std::string& name) noexcept {
    const std::string prefix = kNamePrefix;
    return name.size() == prefix.size() + 32 && name.rfind(prefix, 0) == 0 &&
           name.find_first_not_of("0123456789abcdef", prefix.size()) == std::string::npos;
}
inline std::string name_from(const SegmentId& id) {
    std::string name = kNamePrefix;
    for (const std::uint8_t byte : id) {
        name += "0123456789abcdef"[byte >> 4];
        name += "0123456789abcdef"[byte & 15];
    }
    return name;
}

inline bool is_exhaustion(int error) noexcept {
    return error == ENOSPC || error == EDQUOT || error == EFBIG || error == ENOMEM;
}

// A file that a process has open.
struct OpenFile {
    std::int64_t pid;
    int descriptor;
};

class Segment {
public:
    // `slot`: the creator's slot as a participant; none if it only holds the segment. `later`: bytes that will be
    // reserved later; refused if there is no space for them now.
    static std::shared_ptr<Segment> create(const SegmentPlan& plan, const SegmentId& id, const std::string& name,
                                           const std::vector<ReservedRange>& reserved, std::optional<std::size_t> slot,
                                           std::uint64_t later = 0);
    // `slot` as above. `id`: refuse a newer segment of the same name.
    static std::shared_ptr<Segment> attach(const std::string& name, const SegmentPlan& plan,
                                           const std::optional<SegmentId>& id, std::optional<std::size_t> slot);
    // The same, of a segment that may have no name any more, through the descriptor of a process that has it open.
    static std::shared_ptr<Segment> attach_through(const OpenFile& holder, const std::string& name, const SegmentPlan& plan,
                                                   const SegmentId& id, std::optional<std::size_t> slot);

    // Adds a participant of this process, on the same mapping: race detectors see races through one mapping only.
    std::shared_ptr<Segment> join_same_mapping(std::size_t slot) const {
        std::shared_ptr<Segment> joined(new Segment(name_, false));
        joined->file_ = os::reopen(file_);
        joined->id_ = id_;
        joined->features_ = features_;
        joined->bytes_ = bytes_;
        joined->mapping_ = mapping_;
        joined->header_ = header_;
        joined->sections_ = sections_;
        joined->hold(slot);
        return joined;
    }

    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;
    ~Segment() { abandon(); }

    const std::string& name() const noexcept { return name_; }
    std::uint64_t bytes() const noexcept { return bytes_; }
    // What the header said at attach, unchecked.
    std::uint64_t space_each() const noexcept { return space_each_; }
    std::uint64_t features() const noexcept { return features_; }
    bool is_creator() const noexcept { return is_creator_; }
    bool is_open() const noexcept { return mapping_ != nullptr; }
    // False in a child that was forked after this segment was opened.
    bool is_own() const noexcept { return generation_ == os::fork_generation().load(std::memory_order_relaxed); }

    const std::shared_ptr<os::Mapping>& mapping() const noexcept { return mapping_; }
    const os::FileDescriptor& file() const noexcept { return file_; }
    LivenessLock& lock() noexcept { return lock_; }
    SegmentHeader& header() const noexcept { return *header_; }

    std::uint32_t section_count() const noexcept { return static_cast<std::uint32_t>(sections_.size()); }
    template <class T>
    T* section(Section kind) const noexcept {
        for (std::uint32_t i = 0; i < sections_.size(); ++i)
            if (sections_[i].kind == kind) return reinterpret_cast<T*>(mapping_->base() + sections_[i].offset);
        return nullptr;
    }

    // Reserves and populates a part of the file that was not reserved at creation. Can be repeated after ShmExhausted.
    void reserve(std::uint64_t offset, std::uint64_t bytes) {
        if (const int error = os::reserve(file_, offset, bytes)) throw_reservation(error, bytes);
        populate(offset, bytes);
    }

    // For work that maps memory: ENOMEM, from a limit of address space or of the cgroup, becomes ShmExhausted.
    template <class Work>
    auto with_memory(std::uint64_t need, Work&& work) const {
        try {
            return work();
        } catch (const std::system_error& error) {
            if (error.code().value() == ENOMEM) throw ShmExhausted(ENOMEM, need, os::free_bytes(file_));
            throw;
        }
    }

    // From now on nothing is left behind, however the processes end, and nobody can attach.
    void remove_name() {
        if (!is_creator_ || !is_named_ || !is_own()) return;
        SYNC_STEP(unlink);
        unlink_names();
        is_named_ = false;
    }

    // The same, by a process that attached. If it fails, the creator tries again.
    void remove_name_as_peer() const noexcept {
        SYNC_STEP(unlink);
        try {
            unlink_names();
        } catch (const std::system_error&) {
        }
    }

    // Like abandon(), but throws, after everything else is done, if the name cannot be removed.
    void close() {
        if (!is_open()) return;
        std::exception_ptr problem;
        try {
            remove_name();
        } catch (const std::system_error&) {
            problem = std::current_exception();
        }
        abandon();
        if (problem) std::rethrow_exception(problem);
    }

    // Frees what this process owns: the name (if it is the creator), the lock, the descriptor, and the mapping, which
    // stays until its last view is dropped. Notifies nobody: to peers it looks like a death. `if_last` is called, with
    // all others kept out, if no other process holds the segment.
    template <class IfLast = std::nullptr_t>
    void abandon(IfLast&& if_last = nullptr) noexcept {
        if (!is_open()) return;
        try {
            remove_name();
        } catch (const std::system_error&) {
            // The next creation sweeps the name, because this process drops its lock below.
        }
        SYNC_STEP(unlock);
        leave_as_last(if_last);
        lock_.release();
        file_.close();
        header_ = nullptr;
        mapping_.reset();
    }

private:
    Segment(std::string name, bool is_creator) : name_(std::move(name)), is_creator_(is_creator) {}

    std::string path() const { return path_of(name_); }
    // The name by which sweeps find a segment whose own name was chosen by the caller. Linked before that name and
    // unlinked after it, so a process killed in between leaves nothing that sweeps miss.
    std::string second_path() const { return path_of(name_from(id_)); }
    void unlink_names() const {
        os::unlink_if_same(file_, path());
        if (!is_segment_name(name_)) os::unlink_if_same(file_, second_path());
    }
    static std::string path_of(const std::string& name) { return std::string(kDirectory) + "/" + name; }

    [[noreturn]] void throw_reservation(int error, std::uint64_t need) const {
        if (is_exhaustion(error)) throw ShmExhausted(error, need, os::free_bytes(file_));
        os::throw_errno("cannot reserve " + std::to_string(need) + " bytes in " + kDirectory, error);
    }

    [[noreturn]] void throw_taken(std::size_t slot) const {
        const auto* slots = section<ParticipantSlot>(Section::participants);
        const bool is_known = slots != nullptr && load_acquire(slots[slot].state) == SlotState::attached;
        if (!is_known) throw RankTaken("the place is held by a living process, or was released by release_reader");
        throw RankTaken("the place is held by pid " + std::to_string(load_relaxed(slots[slot].pid)) +
                        ", which is alive; close that end first, or take another rank");
    }

    void map() { with_memory(bytes_, [this] { mapping_ = std::make_shared<os::Mapping>(file_, bytes_); }); }
    void populate(std::uint64_t offset, std::uint64_t bytes) const {
        with_memory(bytes, [&] { mapping_->populate(offset, bytes); });
    }

    // A killed creator could not remove its name, so the last of the others to leave does; and calls `if_last`. Each
    // drops its own locks first, so that of two that leave at once one is the last: it does both, because it kept the
    // other out of both.
    template <class IfLast>
    void leave_as_last(IfLast&& if_last) noexcept {
        constexpr bool has_work = !std::is_null_pointer_v<std::remove_cvref_t<IfLast>>;
        if (!is_own() || !lock_.is_open()) return;
        try {
            const bool is_named = os::facts_of(file_).links != 0;
            if (!is_named && !has_work) return;
            lock_.drop_all();
            if (!lock_.take_all()) return;
            if (is_named) {
                SYNC_STEP(sweep);
                unlink_names();
            }
        } catch (const std::system_error&) {
            return;  // as above: the next creation sweeps it
        }
        if constexpr (has_work) if_last();
    }

    void enter(const SegmentPlan& plan, const std::optional<SegmentId>& id);
    void hold(std::optional<std::size_t> slot);
    bool try_hold(std::optional<std::size_t> slot);
    void check_header(const SegmentPlan& plan, const std::optional<SegmentId>& id);
    [[noreturn]] void throw_mismatch(const SegmentPlan& plan) const;

    std::string name_;
    SegmentId id_{};
    bool is_creator_;
    bool is_named_ = false;
    std::uint64_t generation_ = os::fork_generation().load();
    std::uint64_t bytes_ = 0;
    std::uint64_t space_each_ = 0;
    std::uint64_t features_ = 0;
    os::FileDescriptor file_;
    LivenessLock lock_;
    std::shared_ptr<os::Mapping> mapping_;
    SegmentHeader* header_ = nullptr;
    std::vector<SectionEntry> sections_;  // private copy, checked: later writes of a peer do not matter
};


inline std::shared_ptr<Segment> Segment::create(const SegmentPlan& plan, const SegmentId& id, const std::string& name,
                                                const std::vector<ReservedRange>& reserved,
                                                std::optional<std::size_t> slot, std::uint64_t later) {
    std::shared_ptr<Segment> segment(new Segment(name, true));
    Segment& s = *segment;
    s.id_ = id;
    s.features_ = plan.features;
    s.bytes_ = trailer_end_of(plan);
    s.file_ = os::create_unnamed(kDirectory);
    try {
        os::resize(s.file_, s.bytes_);
    } catch (const std::system_error& error) {
        if (error.code().value() == EFBIG || error.code().value() == EINVAL)
            throw ShmExhausted(EFBIG, s.bytes_, os::free_bytes(s.file_));
        throw;
    }
    std::vector<ReservedRange> ranges = reserved;
    ranges.push_back({plan.header_offset(), s.bytes_ - plan.header_offset()});
    std::uint64_t need = later;
    for (const ReservedRange& range : ranges) need += range.bytes * range.count;
    // Check before reserving: filling up the file system only to fail would hurt everybody else meanwhile.
    if (const std::uint64_t free = os::free_bytes(s.file_); need > free)
        throw ShmExhausted(ENOSPC, need, free);
    for (const ReservedRange& range : ranges)
        for (std::uint64_t i = 0; i < range.count; ++i)
            if (const int error = os::reserve(s.file_, range.offset + i * range.stride, range.bytes))
                s.throw_reservation(error, need);
    s.map();
    for (const ReservedRange& range : ranges)
        for (std::uint64_t i = 0; i < range.count; ++i)
            s.populate(range.offset + i * range.stride, range.bytes);
    s.hold(slot);

    s.header_ = reinterpret_cast<SegmentHeader*>(s.mapping_->base() + plan.header_offset());
    s.sections_ = place_sections(plan);
    fill_in(*s.header_, plan, id, s.sections_, s.bytes_);

    SYNC_STEP(link);
    s.is_named_ = true;
    if (!is_segment_name(name)) os::link_name(s.file_, s.second_path());
    os::link_name(s.file_, s.path());
    // Reopened by name, so that tools that list descriptors (lsof, memlane.testing) show what it is, also later on.
    os::FileDescriptor named = os::open_existing(s.path());
    if (os::facts_of(named).is_same_file(os::facts_of(s.file_))) s.file_ = std::move(named);
    return segment;
}

inline std::shared_ptr<Segment> Segment::attach(const std::string& name, const SegmentPlan& plan,
                                                const std::optional<SegmentId>& id, std::optional<std::size_t> slot) {
    const std::string path = path_of(name);
    std::shared_ptr<Segment> segment(new Segment(name, false));
    Segment& s = *segment;
    try {
        s.file_ = os::open_existing(path);
    } catch (const std::system_error& error) {
        if (error.code().value() == ENOENT) throw SegmentMissing(name, path + " does not exist; " + kWhyMissing);
        throw_unopened(error, path, "segments", kOneUser);
    }
    s.enter(plan, id);
    const bool has_place = s.try_hold(slot);
    // Checked with a lock held, because from then on nobody takes the segment for dead. And checked before a taken
    // place is reported, because a sweep may have held it, and has removed the name since.
    if (os::facts_of(s.file_).links == 0)
        throw SegmentMissing(name, path + " was removed while this process attached; " + kWhyRemoved);
    if (!has_place) s.throw_taken(*slot);
    return segment;
}

inline std::shared_ptr<Segment> Segment::attach_through(const OpenFile& holder, const std::string& name,
                                                        const SegmentPlan& plan, const SegmentId& id,
                                                        std::optional<std::size_t> slot) {
    std::shared_ptr<Segment> segment(new Segment(name, false));
    Segment& s = *segment;
    const std::string gone = "the writer (pid " + std::to_string(holder.pid) +
                             ") has closed it or ended, or is in another pid namespace";
    try {
        s.file_ = os::open_of_other(holder.pid, holder.descriptor);
        s.enter(plan, id);
    } catch (const std::system_error& error) {
        const int why = error.code().value();
        if (why == ENOENT || why == ESRCH || why == ENODEV) throw SegmentMissing(name, gone);
        if (why == EACCES || why == EPERM) throw_unopened_of(holder.pid);
        throw;
    } catch (const LayoutMismatch&) {  // the number is another file's by now
        throw SegmentMissing(name, gone);
    } catch (const SegmentRefused&) {
        throw SegmentMissing(name, gone);
    }
    s.hold(slot);
    if (!slot) return segment;
    // Checked with the lock held: before, whoever left last may have given the file's space back.
    const auto* slots = s.section<ParticipantSlot>(Section::participants);
    SlotState writer{};
    const auto at = static_cast<std::uint64_t>(reinterpret_cast<const std::byte*>(&slots->state) - s.mapping_->base());
    if (!os::read_at(s.file_, &writer, sizeof writer, at) || writer != SlotState::attached) throw SegmentMissing(name, gone);
    return segment;
}

// Maps the file, if it is such a segment.
inline void Segment::enter(const SegmentPlan& plan, const std::optional<SegmentId>& id) {
    const os::FileFacts facts = os::facts_of(file_);
    check_access(path(), facts, kOneUser);
    // Not the whole file: what a system appends behind the trailer is not mapped.
    bytes_ = trailer_end_of(plan);
    // The creator reserved the trailer. Refuse a file that is all holes, because touching them would allocate pages.
    if (facts.bytes < bytes_ || facts.allocated < bytes_ - plan.header_offset()) throw_mismatch(plan);
    map();
    check_header(plan, id);
}

inline void Segment::hold(std::optional<std::size_t> slot) {
    if (!try_hold(slot)) throw_taken(*slot);
}

// False if somebody else holds the slot; the caller then holds the users' lock instead.
inline bool Segment::try_hold(std::optional<std::size_t> slot) {
    lock_ = LivenessLock(file_);
    SYNC_STEP(lock);
    if (slot ? lock_.take_slot(*slot) : lock_.take_user()) return true;
    // Users share their byte, so it is refused only while somebody removes the dead segment.
    if (!lock_.take_user()) throw SegmentMissing(name_, path() + " is being removed, because all its processes have died");
    return false;
}

inline void Segment::check_header(const SegmentPlan& plan, const std::optional<SegmentId>& id) {
    header_ = reinterpret_cast<SegmentHeader*>(mapping_->base() + plan.header_offset());
    const std::optional<SegmentHeader> copy = copy_header(file_, *header_, plan.header_offset());
    if (!copy) throw_mismatch(plan);
    const SegmentHeader& seen = *copy;
    if (seen.layout_major != kLayoutMajor)
        throw LayoutMismatch(path() + " has layout version " + std::to_string(seen.layout_major) +
                             ", this memlane has version " + std::to_string(kLayoutMajor));
    if ((seen.must_understand & ~kUnderstoodFeatures) != 0)
        throw LayoutMismatch(path() + " needs features " + std::to_string(seen.must_understand) +
                             ", this memlane understands " + std::to_string(kUnderstoodFeatures));
    if (seen.system != plan.system || seen.geometry != plan.geometry) throw_mismatch(plan);
    id_ = seen.id;
    space_each_ = seen.space_each;
    features_ = seen.must_understand;
    if (id && seen.id != *id)
        throw SegmentMissing(name_, path() + " is a newer segment of that name; the requested one is gone");
    if (seen.section_count > kMaxSections) throw LayoutMismatch(path() + " has a damaged section directory");
    for (const PlannedSection& want : plan.sections) {
        const SectionEntry* found = nullptr;
        for (std::uint32_t i = 0; i < seen.section_count; ++i)
            if (seen.sections[i].kind == want.kind) found = &seen.sections[i];
        const bool fits = found != nullptr && found->stride == want.stride && found->count == want.count &&
                          found->offset % kSectionAlignment == 0 && found->offset <= bytes_ &&
                          want.stride * want.count <= bytes_ - found->offset;
        if (!fits) throw LayoutMismatch(path() + " has a damaged section directory");
        sections_.push_back(*found);
    }
}

// The error says what the file contains instead.
inline void Segment::throw_mismatch(const SegmentPlan& plan) const {
    const std::string wanted = "geometry " + to_text(plan.geometry) + " of system " +
                               std::to_string(static_cast<std::uint32_t>(plan.system));
    if (const auto seen = find_header(file_))
        throw LayoutMismatch(path() + " has geometry " + to_text(seen->geometry) + " of system " +
                             std::to_string(static_cast<std::uint32_t>(seen->system)) + ", not " + wanted);
    throw LayoutMismatch(path() + " (" + std::to_string(os::facts_of(file_).bytes) +
                         " bytes) holds no memlane segment; requested was " + wanted);
}

}  // namespace memlane::core
