// When the block in each slot of a disk tier was last used, and how often, and what the tuner of its policy has learned. Kept in
// memory, and written beside the pair (OPENER.uses) now and then: what a kill loses of it is the order of eviction, no block.
//
// The file: a page that describes it, then 8 bytes a slot.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/layout.hpp"
#include "os/file.hpp"
#include "tiers/crc32c.hpp"
#include "tiers/tuner.hpp"

namespace memlane::tiers {

// The second in a word; 0 if nothing is known.
struct SlotUse {
    std::uint64_t at = 0;  // in microseconds since 1970
    std::uint32_t hits = 0;

    static constexpr std::uint64_t kSecond = 1'000'000;
    static constexpr int kHitBits = 13;
    static constexpr std::uint64_t kMostHits = (1u << kHitBits) - 1;

    static SlotUse from(std::uint64_t word) noexcept { return {word >> kHitBits, static_cast<std::uint32_t>(word & kMostHits)}; }
    // What is known of a block that was stored at that second: the word may be of one before it.
    static SlotUse of(std::uint64_t word, std::uint32_t stored) noexcept {
        const SlotUse found = from(word);
        return found.at / kSecond < stored ? SlotUse{stored * kSecond, 0} : found;
    }
};

struct UsesHeader {
    std::array<char, 8> magic{'M', 'E', 'M', 'L', 'U', 'S', 'E', '1'};
    std::uint32_t crc = 0;  // of what stands behind it
    std::uint32_t reserved = 0;
    TunerState tuner{};

    std::uint32_t own_crc() const noexcept {
        return Crc32c::of(std::as_bytes(std::span(this, 1)).subspan(offsetof(UsesHeader, reserved)));
    }
    bool is_valid() const noexcept { return magic == UsesHeader().magic && crc == own_crc(); }
};

class SlotUses {
public:
    static std::uint64_t at(std::uint64_t slot) noexcept { return core::kPage + slot * sizeof(std::uint64_t); }

    // The words of so many slots; those that the file lacks are 0. Throws system_error.
    static std::vector<std::uint64_t> read(const os::FileDescriptor& file, std::uint64_t slots) {
        std::vector<std::uint64_t> words(slots);
        const std::uint64_t bytes = os::facts_of(file).bytes;
        const std::uint64_t there = bytes < at(0) ? 0 : std::min(slots, (bytes - at(0)) / sizeof(std::uint64_t));
        UsesHeader header;
        const bool is_ours = os::read_at(file, &header, sizeof header, 0) && header.magic == UsesHeader().magic;
        if (is_ours && there > 0) static_cast<void>(os::read_at(file, words.data(), there * sizeof(std::uint64_t), at(0)));
        return words;
    }

    // Before anything else: what an earlier life has written there.
    void open(const os::FileDescriptor& file, std::uint64_t slots) {
        const std::vector<std::uint64_t> found = read(file, slots);
        words_ = std::vector<std::atomic<std::uint64_t>>(slots);
        for (std::uint64_t slot = 0; slot < slots; ++slot) words_[slot].store(found[slot], std::memory_order_relaxed);
        dirty_ = std::vector<std::atomic<bool>>((slots + kPiece - 1) / kPiece);
        UsesHeader header;
        if (os::read_at(file, &header, sizeof header, 0) && header.is_valid()) tuner_ = header.tuner;
    }
    const std::optional<TunerState>& tuner() const noexcept { return tuner_; }

    // The caller's side: one thread at a time.

    SlotUse of(std::uint64_t slot, std::uint32_t stored) const noexcept {
        return SlotUse::of(words_[slot].load(std::memory_order_relaxed), stored);
    }
    // Each after those before it, whatever the clock says.
    void used(std::uint64_t slot, std::uint64_t now) noexcept {
        const std::uint64_t hits = words_[slot].load(std::memory_order_relaxed) & SlotUse::kMostHits;
        set(slot, now, std::min(hits + 1, SlotUse::kMostHits));
    }
    void stored(std::uint64_t slot, std::uint64_t now) noexcept { set(slot, now, 0); }
    bool is_changed() const noexcept { return is_changed_.load(std::memory_order_relaxed); }

    // Any thread, one at a time: 0 or an errno. What it could not write is written the next time.
    int write(const os::FileDescriptor& file, const TunerState& tuner) noexcept {
        is_changed_ = false;
        UsesHeader header;
        header.tuner = tuner;
        header.crc = header.own_crc();
        int error = os::write_at(file, &header, sizeof header, 0);
        std::array<std::uint64_t, kPiece> piece;
        for (std::size_t number = 0; number < dirty_.size(); ++number) {
            if (!dirty_[number].exchange(false)) continue;
            const std::uint64_t first = number * kPiece, count = std::min<std::uint64_t>(kPiece, words_.size() - first);
            for (std::uint64_t i = 0; i < count; ++i) piece[i] = words_[first + i].load(std::memory_order_relaxed);
            const int failed = os::write_at(file, piece.data(), count * sizeof(std::uint64_t), at(first));
            if (failed == 0) continue;
            dirty_[number] = true;
            error = failed;
        }
        return error;
    }

private:
    static constexpr std::uint64_t kPiece = 512;  // words that are written together: a page

    void set(std::uint64_t slot, std::uint64_t now, std::uint64_t hits) noexcept {
        last_ = std::max(now, last_ + 1);
        words_[slot].store(last_ << SlotUse::kHitBits | hits, std::memory_order_relaxed);
        dirty_[slot / kPiece].store(true, std::memory_order_release);
        is_changed_.store(true, std::memory_order_relaxed);
    }

    std::vector<std::atomic<std::uint64_t>> words_;
    std::vector<std::atomic<bool>> dirty_;  // of each piece
    std::atomic<bool> is_changed_ = false;
    std::optional<TunerState> tuner_;
    std::uint64_t last_ = 0;
};

}  // namespace memlane::tiers
