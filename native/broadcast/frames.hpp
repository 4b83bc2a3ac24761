// A message of several parts: the serializer's stream, and the out-of-band buffers of arrays.
//
//   offset 0          MessageHeader: number of buffers, bytes of the stream
//   16                bytes of each buffer, 8 bytes a number
//   aligned to 64     the stream
//   aligned to 64     buffer 0, and so on
//
// A message without buffers is the stream alone, with no header (ChunkKind::object).
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/layout.hpp"

namespace memlane::broadcast {

struct MessageHeader {
    std::uint64_t buffers;
    std::uint64_t stream_bytes;
};
static_assert(sizeof(MessageHeader) == 16);

inline constexpr std::uint64_t kFrameAlignment = 64;
// Smaller arrays are cheaper inside the stream; no writer sends a smaller buffer.
inline constexpr std::uint64_t kLeastOutOfBand = 4096;

// Arrays of this size and more are lent to readers instead of copied out, if their message is in an extent.
inline constexpr std::uint64_t kLeastLent = 1u << 20;

struct Frame {
    std::uint64_t offset;
    std::uint64_t bytes;
};

// The offsets of the parts. The writer builds it from sizes, a reader from untrusted bytes.
class FrameTable {
public:
    FrameTable(std::uint64_t stream_bytes, std::vector<std::uint64_t> sizes)
        : stream_bytes_(stream_bytes), sizes_(std::move(sizes)) {
        std::uint64_t at = core::align_up(header_bytes(sizes_.size()), kFrameAlignment);
        stream_ = {at, stream_bytes};
        at += stream_bytes;
        for (const std::uint64_t size : sizes_) {
            at = core::align_up(at, kFrameAlignment);
            buffers_.push_back({at, size});
            at += size;
        }
        total_ = at;
    }

    // The table of a message of `bytes` bytes, read through `read(offset, bytes, to)`; nullopt unless every part lies
    // inside the message. So a reader never allocates more for buffers than the size of the message.
    template <class Read>
    static std::optional<FrameTable> parse(std::uint64_t bytes, Read&& read) {
        MessageHeader header;
        if (bytes < sizeof header || !read(0, sizeof header, &header)) return std::nullopt;
        if (header.stream_bytes > bytes || header.buffers == 0 ||
            header.buffers > (bytes - sizeof header) / sizeof(std::uint64_t))
            return std::nullopt;
        std::vector<std::uint64_t> sizes(header.buffers);
        if (!read(sizeof header, sizes.size() * sizeof(std::uint64_t), sizes.data())) return std::nullopt;
        for (const std::uint64_t size : sizes)
            if (size < kLeastOutOfBand || size > bytes) return std::nullopt;  // so the sums below cannot overflow
        std::uint64_t at = core::align_up(header_bytes(sizes.size()), kFrameAlignment) + header.stream_bytes;
        for (const std::uint64_t size : sizes) {
            at = core::align_up(at, kFrameAlignment) + size;
            if (at > bytes) return std::nullopt;
        }
        if (at != bytes) return std::nullopt;
        return FrameTable(header.stream_bytes, std::move(sizes));
    }

    MessageHeader header() const noexcept { return {sizes_.size(), stream_bytes_}; }
    std::span<const std::uint64_t> sizes() const noexcept { return sizes_; }
    Frame stream() const noexcept { return stream_; }
    const std::vector<Frame>& buffers() const noexcept { return buffers_; }
    std::uint64_t total() const noexcept { return total_; }
    bool has_lent() const noexcept {
        return std::any_of(sizes_.begin(), sizes_.end(), [](std::uint64_t size) { return size >= kLeastLent; });
    }

private:
    static std::uint64_t header_bytes(std::size_t buffers) noexcept {
        return sizeof(MessageHeader) + buffers * sizeof(std::uint64_t);
    }

    std::uint64_t stream_bytes_;
    std::vector<std::uint64_t> sizes_;
    Frame stream_{};
    std::vector<Frame> buffers_;
    std::uint64_t total_ = 0;
};

}  // namespace memlane::broadcast
