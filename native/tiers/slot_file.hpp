// A disk tier's own pair of files: opened, sized, locked, written and recovered. How others read it: slot_reader.hpp.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <optional>
#include <shared_mutex>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "core/access.hpp"
#include "core/errors.hpp"
#include "core/layout.hpp"
#include "os/clock.hpp"
#include "os/file_lock.hpp"
#include "os/fork.hpp"
#include "os/process.hpp"
#include "tiers/block_lists.hpp"
#include "tiers/slot_layout.hpp"
#include "tiers/slot_uses.hpp"

namespace memlane::tiers {

// Another process, or another tier of this one, has the pair.
struct PairInUse : std::runtime_error {
    PairInUse(std::string file, std::uint64_t holder) : runtime_error(file + " is in use"), path(std::move(file)), pid(holder) {}
    std::string path;
    std::uint64_t pid;  // 0: unknown
};

// The file system cannot go past the page cache.
struct NotDirect : std::runtime_error {
    using runtime_error::runtime_error;
};

// What a user should know about the pair that was opened.
struct OpenedPair {
    std::uint64_t wanted_slots = 0;  // of the capacity; the disk may have less
    bool is_indirect = false;        // the page cache was chosen, because direct I/O is refused
    std::uint32_t alignment = 0;     // what it wants there, if that is the reason; 0: it is refused
    bool copies_on_write = false;    // so reserved space does not last
    std::uint64_t margin = 0;        // bytes of the disk that were left free
    int refused = 0;                 // the errno of fallocate: the files are sparse; 0: their space is reserved
    bool is_memory = false;          // a tmpfs
    bool was_damaged = false;        // its first page was: it begins empty
    std::uint64_t other_row_bytes = 0;  // of the pair that was there: it begins empty; 0: as ours, or none
};

// Memory for O_DIRECT.
class Staging {
public:
    explicit Staging(std::size_t bytes)
        : memory_(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kSlotAlignment}))), bytes_(bytes) {}
    std::byte* data() const noexcept { return memory_.get(); }
    std::size_t bytes() const noexcept { return bytes_; }

private:
    struct Free {
        void operator()(std::byte* memory) const noexcept {
            ::operator delete(memory, std::align_val_t{kSlotAlignment});
        }
    };
    std::unique_ptr<std::byte, Free> memory_;
    std::size_t bytes_;
};

class SlotFile {
public:
    // The number of slots that fit: all files count.
    static std::uint64_t slots_in(std::uint64_t capacity, std::uint64_t row_bytes) noexcept {
        if (capacity < core::kPage) return 0;
        std::uint64_t slots = (capacity - core::kPage) / (slot_bytes_of(row_bytes) + sizeof(SlotHeader));
        const auto bytes = [&] {
            const std::uint64_t beside = core::align_up(header_at(slots), core::kPage) + core::align_up(SlotUses::at(slots), core::kPage);
            return beside + slots * slot_bytes_of(row_bytes);
        };
        while (slots > 0 && bytes() > capacity) --slots;
        return slots;
    }

    enum class Direct : std::uint8_t { never, if_possible, always };

    SlotFile(const std::string& folder, const std::string& opener, std::uint64_t row_bytes, std::uint64_t slots,
             const Namespace& name_space, Direct direct, std::optional<std::uint64_t> margin = 0)
        : row_bytes_(row_bytes), name_space_(name_space), folder_(folder), opener_(opener) {
        const std::string path = folder + "/" + opener;
        headers_ = opened(path + ".headers", 0);
        lock(path + ".headers");
        const std::optional<PairHeader> found = read_pair(path + ".headers");
        data_ = opened(path + ".data", 0);
        const bool is_new = os::facts_of(headers_.file()).bytes == 0;
        if (is_new && os::facts_of(data_.file()).bytes > 0) refuse(path + ".data");
        const bool is_proved = found && found->slots > 0;  // without changing anything
        const bool is_open_direct = direct != Direct::never && try_direct(path + ".data");
        is_direct_ = is_open_direct && (!is_proved || takes_direct());
        if (!is_direct_ && direct == Direct::always) throw NotDirect(folder);
        opened_.is_memory = os::is_tmpfs(data_.file());
        uses_file_ = opened(path + ".uses", 0);
        if (!found) {
            os::resize(data_.file(), 0);  // first: data without headers would be somebody else's
            os::resize(headers_.file(), 0);
            os::resize(uses_file_.file(), 0);
            if (os::copies_on_write(data_.file())) os::write_in_place(data_.file());
            if (os::copies_on_write(headers_.file())) os::write_in_place(headers_.file());
        }
        opened_.copies_on_write = os::copies_on_write(data_.file()) || os::copies_on_write(headers_.file());
        // 5 % of the disk, at most 1 GiB.
        opened_.margin = margin.value_or(std::min<std::uint64_t>(os::total_bytes(data_.file()) / 20, 1u << 30));
        settle(slots, found);
        if (is_direct_ && !is_proved && !takes_direct()) is_direct_ = false;
        if (!is_direct_ && direct == Direct::always) throw NotDirect(folder);
        opened_.is_indirect = direct == Direct::if_possible && !is_direct_;
        if (opened_.is_indirect && is_open_direct) data_ = opened(path + ".data", 0);
        uses_.open(uses_file_.file(), pair_.slots);
    }

