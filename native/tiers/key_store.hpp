// The bytes of each block's key, side by side: blocks that are stored together are compared together.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "tiers/block_map.hpp"

namespace memlane::tiers {

inline constexpr std::size_t kLongestKey = 255;

class KeyStore {
public:
    using Bytes = std::span<const std::byte>;

    explicit KeyStore(std::uint32_t blocks) : sizes_(blocks) {}

    Bytes of(Block block) const noexcept { return {&bytes_[block * stride_], sizes_[block]}; }

    bool is(Block block, Bytes key) const noexcept {
        return sizes_[block] == key.size() && std::memcmp(&bytes_[block * stride_], key.data(), key.size()) == 0;
    }

    void set(Block block, Bytes key) {
        if (key.size() > stride_) widen(key.size());
        sizes_[block] = static_cast<std::uint8_t>(key.size());
        std::memcpy(&bytes_[block * stride_], key.data(), key.size());
    }

    void prefetch(Block block) const noexcept { __builtin_prefetch(bytes_.data() + block * stride_); }

private:
    void widen(std::size_t stride) {
        std::vector<std::byte> wider(stride * sizes_.size());
        for (std::size_t block = 0; block < sizes_.size(); ++block) {
            if (sizes_[block] > 0) std::memcpy(&wider[block * stride], &bytes_[block * stride_], sizes_[block]);
        }
        bytes_ = std::move(wider);
        stride_ = stride;
    }

    std::size_t stride_ = 0;  // the longest key so far
    std::vector<std::byte> bytes_;
    std::vector<std::uint8_t> sizes_;
};

}  // namespace memlane::tiers
