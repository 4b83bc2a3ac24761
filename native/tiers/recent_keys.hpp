// The last `most` keys that were evicted or declined: a ring, and a table of where each stands in it.
//
// 10 bytes a key, allocated at the start. Keys are the low halves of hashes: two with the same half are one key here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "tiers/block_map.hpp"

namespace memlane::tiers {

class RecentKeys {
public:
    explicit RecentKeys(std::uint32_t most) : ring_(most), table_(most + most / 2 + std::size_t{1}) {}

    void prefetch(Key key) const noexcept { __builtin_prefetch(&table_[home(half(key))]); }

    // Newest; what was pushed `most` pushes before goes.
    void push(Key key) noexcept {
        if (ring_.empty()) return;
        take(key);
        if (ring_[next_] != kNothing) erase(place(ring_[next_]));
        ring_[next_] = half(key);
        table_[place(half(key))] = next_ + 1;
        next_ = after(next_, ring_.size());
    }

    // It leaves. Returns how many keys have been pushed since; kAbsent if it was not there.
    static constexpr std::uint32_t kAbsent = 0xFFFF'FFFF;
    std::uint32_t take(Key key) noexcept {
        const std::size_t at = place(half(key));
        if (table_[at] == 0) return kAbsent;
        const std::uint32_t stood = table_[at] - 1;
        ring_[stood] = kNothing;
        erase(at);
        return static_cast<std::uint32_t>(distance(after(stood, ring_.size()), next_, ring_.size()));
    }

    void clear() noexcept {
        ring_.assign(ring_.size(), kNothing);
        table_.assign(table_.size(), 0);
    }

private:
    static constexpr std::uint32_t kNothing = 0;

    static std::uint32_t half(Key key) noexcept {
        const auto low = static_cast<std::uint32_t>(key);
        return low == kNothing ? 1 : low;
    }
    static std::uint32_t after(std::size_t at, std::size_t size) noexcept {
        return static_cast<std::uint32_t>(at + 1 == size ? 0 : at + 1);
    }
    // From one place forward to another.
    static std::size_t distance(std::size_t from, std::size_t to, std::size_t size) noexcept {
        return to >= from ? to - from : to + size - from;
    }

    std::size_t home(std::uint32_t half) const noexcept { return (std::uint64_t{half} * table_.size()) >> 32; }

    // Where the key's number stands, or would stand.
    std::size_t place(std::uint32_t half) const noexcept {
        std::size_t at = home(half);
        while (table_[at] != 0 && ring_[table_[at] - 1] != half) at = after(at, table_.size());
        return at;
    }

    // What could not stand nearer to its home because of this one moves up.
    void erase(std::size_t hole) noexcept {
        const std::size_t size = table_.size();
        for (std::size_t at = after(hole, size); table_[at] != 0; at = after(at, size)) {
            if (distance(home(ring_[table_[at] - 1]), at, size) < distance(hole, at, size)) continue;
            table_[hole] = table_[at];
            hole = at;
        }
        table_[hole] = 0;
    }

    std::vector<std::uint32_t> ring_;   // of each push its key, or kNothing if that has left
    std::vector<std::uint32_t> table_;  // of each key its place in the ring, from 1; 0: no key
    std::uint32_t next_ = 0;            // place of the next push
};

}  // namespace memlane::tiers