    ~SlotFile() { close(); }

    const std::string& folder() const noexcept { return folder_; }
    const std::string& opener() const noexcept { return opener_; }
    const Namespace& name_space() const noexcept { return name_space_; }
    // Those that this tier uses, from 0; of all if it has no quota.
    std::uint64_t slots() const noexcept { return own_slots_.empty() ? pair_.slots : own_slots_.size(); }
    std::uint64_t all_slots() const noexcept { return pair_.slots; }
    std::uint64_t row_bytes() const noexcept { return row_bytes_; }
    std::uint64_t slot_bytes() const noexcept { return slot_bytes_of(row_bytes_); }
    bool is_direct() const noexcept { return is_direct_; }
    const OpenedPair& facts() const noexcept { return opened_; }
    const os::FileDescriptor& data() const noexcept { return data_.file(); }
    std::uint64_t data_at(Block slot) const noexcept { return place_of(slot) * slot_bytes(); }

    // The slots' blocks are used now, or stored; kNoBlock is passed over. The last comes first, as in the pool. One thread at
    // a time.
    void note_uses(std::span<const Block> slots, bool are_stored) noexcept {
        const auto now = static_cast<std::uint64_t>(os::monotonic_now(CLOCK_REALTIME) / 1000);
        for (std::size_t at = slots.size(); at-- > 0;) {
            if (slots[at] == kNoBlock) continue;
            are_stored ? uses_.stored(place_of(slots[at]), now) : uses_.used(place_of(slots[at]), now);
        }
    }
    bool has_new_uses() const noexcept { return uses_.is_changed(); }
    const std::optional<TunerState>& tuner() const noexcept { return uses_.tuner(); }
    // 0 or an errno.
    int write_uses(const TunerState& tuner) noexcept { return uses_.write(uses_file_.file(), tuner); }

    // A header of this tier for the next store. The CRC of the data is the caller's to set.
    SlotHeader next_header(const Digest& digest) noexcept {
        SlotHeader header;
        header.digest = digest;
        header.name_space = name_space_;
        header.sequence = next_sequence_++;
        header.bytes = static_cast<std::uint32_t>(row_bytes_);
        header.stored = static_cast<std::uint32_t>(os::monotonic_now(CLOCK_REALTIME) / os::kSecond);
        return header;
    }

    // 0 or an errno.
    int write(Block slot, SlotHeader header) const noexcept {
        header.crc = header.own_crc();
        const std::shared_lock not_purged(purging_);
        return os::write_at(headers_.file(), &header, sizeof header, header_at(place_of(slot)));
    }
    int erase(Block slot) const noexcept { return erase_at(place_of(slot)); }
    // What the slot has under that key; nullopt if it has something else. Throws system_error.
    std::optional<SlotHeader> read(Block slot, const Digest& digest) const {
        SlotHeader header;
        const bool is_there = os::read_at(headers_.file(), &header, sizeof header, header_at(place_of(slot)));
        if (!is_there || !is_ours(header) || header.digest != digest) return std::nullopt;
        return header;
    }

    // All slots are empty from now on, also those that are being written. Returns what purge() takes. Any thread.
    std::uint64_t clear() noexcept {
        const std::uint64_t now = next_sequence_;
        for (std::uint64_t first = first_sequence_; first < now && !first_sequence_.compare_exchange_weak(first, now);) {
        }
        return now;
    }
    std::uint64_t next_sequence() const noexcept { return next_sequence_; }
    // Slots with less are empty: now, and when the file was opened.
    std::uint64_t first_sequence() const noexcept { return first_sequence_; }
    std::uint64_t first_sequence_at_open() const noexcept { return pair_.first_sequence; }

