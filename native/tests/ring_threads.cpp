// One writer and several readers as threads on one mapping, as fast as they can: every byte of every message is
// checked by every reader. Built a second time with ThreadSanitizer, which sees races through one mapping only.
#include <cstring>
#include <thread>
#include <vector>

#include "rings.hpp"

#ifndef MEMLANE_MESSAGES
#define MEMLANE_MESSAGES 100000
#endif

using namespace memlane;
using namespace memlane::testing;

namespace {

constexpr std::size_t kBytes = 200;

void fill(std::byte* chunk, std::uint64_t i) {
    std::memset(chunk, static_cast<int>(i % 251), kBytes);
    std::memcpy(chunk, &i, sizeof i);
}

void run(std::uint64_t readers, std::uint64_t chunks) {
    const RingGeometry g{readers, kBytes, chunks};
    const auto segment = new_segment(g);
    RingWriter writer(segment, g, kBytes);
    std::vector<std::unique_ptr<RingReader>> ends;
    for (std::uint64_t r = 0; r < readers; ++r) ends.push_back(new_reader(*segment, g, r));
    std::vector<std::thread> threads;
    for (auto& end : ends) {
        threads.emplace_back([&reader = *end] {
            std::byte expected[kBytes];
            for (std::uint64_t i = 0; i < MEMLANE_MESSAGES; ++i) {
                CHECK(reader.begin(os::Deadline::never(), keep_waiting).status == core::Status::ok);
                fill(expected, i);
                CHECK(reader.descriptor()->length == kBytes);
                CHECK(std::memcmp(reader.chunk(), expected, kBytes) == 0);
                reader.finish(kBytes);
            }
        });
    }
    for (std::uint64_t i = 0; i < MEMLANE_MESSAGES; ++i) {
        CHECK(writer.begin(kBytes, os::Deadline::never(), keep_waiting).status == core::Status::ok);
        fill(writer.chunk(), i);
        writer.publish(ChunkKind::object, kBytes);
    }
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

int main() {
    run(1, 1);
    run(3, 4);
    std::printf("ring_threads: 2 x %d messages, every byte as sent\n", MEMLANE_MESSAGES);
}
