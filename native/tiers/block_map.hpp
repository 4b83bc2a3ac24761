// Blocks by the 64-bit hash of their key: open addressing, linear probing, no tombstones.
//
// The table holds block numbers and the low half of each key; the keys stand in an array by block. At most three
// quarters of the table are used, so a look-up touches one or two cache lines of it.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace memlane::tiers {

using Key = std::uint64_t;    // a hash: its low half chooses the place
using Block = std::uint32_t;  // a number below the capacity
inline constexpr Block kNoBlock = 0xFFFF'FFFF;

// Spreads the bits of a number, so that it can be a Key.
constexpr Key mixed(std::uint64_t number) noexcept {  // splitmix64's
    number += 0x9E37'79B9'7F4A'7C15;
    number = (number ^ (number >> 30)) * 0xBF58'476D'1CE4'E5B9;
    number = (number ^ (number >> 27)) * 0x94D0'49BB'1331'11EB;
    return number ^ (number >> 31);
}

class BlockMap {
public:
    // `blocks`: how many there will be at most, if that is known: then no memory is left over when it grows.
    explicit BlockMap(std::uint32_t blocks = 0) : table_(16) { keys_.reserve(blocks); }

    Block find(Key key) const noexcept { return table_[place(key)].block; }
    Key key_of(Block block) const noexcept { return keys_[block]; }

    // Neither the key nor the block is there yet.
    void insert(Key key, Block block) {
        if (block >= keys_.size()) keys_.resize(block + 1);
        if (4 * (size_ + 1) > 3 * table_.size()) grow();
        keys_[block] = key;
        table_[place(key)] = {block, low(key)};
        ++size_;
    }

    // Returns its block; kNoBlock if the key was not there.
    Block remove(Key key) noexcept {
        std::size_t hole = place(key);
        const Block removed = table_[hole].block;
        if (removed == kNoBlock) return removed;
        // What could not stand nearer to its home because of this one moves up.
        for (std::size_t at = after(hole); table_[at].block != kNoBlock; at = after(at)) {
            const std::size_t wanted = table_[at].low & mask();
            if (((at - wanted) & mask()) >= ((at - hole) & mask())) table_[std::exchange(hole, at)] = table_[at];
        }
        table_[hole] = Entry{};
        --size_;
        return removed;
    }

    void prefetch(Key key) const noexcept { __builtin_prefetch(&table_[low(key) & mask()]); }
    void prefetch_key(Block block) const noexcept { __builtin_prefetch(&keys_[block]); }
    // The block of the key, if no other key is in its place.
    Block likely(Key key) const noexcept { return table_[low(key) & mask()].block; }

    void clear() {
        table_.assign(table_.size(), Entry{});
        size_ = 0;
    }

private:
    struct Entry {
        Block block = kNoBlock;
        std::uint32_t low = 0;  // of the key
    };

    static std::uint32_t low(Key key) noexcept { return static_cast<std::uint32_t>(key); }
    std::size_t mask() const noexcept { return table_.size() - 1; }
    std::size_t after(std::size_t at) const noexcept { return (at + 1) & mask(); }

    // Where the key is, or would be.
    std::size_t place(Key key) const noexcept {
        std::size_t at = low(key) & mask();
        for (; table_[at].block != kNoBlock; at = after(at))
            if (table_[at].low == low(key) && keys_[table_[at].block] == key) break;
        return at;
    }

    void grow() {
        const std::vector<Entry> old = std::exchange(table_, std::vector<Entry>(2 * table_.size()));
        for (const Entry& entry : old)
            if (entry.block != kNoBlock) table_[place(keys_[entry.block])] = entry;
    }

    std::vector<Entry> table_;
    std::vector<Key> keys_;  // by block
    std::size_t size_ = 0;
};

}  // namespace memlane::tiers