    // True if both files still have their names. False if that cannot be said.
    bool has_names() const noexcept {
        try {
            return os::facts_of(headers_.file()).links > 0 && os::facts_of(data_.file()).links > 0;
        } catch (const std::system_error&) {
            return false;
        }
    }

    // Erases what that namespace has stored before that sequence. One thread at a time. 0 or an errno.
    int purge(const Namespace& name_space, std::uint64_t before) noexcept {
        int error = 0;
        try {
            for_each_header(headers_.file(), pair_, [&](std::uint64_t slot, const SlotHeader& seen) {
                if (seen.name_space != name_space || seen.sequence >= before) return;
                const std::unique_lock alone(purging_);
                SlotHeader now;  // something else may have been stored there
                const bool is_it = os::read_at(headers_.file(), &now, sizeof now, header_at(slot)) && now.sequence == seen.sequence;
                if (const int failed = is_it ? erase_at(slot) : 0; failed != 0) error = failed;
            });
        } catch (const std::system_error& failed) {
            error = failed.code().value();
        }
        return error;
    }
    // What clear() has emptied by now is empty for a restart, too. One thread at a time. 0 or an errno.
    int write_cleared() noexcept {
        PairHeader cleared = pair_;
        cleared.first_sequence = first_sequence_;
        cleared.crc = cleared.own_crc();
        return os::write_at(headers_.file(), &cleared, sizeof cleared, 0);
    }

    // Both files; nobody uses them. The lock first: a child that is being forked may still have its file for a moment.
    void close() noexcept {
        try {
            if (headers_.is_intact()) os::unlock(headers_.file(), kPairLock);
        } catch (const std::system_error&) {  // then it ends with the file
        }
        data_.close_on_disk();
        uses_file_.close_on_disk();
        headers_.close_on_disk();
    }

    struct Slots {
        struct Kept {
            std::uint64_t sequence;
            Block slot;
            Digest digest;
            std::uint32_t stored;  // when
            SlotUse use{};
        };
        std::vector<Kept> own;       // in the order in which they were stored
        std::vector<Block> foreign;  // of other namespaces, the oldest first
    };

    // What a restart finds. With a quota, the tier uses so many slots from then on: those of its own blocks, the last used
    // first, then empty ones, then those of other namespaces; the rest of its own are erased. 0: it has none. Call it before
    // the first store. Throws system_error.
    Slots recover(std::uint64_t quota = 0) {
        Slots found;
        std::vector<std::pair<std::uint64_t, Block>> foreign;
        for_each_header(headers_.file(), pair_, [&](std::uint64_t at, const SlotHeader& header) {
            if (header.bytes != row_bytes_) return;
            const auto slot = static_cast<Block>(at);
            next_sequence_ = std::max<std::uint64_t>(next_sequence_, header.sequence + 1);
            if (header.name_space == name_space_) {
                found.own.push_back({header.sequence, slot, header.digest, header.stored, uses_.of(at, header.stored)});
            } else {
                foreign.emplace_back(header.sequence, slot);
            }
        });
        std::ranges::sort(found.own, {}, &Slots::Kept::sequence);
        std::ranges::sort(foreign);
        for (const auto& [sequence, slot] : foreign) found.foreign.push_back(slot);
        if (quota > 0 && quota < pair_.slots) keep_to(quota, found);
        return found;
    }

private:
    std::uint64_t place_of(Block slot) const noexcept { return own_slots_.empty() ? slot : own_slots_[slot]; }

    int erase_at(std::uint64_t place) const noexcept {
        const SlotHeader none;
        return os::write_at(headers_.file(), &none, sizeof none, header_at(place));
    }

