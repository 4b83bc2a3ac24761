// Another opener's pair of files, for reading: which keys it has, and their blocks. Its owner goes on writing, so whatever is read
// is checked, and read again afterwards. The files are never mapped: one that becomes shorter would end this process.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "core/layout.hpp"
#include "os/clock.hpp"
#include "os/file.hpp"
#include "tiers/block_lists.hpp"
#include "tiers/slot_layout.hpp"

namespace memlane::tiers {

class SlotReader {
public:
    // The files are `path`.headers and `path`.data. Throws system_error: they are not this user's regular files, for one.
    SlotReader(const std::string& path, std::uint64_t row_bytes, const Namespace& name_space)
        : headers_(opened(path + ".headers")), data_(opened(path + ".data")), row_bytes_(row_bytes), name_space_(name_space) {}

    // Another file may have its name later.
    std::uint64_t number() const { return os::facts_of(headers_).inode; }

    // The greatest sequence of all namespaces, as of the last look; -1: there is none.
    std::int64_t last_sequence() const noexcept { return last_sequence_.load(); }

    // Reads which keys there are if the file has changed, or in any case. One thread at a time; others may use what was read
    // before meanwhile. Throws system_error.
    void look(bool in_any_case) {
        const std::int64_t begun = os::monotonic_now(CLOCK_REALTIME);
        const os::FileFacts now = os::facts_of(headers_);
        const Seen seen{now.modified_ns, now.changed_ns, now.bytes};
        if (seen == seen_ && !in_any_case) return;
        std::vector<Entry> entries;
        std::int64_t last = -1;
        if (const std::optional<PairHeader> pair = read_pair()) {
            const std::uint64_t fit = now.bytes < header_at(0) ? 0 : (now.bytes - header_at(0)) / sizeof(SlotHeader);
            read_headers(std::min(pair->slots, fit), pair->first_sequence, entries, last);
        }
        // The later of two slots with one key counts: it comes first.
        std::ranges::sort(entries, [](const Entry& a, const Entry& b) {
            return std::tuple(a.key, b.sequence) < std::tuple(b.key, a.sequence);
        });
        auto index = std::make_shared<Index>();
        for (const Entry& entry : entries) {
            if (!index->keys.empty() && index->keys.back() == entry.key) continue;
            index->keys.push_back(entry.key);
            index->slots.push_back(entry.slot);
        }
        last_sequence_ = last;
        {
            const std::lock_guard guard(mutex_);
            index_ = std::move(index);
        }
        // A write within the same tick of the file system's clock would not be seen.
        const bool is_recent = begun - now.modified_ns < kTick;
        seen_ = is_recent ? Seen{} : seen;
    }

    // True if it has these keys, stored after those sequences.
    std::vector<bool> has(std::span<const Digest> digests, std::span<const std::int64_t> after) const {
        std::vector<bool> there(digests.size());
        const std::optional<std::uint64_t> first = first_sequence();
        for (std::size_t at = 0; first && at < digests.size(); ++at)
            if (const std::optional<Block> slot = find(digests[at])) there[at] = read(*slot, digests[at], *first, after[at]).has_value();
        return there;
    }

    // Reads the rows of these keys, stored after those sequences. Returns what the CRC of each should be, or nullopt: it is not
    // there, or its owner replaces it.
    std::vector<std::optional<std::uint32_t>> get(std::span<const Digest> digests, std::span<const std::int64_t> after,
                                                  std::span<const std::span<std::byte>> into) const {
        std::vector<std::optional<SlotHeader>> found(digests.size());
        const std::optional<std::uint64_t> first = first_sequence();
        for (std::size_t at = 0; first && at < digests.size(); ++at) {
            const std::optional<Block> slot = find(digests[at]);
            if (!slot) continue;
            const std::optional<SlotHeader> header = read(*slot, digests[at], *first, after[at]);
            if (!header || !read_data(*slot, into[at])) continue;
            const std::optional<SlotHeader> again = read(*slot, digests[at], *first, after[at]);
            if (again && again->sequence == header->sequence && again->data_crc == header->data_crc) found[at] = header;
        }
        const std::optional<std::uint64_t> now = first_sequence();  // its owner may have cleared it meanwhile
        std::vector<std::optional<std::uint32_t>> crcs(digests.size());
        for (std::size_t at = 0; now && at < digests.size(); ++at)
            if (found[at] && found[at]->sequence >= *now) crcs[at] = found[at]->data_crc;
        return crcs;
    }

private:
    static constexpr std::size_t kAtATime = 1 << 14;        // headers of one read
    static constexpr std::int64_t kTick = 50'000'000;       // ns, more than the clock of a file system steps by

