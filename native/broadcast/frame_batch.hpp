// Small messages that wait for each other, to share a frame to readers on other hosts.
//
// A frame costs more than a small message: two calls of libzmq, an encryption, often a system call. So once kStream
// messages have followed each other closely, the next ones wait for company, until the frame is full or the next one would
// come too late for the first. A message that comes alone, or in a burst, does not wait.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "os/clock.hpp"

namespace memlane::broadcast {

// The frame of one message begins with this: `src/memlane/broadcast/protocol/frames.py` has the whole layout.
struct MessageFrame {
    static constexpr std::size_t kHeaderBytes = 48;
    static constexpr std::size_t kKindAt = 5;
    static constexpr std::size_t kSequenceAt = 16;
    static constexpr std::size_t kBytesAt = 40;
};

class FrameBatch {
public:
    static constexpr std::size_t kFrameBytes = 512 * 1024;  // at most PIECE in frames.py
    static constexpr os::Nanoseconds kClose = 50'000;      // between two messages of a stream
    static constexpr os::Nanoseconds kLongest = 100'000;   // that a message waits
    static constexpr int kStream = 64;

    // `header`: of a message, whose kind, sequence and bytes are still to be written.
    explicit FrameBatch(std::string header) : header_(std::move(header)) { frame_.reserve(kFrameBytes); }

    // From now on so many messages, of so many bytes together, may wait here; the first is `sequence`. A call that sent ends:
    // how long it took says nothing about when the next one comes.
    void open(std::uint64_t sequence, std::int64_t messages, std::int64_t bytes, os::Nanoseconds now) noexcept {
        last_ = now;
        if (count_ == 0) first_ = sequence;
        messages_ = messages;
        bytes_ = bytes;
    }
    // None may, until open().
    void shut() noexcept { messages_ = 0; }

    // Somebody sends a message: is another one likely to follow closely?
    bool is_stream(os::Nanoseconds now) noexcept {
        gap_ = now - std::exchange(last_, now);
        streak_ = gap_ > kClose ? streak_ / 4 : std::min(streak_ + 1, kLongestMemory);
        return streak_ >= kStream;
    }
    // What is sent is too large to wait.
    void end_stream() noexcept { streak_ = 0; }

    bool fits(std::size_t size) const noexcept {
        return messages_ > 0 && static_cast<std::int64_t>(size) <= bytes_ && has_space(size);
    }

    // A message that fits, just asked about by is_stream(). Returns whether everything is to be sent now.
    bool add(std::uint8_t kind, std::string_view message) {
        char header[MessageFrame::kHeaderBytes];
        const std::uint64_t sequence = first_ + count_, size = message.size();
        std::memcpy(header, header_.data(), sizeof header);
        std::memcpy(header + MessageFrame::kKindAt, &kind, sizeof kind);
        std::memcpy(header + MessageFrame::kSequenceAt, &sequence, sizeof sequence);
        std::memcpy(header + MessageFrame::kBytesAt, &size, sizeof size);
        if (count_ == 0) until_ = last_ + kLongest;
        frame_.append(header, sizeof header);
        frame_.append(message);
        ++count_;
        size_ += size;
        --messages_;
        bytes_ -= static_cast<std::int64_t>(size);
        return !fits(size) || last_ + gap_ > until_ - kEarly;
    }

    os::Nanoseconds until() const noexcept { return until_; }  // of the first one
    std::uint64_t first() const noexcept { return first_; }
    std::uint64_t count() const noexcept { return count_; }
    std::uint64_t size() const noexcept { return size_; }  // without headers
    std::string_view frame() const noexcept { return frame_; }

    // They are elsewhere.
    void clear() noexcept {
        first_ += count_;
        count_ = size_ = 0;
        frame_.clear();
    }

private:
    static constexpr os::Nanoseconds kEarly = 20'000;  // so that nobody is woken to send it
    static constexpr int kLongestMemory = 1024;        // a stream goes on after a pause or two

    bool has_space(std::size_t size) const noexcept {
        return frame_.size() + MessageFrame::kHeaderBytes + size <= kFrameBytes;
    }

    const std::string header_;
    std::string frame_;
    std::uint64_t first_ = 0;
    std::uint64_t count_ = 0;
    std::uint64_t size_ = 0;
    std::int64_t messages_ = 0;
    std::int64_t bytes_ = 0;
    os::Nanoseconds last_ = 0;
    os::Nanoseconds gap_ = std::numeric_limits<os::Nanoseconds>::max();
    os::Nanoseconds until_ = 0;
    int streak_ = 0;
};

}  // namespace memlane::broadcast
