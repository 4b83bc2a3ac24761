// Parses frame tables from bytes that a peer rewrites at the same time: either there is no table, or all its parts lie
// in the message, and reading them takes no more memory than the message itself.
//
// Record 0 has the length of the message; the others are scribbles on it.
#include <cstring>
#include <vector>

#include "broadcast/frames.hpp"
#include "fuzz/scribbler.hpp"

namespace memlane::fuzz {

void try_input(Input input) {
    using broadcast::FrameTable;
    if (input.size() < sizeof(Scribble)) return;
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, input.data(), sizeof bytes);
    bytes %= 100'000;
    std::vector<std::byte> message(std::max<std::uint64_t>(bytes, 8));
    // As a writer would send it.
    const FrameTable genuine(bytes > 8300 ? bytes - 8300 : 0, {4096, 4104});
    const auto header = genuine.header();
    if (bytes >= 32) {
        std::memcpy(message.data(), &header, sizeof header);
        std::memcpy(message.data() + sizeof header, genuine.sizes().data(), genuine.sizes().size_bytes());
    }
    Scribbler peer(input.subspan(sizeof(Scribble)));
    peer.add_region(message.data(), std::min<std::size_t>(message.size(), 64));
    peer.add_region(message.data(), message.size());
    peer.begin();
    const auto table = FrameTable::parse(bytes, [&](std::uint64_t offset, std::uint64_t length, void* to) {
        if (offset > bytes || length > bytes - offset) return false;
        std::memcpy(to, message.data() + offset, length);
        return true;
    });
    if (!table) return;
    FUZZ_CHECK(table->total() == bytes);
    std::uint64_t at = sizeof header + table->sizes().size_bytes();
    FUZZ_CHECK(at <= bytes);
    FUZZ_CHECK(table->stream().offset >= at);
    at = table->stream().offset + table->stream().bytes;
    for (const broadcast::Frame& frame : table->buffers()) {
        FUZZ_CHECK(frame.offset >= at && frame.offset % broadcast::kFrameAlignment == 0);
        FUZZ_CHECK(frame.bytes <= bytes && frame.offset <= bytes - frame.bytes);
        at = frame.offset + frame.bytes;
    }
    FUZZ_CHECK(at == bytes);
}

}  // namespace memlane::fuzz
