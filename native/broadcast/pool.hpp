// The writer's memory of the pool (extents.hpp), and how a message is written into an extent.
//
// A copy into warm pages that are mapped takes a third of a pwrite's time, and half with stores that go past the caches;
// measured with 64 MiB: 4.3 ms, memcpy 6.3, pwrite 15, into new pages 35. A second thread takes a third more off
// (copy_together.hpp).
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <system_error>

#include "broadcast/extents.hpp"
#include "core/copy_streaming.hpp"
#include "core/copy_together.hpp"
#include "core/segment.hpp"

namespace memlane::broadcast {

// Puts the parts of one message.
class ExtentWriter {
public:
    // `memory`: of a warm extent; none of one that has no space yet.
    ExtentWriter(const os::FileDescriptor& file, std::uint64_t offset, std::byte* memory, bool streams)
        : file_(file), offset_(offset), memory_(memory) {
        if (streams) streaming_.emplace();
    }

    // 0 or an errno. A large part must stay until finish().
    int put(std::uint64_t at, std::uint64_t bytes, const void* from) noexcept {
        if (memory_ == nullptr) return os::write_at(file_, from, bytes, offset_ + at);
        if (streaming_ && bytes >= core::kStreamingBytes)
            core::CopyTogether::copy(memory_ + at, static_cast<const std::byte*>(from), bytes);
        else if (streaming_ && bytes >= kLarge)
            streaming_->add(memory_ + at, static_cast<const std::byte*>(from), bytes);
        else
            std::memcpy(memory_ + at, from, bytes);
        return 0;
    }

    void finish() noexcept {
        if (streaming_) streaming_->finish();
    }

private:
    static constexpr std::uint64_t kLarge = 1u << 16;

    const os::FileDescriptor& file_;
    std::uint64_t offset_;
    std::byte* memory_;
    std::optional<core::StreamingCopy> streaming_;
};

class Pool {
public:
    // Half of a small file system is for others, and for what finds no place here.
    Pool(std::shared_ptr<core::Segment> segment, std::uint64_t bytes)
        : segment_(std::move(segment)), bytes_(std::min(bytes, os::total_bytes(segment_->file()) / 2) / core::kPage * core::kPage) {}

    std::uint64_t begin() const noexcept { return segment_->bytes(); }
    std::uint64_t bytes() const noexcept { return bytes_; }

    ExtentWriter writer(const Extent& extent, std::uint64_t bytes) noexcept {
        std::byte* const memory = extent.space == Space::warm && map() ? memory_->base() + (extent.offset - begin()) : nullptr;
        return {segment_->file(), extent.offset, memory, memory != nullptr && bytes >= core::kStreamingBytes};
    }

    // Before an extent is written. Every page of the pool that is used lies in the file as a whole, because a copy does not
    // make it longer. 0 or an errno.
    int lengthen_file(const Extent& extent) noexcept {
        const std::uint64_t end = extent.offset + extent.bytes;
        if (end <= file_end_) return 0;
        try {
            os::resize(segment_->file(), end);
        } catch (const std::system_error& error) {
            return error.code().value();
        }
        file_end_ = end;
        return 0;
    }

    // Maps what was written to new space, so that the next message there meets no fault.
    void keep(const Extent& extent) noexcept {
        if (extent.space == Space::warm || !map()) return;
        try {
            memory_->populate_again(extent.offset - begin(), extent.bytes);
        } catch (const std::system_error&) {  // then the faults come later
        }
    }

private:
    // Only addresses; without them every message is written by pwrite.
    bool map() noexcept {
        if (memory_) return true;
        try {
            memory_.emplace(segment_->file(), bytes_, begin());
        } catch (const std::system_error&) {
        }
        return memory_.has_value();
    }

    std::shared_ptr<core::Segment> segment_;
    std::uint64_t bytes_;
    std::uint64_t file_end_ = 0;  // as the writer has made it, which alone may
    std::optional<os::Mapping> memory_;
};

}  // namespace memlane::broadcast
