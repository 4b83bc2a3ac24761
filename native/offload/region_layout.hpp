// Layout of a region, and the locks beyond its end that say what it is and who uses it.
//
//   0                     row 0: block 0 of all workers    | cell 0 | cell 1 | ... | unused bytes |
//   row                   row 1                            a cell holds that block of all tensors of one worker
//   ...
//   blocks * row          unused bytes, up to total_bytes
//
// All bytes of the file belong to its users, so there is no header. Locks take its place, and are dropped when
// their holders die. F_OFD_GETLK reports a lock with its length, so a length can encode a number.
//
//   kName                      exclusive   held briefly by a process that joins, leaves, or removes the name
//   kBuilder, pid bytes        exclusive   held by the process that reserves the space
//   kReady, 1 + huge pages     shared      held by every process that knows that all the space is there
//   member i, pid bytes        exclusive   held while that holder uses the region; i is the first free number
//   kMapped + i                exclusive   held by member i once it has mapped the region
//   kOurs                      shared      held by the mapped description, which survives in views and forked children
//   label word w, as many bytes   shared   what people call the region, seven letters a word: held by every holder that
//                                          found it, or gave it where there was none
//   number f, as many bytes    shared      the four numbers of the geometry: held by every holder
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/layout.hpp"
#include "os/file_lock.hpp"

namespace memlane::offload {

inline constexpr std::uint64_t kMaxRegionBytes = std::uint64_t{1} << 58;
inline constexpr std::int64_t kPidSpan = std::int64_t{1} << 23;  // twice what pid_max can be, so neighbours never touch
inline constexpr std::int64_t kMostMembers = std::int64_t{1} << 16;

inline constexpr std::int64_t kName = core::kLockBase;
inline constexpr std::int64_t kReady = core::kLockBase + 1 * (std::int64_t{1} << 32);
inline constexpr std::int64_t kBuilder = core::kLockBase + 2 * (std::int64_t{1} << 32);
inline constexpr std::int64_t kMapped = core::kLockBase + 3 * (std::int64_t{1} << 32);
inline constexpr std::int64_t kOurs = core::kLockBase + 4 * (std::int64_t{1} << 32);
inline constexpr std::int64_t kMembers = core::kLockBase + (std::int64_t{1} << 40);
inline constexpr std::int64_t kLabel = core::kLockBase + (std::int64_t{1} << 60);
inline constexpr std::int64_t kLabelSpan = std::int64_t{1} << 50;
inline constexpr std::size_t kLettersOfWord = 7;  // of 7 bits
inline constexpr std::size_t kLabelWords = 6;  // for 40 letters
inline constexpr std::int64_t kNumbers = core::kLockBase + (std::int64_t{1} << 61);
inline constexpr std::int64_t kNumberSpan = std::int64_t{1} << 59;

// What all holders agree on.
struct RegionGeometry {
    std::uint64_t total_bytes;
    std::uint64_t blocks;
    std::uint64_t row_bytes;
    std::uint64_t cell_bytes;  // of one block of one worker; row_bytes if each holder divides rows as it likes

    std::array<std::uint64_t, 4> numbers() const noexcept { return {total_bytes, blocks, row_bytes, cell_bytes}; }
    bool operator==(const RegionGeometry&) const = default;
};

inline std::string to_text(const RegionGeometry& g) {
    const std::string start = std::to_string(g.total_bytes) + " bytes, " + std::to_string(g.blocks) + " blocks of ";
    if (g.cell_bytes == g.row_bytes) return start + std::to_string(g.row_bytes) + " bytes";
    return start + std::to_string(g.row_bytes / g.cell_bytes) + " workers, cells of " + std::to_string(g.cell_bytes) +
           " bytes";
}

constexpr os::LockRange name_lock() noexcept { return {kName, 1}; }
// `huge_pages`: how many the space was made of; 8 PiB at most.
constexpr os::LockRange ready_lock(std::uint64_t huge_pages) noexcept {
    return {kReady, std::min(1 + static_cast<std::int64_t>(huge_pages), kBuilder - kReady)};
}
constexpr os::LockRange ours_lock() noexcept { return {kOurs, 1}; }
constexpr os::LockRange builder_lock(std::int64_t pid) noexcept { return {kBuilder, pid}; }
constexpr os::LockRange member_lock(std::int64_t member, std::int64_t pid) noexcept {
    return {kMembers + member * kPidSpan, pid};
}
constexpr os::LockRange members_from(std::int64_t member) noexcept {
    return {kMembers + member * kPidSpan, (kMostMembers - member) * kPidSpan};
}
constexpr os::LockRange mapped_lock(std::int64_t member) noexcept { return {kMapped + member, 1}; }
constexpr os::LockRange number_lock(std::size_t field, std::uint64_t value) noexcept {
    return {kNumbers + static_cast<std::int64_t>(field) * kNumberSpan, static_cast<std::int64_t>(value)};
}
// A word is 0 behind the last letter: it has no lock.
constexpr os::LockRange label_lock(std::size_t word, std::uint64_t letters) noexcept {
    return {kLabel + static_cast<std::int64_t>(word) * kLabelSpan, static_cast<std::int64_t>(letters)};
}
constexpr std::uint64_t label_word(std::string_view label, std::size_t word) noexcept {
    std::uint64_t letters = 0;
    const std::size_t start = word * kLettersOfWord;
    for (std::size_t i = start; i < std::min(label.size(), start + kLettersOfWord); ++i)
        letters |= std::uint64_t(label[i] & 0x7f) << (7 * (i - start));
    return letters;
}
inline std::string letters_of(std::uint64_t word) {
    std::string letters;
    for (; word != 0; word >>= 7) letters += static_cast<char>(word & 0x7f);
    return letters;
}

static_assert(kBuilder + kPidSpan < kMapped && kMapped + kMostMembers < kOurs && kOurs < kMembers);
static_assert(kMembers + kMostMembers * kPidSpan <= kLabel);
static_assert(kLabel + std::int64_t{kLabelWords} * kLabelSpan <= kNumbers && 7 * kLettersOfWord < 50);
static_assert(kMaxRegionBytes < static_cast<std::uint64_t>(kNumberSpan));
static_assert(kNumbers + 3 * kNumberSpan + (kNumberSpan - 1) > 0, "offsets of locks are signed 64-bit numbers");

}  // namespace memlane::offload