    struct Entry {
        std::uint64_t key;  // the first bytes of the digest
        std::uint64_t sequence;
        Block slot;
    };
    struct Index {
        std::vector<std::uint64_t> keys;  // sorted
        std::vector<Block> slots;
    };

    struct Seen {
        std::int64_t modified = -1, changed = -1;
        std::uint64_t bytes = 0;
        bool operator==(const Seen&) const = default;
    };

    static os::FileDescriptor opened(const std::string& path) {
        os::FileDescriptor file = os::try_open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
        if (!file.is_open()) os::throw_errno("cannot open " + path);
        const os::FileFacts facts = os::facts_of(file);
        if (!facts.is_regular() || facts.owner != ::geteuid()) os::throw_errno("cannot open " + path, EPERM);
        return file;
    }

    static std::uint64_t key_of(const Digest& digest) noexcept {
        std::uint64_t key;
        std::memcpy(&key, digest.data(), sizeof key);
        return key;
    }

    // nullopt: it has no blocks for this reader. Throws system_error.
    std::optional<PairHeader> read_pair() const {
        PairHeader found;
        if (!os::read_at(headers_, &found, sizeof found, 0)) return std::nullopt;
        const bool is_pair = found.magic == kPairMagic && found.version == kPairVersion && found.crc == found.own_crc();
        return is_pair && found.row_bytes == row_bytes_ ? std::optional(found) : std::nullopt;
    }

    // The first sequence that its owner has not cleared; nullopt: it has no blocks for this reader.
    std::optional<std::uint64_t> first_sequence() const {
        try {
            const std::optional<PairHeader> pair = read_pair();
            return pair ? std::optional(pair->first_sequence) : std::nullopt;
        } catch (const std::system_error&) {  // of this file alone
            return std::nullopt;
        }
    }

    void read_headers(std::uint64_t count, std::uint64_t first, std::vector<Entry>& entries,
                      std::int64_t& last) const {
        std::vector<SlotHeader> headers(kAtATime);
        for (std::uint64_t at = 0; at < count; at += headers.size()) {
            headers.resize(std::min<std::uint64_t>(kAtATime, count - at));
            if (!os::read_at(headers_, headers.data(), headers.size() * sizeof(SlotHeader), header_at(at))) return;
            for (std::size_t i = 0; i < headers.size(); ++i) {
                const SlotHeader& header = headers[i];
                const auto sequence = static_cast<std::int64_t>(header.sequence);
                if (sequence > last && header.is_valid()) last = sequence;
                if (header.name_space == name_space_ && header.bytes == row_bytes_ && header.sequence >= first)
                    entries.push_back({key_of(header.digest), header.sequence, static_cast<Block>(at + i)});
            }
        }
    }

    std::optional<Block> find(const Digest& digest) const {
        const std::uint64_t key = key_of(digest);
        std::shared_ptr<const Index> index;
        {
            const std::lock_guard guard(mutex_);
            index = index_;
        }
        const auto found = std::ranges::lower_bound(index->keys, key);
        if (found == index->keys.end() || *found != key) return std::nullopt;
        return index->slots[static_cast<std::size_t>(found - index->keys.begin())];
    }

    // The header of that slot, unless it has something else.
    std::optional<SlotHeader> read(Block slot, const Digest& digest, std::uint64_t first, std::int64_t after) const {
        SlotHeader header;
        try {
            if (!os::read_at(headers_, &header, sizeof header, header_at(slot))) return std::nullopt;
        } catch (const std::system_error&) {  // of this file alone
            return std::nullopt;
        }
        const bool is_it = header.digest == digest && header.name_space == name_space_ && header.bytes == row_bytes_;
        const bool counts = header.sequence >= first && static_cast<std::int64_t>(header.sequence) > after;
        return is_it && counts && header.is_valid() ? std::optional(header) : std::nullopt;
    }

    bool read_data(Block slot, std::span<std::byte> into) const {
        try {
            return os::read_at(data_, into.data(), into.size(), std::uint64_t{slot} * slot_bytes_of(row_bytes_));
        } catch (const std::system_error&) {
            return false;
        }
    }

    const os::FileDescriptor headers_, data_;
    const std::uint64_t row_bytes_;
    const Namespace name_space_;
    std::atomic<std::int64_t> last_sequence_ = -1;
    mutable std::mutex mutex_;
    std::shared_ptr<const Index> index_ = std::make_shared<Index>();
    Seen seen_;
};

}  // namespace memlane::tiers
