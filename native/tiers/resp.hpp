// Replies of a Redis server (RESP2) to commands about blocks: bulk strings, which are read into the memory that the caller has for
// them, integers and OK. Whatever else is asked of a server is redis-py's to read.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "os/clock.hpp"
#include "os/stream.hpp"

namespace memlane::tiers {

struct Reply {
    // A bulk string's size, or -1: there is no value. One of another size than its memory is not in the memory. An integer. 0: OK.
    std::int64_t number = -1;
    std::optional<std::string> refusal;  // the server's
};

class RespReader {
public:
    // The connection's fault, after which it is of no use.
    enum class Fault : std::uint8_t { kNone, kLate, kClosed, kSystem, kNonsense };

    RespReader(int socket, os::Deadline deadline) : socket_(socket), deadline_(deadline) {}

    // A reply that begins with one of these characters: '$', ':' or '+'. False: there is a fault, and `reply` has nothing.
    bool read(std::string_view kinds, std::span<std::byte> into, Reply& reply) {
        std::string line;
        if (!read_line(line)) return false;
        if (line.starts_with('-')) {
            reply.refusal = line.substr(1);
            return true;
        }
        const char kind = line.empty() ? '\0' : line.front();
        if (kinds.find(kind) == std::string_view::npos) return refuse(line);
        if (kind == '+') {
            reply.number = 0;
            return line == "+OK" || refuse(line);
        }
        const char* const end = line.data() + line.size();
        if (std::from_chars(line.data() + 1, end, reply.number) != std::from_chars_result{end, {}}) return refuse(line);
        if (kind == ':' || reply.number == -1) return true;
        if (reply.number < -1) return refuse(line);
        const auto size = static_cast<std::uint64_t>(reply.number);
        return (size == into.size() ? read_into(into) : skip(size)) && skip(2);
    }

    // After the last reply: nothing may come behind it that nobody has asked for.
    bool end() {
        if (at_ == held_) return true;
        return refuse({scratch_.data() + at_, held_ - at_});
    }

    Fault fault() const noexcept { return fault_; }
    int error() const noexcept { return error_; }
    const std::string& nonsense() const noexcept { return nonsense_; }

private:
    static constexpr std::size_t kLongestLine = 1 << 16;

    bool fail(Fault fault) noexcept {
        fault_ = fault;
        return false;
    }

    bool refuse(std::string_view line) {
        nonsense_ = line.substr(0, 40);
        return fail(Fault::kNonsense);
    }

    // At least one byte; what does not fit `into` is held. Nothing is held before.
    bool receive(std::span<std::byte> into, std::size_t& got) noexcept {
        std::array<iovec, 2> pieces{iovec{into.data(), into.size()}, iovec{scratch_.data(), scratch_.size()}};
        const std::ptrdiff_t bytes =
            os::receive(socket_, into.empty() ? std::span(pieces).subspan(1) : std::span(pieces), deadline_);
        if (bytes < 0) {
            error_ = errno;
            return fail(error_ == ETIMEDOUT ? Fault::kLate : Fault::kSystem);
        }
        if (bytes == 0) return fail(Fault::kClosed);
        got = std::min(static_cast<std::size_t>(bytes), into.size());
        at_ = 0;
        held_ = static_cast<std::size_t>(bytes) - got;
        return true;
    }

    bool read_line(std::string& line) {
        for (;;) {
            const std::string_view held(scratch_.data() + at_, held_ - at_);
            const std::size_t end = held.find('\n');
            line += held.substr(0, end);
            if (line.size() > kLongestLine) return refuse(line);
            if (end != std::string_view::npos) {
                at_ += end + 1;
                if (line.ends_with('\r')) line.pop_back();
                return true;
            }
            std::size_t none = 0;
            at_ = held_;
            if (!receive({}, none)) return false;
        }
    }

    bool read_into(std::span<std::byte> memory) noexcept {
        std::size_t done = std::min(held_ - at_, memory.size());
        std::memcpy(memory.data(), scratch_.data() + at_, done);
        at_ += done;
        while (done < memory.size()) {
            std::size_t got = 0;
            if (!receive(memory.subspan(done), got)) return false;
            done += got;
        }
        return true;
    }

    bool skip(std::uint64_t count) noexcept {
        while (count > 0) {
            std::size_t none = 0;
            if (at_ == held_ && !receive({}, none)) return false;
            const std::uint64_t some = std::min<std::uint64_t>(count, held_ - at_);
            at_ += some;
            count -= some;
        }
        return true;
    }

    int socket_;
    os::Deadline deadline_;
    std::array<char, 4096> scratch_;  // what came behind that for which there is memory
    std::size_t at_ = 0, held_ = 0;
    Fault fault_ = Fault::kNone;
    int error_ = 0;
    std::string nonsense_;
};

}  // namespace memlane::tiers
