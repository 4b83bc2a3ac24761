// Measures the native part of enqueue: a 225-byte message, one reader polling on another core. Prints nanoseconds,
// which `make bench` reads.
#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "rings.hpp"

using namespace memlane;
using namespace memlane::testing;

int main() {
    constexpr std::uint64_t kMessages = 100'000;
    constexpr std::size_t kBytes = 225;
    const RingGeometry g{1, 4096, 10};
    const auto segment = new_segment(g);
    RingWriter writer(segment, g, 4096);
    const auto reader_end = new_reader(*segment, g, 0);
    RingReader& reader = *reader_end;
    std::thread poller([&] {
        std::byte copy[kBytes];
        for (std::uint64_t i = 0; i < kMessages;) {
            auto sample = reader.begin_nowait();
            if (sample.status == core::Status::would_block) continue;
            CHECK(sample.status == core::Status::ok);
            std::memcpy(copy, sample.loan->chunk(), kBytes);
            sample.loan->finish(kBytes);
            ++i;
        }
    });
    std::byte message[kBytes]{};
    std::vector<os::Nanoseconds> samples(kMessages);
    for (std::uint64_t i = 0; i < kMessages; ++i) {
        // Paced so that the ring is never full: a full ring would measure the reader.
        const os::Nanoseconds until = os::monotonic_now() + 2000;
        while (os::monotonic_now() < until) core::pause();
        const os::Nanoseconds before = os::monotonic_now();
        auto claim = writer.begin_nowait(kBytes);
        for (; claim.status == core::Status::would_block; claim = writer.begin_nowait(kBytes)) core::pause();
        CHECK(claim.status == core::Status::ok);
        std::memcpy(claim.loan->chunk(), message, kBytes);
        claim.loan->publish(ChunkKind::object, kBytes);
        samples[i] = os::monotonic_now() - before;
    }
    poller.join();
    std::sort(samples.begin(), samples.end());
    std::printf("{\"p50_ns\": %lld, \"p99_ns\": %lld, \"messages\": %llu}\n",
                static_cast<long long>(samples[kMessages / 2]), static_cast<long long>(samples[kMessages * 99 / 100]),
                static_cast<unsigned long long>(kMessages));
}