    void keep_to(std::uint64_t quota, Slots& found) {
        std::vector<std::uint64_t> order(found.own.size());
        std::iota(order.rbegin(), order.rend(), std::uint64_t{0});
        std::ranges::stable_sort(order, std::greater(), [&](std::uint64_t at) { return found.own[at].use.at; });
        std::vector<bool> is_taken(pair_.slots), is_kept(found.own.size());
        for (std::size_t i = 0; i < order.size(); ++i) {
            const Block slot = found.own[order[i]].slot;
            is_taken[slot] = true;
            is_kept[order[i]] = i < quota;
            if (i < quota) continue;
            if (const int error = erase_at(slot); error != 0) os::throw_errno("cannot erase blocks beyond a tier's quota", error);
        }
        Slots kept;
        for (std::size_t at = 0; at < found.own.size(); ++at) {
            if (!is_kept[at]) continue;
            kept.own.push_back(found.own[at]);
            own_slots_.push_back(std::exchange(kept.own.back().slot, static_cast<Block>(own_slots_.size())));
        }
        for (const Block slot : found.foreign) is_taken[slot] = true;
        for (Block slot = 0; slot < pair_.slots && own_slots_.size() < quota; ++slot)
            if (!is_taken[slot]) own_slots_.push_back(slot);
        for (std::size_t i = 0; i < found.foreign.size() && own_slots_.size() < quota; ++i) {
            kept.foreign.push_back(static_cast<Block>(own_slots_.size()));
            own_slots_.push_back(found.foreign[i]);
        }
        for (std::size_t i = quota; i < order.size() && own_slots_.size() < quota; ++i) own_slots_.push_back(found.own[order[i]].slot);
        found = std::move(kept);
    }

    bool is_ours(const SlotHeader& header) const noexcept {
        return header.is_valid() && header.name_space == name_space_ && header.bytes == row_bytes_ &&
               header.sequence >= first_sequence_.load();
    }

    static os::OwnFile opened(const std::string& path, int flags) {
        os::OwnFile file = os::OwnFile::of_disk([&] {
            os::FileDescriptor made = os::try_open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | flags);
            if (!made.is_open() && errno == ELOOP) throw core::SegmentRefused(path + " is a symbolic link");
            if (!made.is_open()) os::throw_errno("cannot open " + path);
            return made;
        });
        core::check_owner(path, os::facts_of(file.file()), "give another path or opener");
        os::make_private(file.file());
        return file;
    }

    bool try_direct(const std::string& path) {
        try {
            data_ = opened(path, O_DIRECT);
            return true;
        } catch (const std::system_error& error) {
            if (error.code().value() == EINVAL) return false;  // the file system cannot
            throw;
        }
    }

    // Whether the disk takes a piece of a slot past the page cache: some refuse it only when it is written. Writes what is there.
    bool takes_direct() {
        constexpr std::uint64_t kMost = 128u << 10;
        if (const auto wanted = os::direct_alignment(data_.file())) {
            const bool fits = wanted->offset > 0 && wanted->memory <= kSlotAlignment && slot_bytes() % wanted->offset == 0;
            if (!fits) opened_.alignment = std::max(wanted->offset, wanted->memory);
            if (!fits) return false;
        }
        const Staging piece(std::min(slot_bytes(), kMost));
        const auto is_refusal = [](int error) { return error == EINVAL || error == EOPNOTSUPP || error == ENOSYS; };
        try {
            if (!os::read_at(data_.file(), piece.data(), piece.bytes(), 0)) return true;  // it is shorter than its header says
        } catch (const std::system_error& error) {
            return !is_refusal(error.code().value());
        }
        return !is_refusal(os::write_at(data_.file(), piece.data(), piece.bytes(), 0));
    }

    void lock(const std::string& path) {
        std::uint64_t pid = 0;
        bool is_locked;
        try {
            is_locked = os::try_lock(headers_.file(), os::LockKind::exclusive, kPairLock);
        } catch (const std::system_error& error) {
            throw core::SegmentRefused("cannot lock " + path + " (" + error.code().message() +
                                       "): its file system has no locks, so two processes might write there; give another path");
        }
        if (!is_locked) {
            if (!os::read_at(headers_.file(), &pid, sizeof pid, kPidAt)) pid = 0;
            throw PairInUse(path, pid);
        }
    }

    [[noreturn]] static void refuse(const std::string& path) {
        throw core::SegmentRefused(path + " exists and is no disk tier's; give another path or opener");
    }

    // nullopt: it is new, or damaged.
    std::optional<PairHeader> read_pair(const std::string& path) {
        PairHeader found;
        const std::uint64_t size = os::facts_of(headers_.file()).bytes;
        if (size == 0) return std::nullopt;
        const bool is_there = os::read_at(headers_.file(), &found, sizeof found, 0);
        // A pair that was not finished has zeroes there, and nothing behind it is valid.
        if (is_there && found.magic != kPairMagic && is_zero()) return std::nullopt;
        if (!is_there || found.magic != kPairMagic) refuse(path);
        if (found.version != kPairVersion) {
            throw core::LayoutMismatch(path + " has format " + std::to_string(found.version) + "; this memlane reads " +
                                       std::to_string(kPairVersion) + ". Remove the files, or give another path");
        }
        if (found.crc != found.own_crc()) {
            opened_.was_damaged = true;
            return std::nullopt;
        }
        if (found.row_bytes != row_bytes_) {
            opened_.other_row_bytes = found.row_bytes;
            return std::nullopt;
        }
        return found;
    }

    // The whole first page.
    bool is_zero() const {
        std::vector<std::byte> page(core::kPage);
        return os::read_at(headers_.file(), page.data(), page.size(), 0) &&
               std::ranges::all_of(page, [](std::byte each) { return each == std::byte{0}; });
    }

    // Sizes both files. The first page is written before slots are dropped, and after slots were added.
    void settle(std::uint64_t slots, const std::optional<PairHeader>& found) {
        opened_.wanted_slots = slots;
        std::uint64_t own = 0;
        for (const os::OwnFile* file : {&data_, &headers_, &uses_file_}) own += os::facts_of(file->file()).allocated;
        const std::uint64_t free = os::free_bytes(data_.file());
        const std::uint64_t usable = free == UINT64_MAX ? free : free - std::min(free, opened_.margin);
        const std::uint64_t room = usable > UINT64_MAX - own ? UINT64_MAX : usable + own;
        const std::uint64_t kept = std::min(slots, found ? found->slots : 0);  // they have their space already
        slots = std::max(kept, std::min(slots, slots_in(room, row_bytes_)));
        if (slots == 0) os::throw_errno("the disk has no space for a single row of a tier", ENOSPC);
        pair_ = found.value_or(PairHeader{kPairMagic, kPairVersion, 0, row_bytes_, 0, 0});
        next_sequence_ = pair_.first_sequence;
        first_sequence_ = pair_.first_sequence;
        if (pair_.slots > slots) {
            pair_.slots = slots;
            write_pair();
        }
        os::resize(headers_.file(), header_at(pair_.slots));  // a slot that comes back later is empty
        pair_.slots = with_space(slots, kept);
        os::resize(headers_.file(), header_at(pair_.slots));
        write_pair();
        os::resize(uses_file_.file(), SlotUses::at(pair_.slots));
        const auto pid = static_cast<std::uint64_t>(os::own_pid());
        static_cast<void>(os::write_at(headers_.file(), &pid, sizeof pid, kPidAt));  // for a message only
    }

    // Reserves the space of so many slots, or of fewer where the disk has less, but `least`; returns how many.
    std::uint64_t with_space(std::uint64_t slots, std::uint64_t least) {
        constexpr int kTries = 16;
        for (int tries = 0;; ++tries) {
            os::resize(data_.file(), slots * slot_bytes());
            int error = os::reserve(data_.file(), 0, slots * slot_bytes());
            if (error == 0) error = os::reserve(headers_.file(), 0, header_at(slots));
            if (error == 0) error = os::reserve(uses_file_.file(), 0, SlotUses::at(slots));
            if (error == 0) return slots;
            const bool is_full = error == ENOSPC || error == EDQUOT;
            if (!is_full && error != EOPNOTSUPP && error != ENOSYS) os::throw_errno("cannot reserve the space of a tier", error);
            if (is_full && slots > std::max<std::uint64_t>(least, 1) && tries < kTries) {
                slots = std::max(least, slots - std::max<std::uint64_t>(1, slots / 64));  // its own tables need some, too
                continue;
            }
            opened_.refused = error;
            return slots;
        }
    }

    void write_pair() {
        pair_.crc = pair_.own_crc();
        if (const int error = os::write_at(headers_.file(), &pair_, sizeof pair_, 0); error != 0) {
            os::throw_errno("cannot write the first page of a tier", error);
        }
    }

    const std::uint64_t row_bytes_;
    const Namespace name_space_;
    const std::string folder_, opener_;
    os::OwnFile headers_;
    os::OwnFile data_;
    os::OwnFile uses_file_;
    SlotUses uses_;
    std::vector<Block> own_slots_;  // with a quota: those that the tier uses
    bool is_direct_ = false;
    OpenedPair opened_;
    PairHeader pair_;
    std::atomic<std::uint64_t> first_sequence_ = 0;  // the pair's; threads read it
    std::atomic<std::uint64_t> next_sequence_ = 0;
    mutable std::shared_mutex purging_;  // shared: writes a header; alone: erases one of another store
};

}  // namespace memlane::tiers
