// One writer and several readers as threads on one mapping, as fast as they can. Every reader checks every byte of
// every message. Also built with ThreadSanitizer, which sees races through one mapping only. All counters start a few
// steps below their limits, so that they wrap under load.
//
//   ring_threads [messages [readers [chunks]]]
#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <vector>

#include "rings.hpp"

using namespace memlane;
using namespace memlane::testing;

namespace {

constexpr std::size_t kWords = 25;
constexpr std::size_t kMostBytes = kWords * sizeof(std::uint64_t);

// Every length from 1 to kMostBytes, in an order that does not repeat from lap to lap.
std::size_t length_of(std::uint64_t message) { return 1 + message * 37 % kMostBytes; }

// The mixer of SplitMix64: no two words of any messages are equal, so a word of another message, position or lap is
// never taken for the right one.
std::uint64_t word_of(std::uint64_t message, std::uint64_t number) {
    std::uint64_t x = (message * kWords + number + 1) * 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

void fill(std::byte* chunk, std::uint64_t message) {
    const std::size_t length = length_of(message);
    for (std::size_t at = 0; at < length; at += sizeof(std::uint64_t)) {
        const std::uint64_t word = word_of(message, at / sizeof(std::uint64_t));
        std::memcpy(chunk + at, &word, std::min(sizeof word, length - at));
    }
}

bool is_right(const std::byte* chunk, std::uint64_t message) {
    const std::size_t length = length_of(message);
    std::uint64_t wrong = 0;
    for (std::size_t at = 0; at < length; at += sizeof(std::uint64_t)) {
        std::uint64_t seen = 0;
        std::uint64_t word = word_of(message, at / sizeof(std::uint64_t));
        const std::size_t bytes = std::min(sizeof word, length - at);
        std::memcpy(&seen, chunk + at, bytes);
        if (bytes < sizeof word) word &= (std::uint64_t{1} << (8 * bytes)) - 1;
        wrong |= seen ^ word;
    }
    return wrong == 0;
}

void run(std::uint64_t messages, std::uint64_t readers, std::uint64_t chunks) {
    const RingGeometry g{readers, kMostBytes, chunks};
    const auto segment = new_segment(g);
    start_counters_near_their_ends(*segment);
    const std::uint64_t first = 0 - messages / 2;
    RingWriter writer(segment, g, kMostBytes, 0, first);
    std::vector<std::unique_ptr<RingReader>> ends;
    for (std::uint64_t r = 0; r < readers; ++r) ends.push_back(new_reader(*segment, g, r, first));
    std::vector<std::thread> threads;
    for (auto& end : ends) {
        threads.emplace_back([&reader = *end, messages] {
            for (std::uint64_t i = 0; i < messages; ++i) {
                auto sample = must(reader.begin(os::Deadline::never(), keep_waiting));
                const auto descriptor = sample.descriptor();
                CHECK(descriptor.has_value() && descriptor->length == length_of(i));
                CHECK(is_right(sample.chunk(), i));
                sample.finish(descriptor->length);
            }
        });
    }
    for (std::uint64_t i = 0; i < messages; ++i) {
        auto claim = must(writer.begin(length_of(i), os::Deadline::never(), keep_waiting));
        fill(claim.chunk(), i);
        claim.publish(ChunkKind::object, length_of(i));
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(writer.position() == messages - messages / 2);
    for (const auto& end : ends) CHECK(end->position() == writer.position());
}

std::uint64_t argument(int count, char** values, int at, std::uint64_t otherwise) {
    if (at >= count) return otherwise;
    char* end = nullptr;
    const std::uint64_t value = std::strtoull(values[at], &end, 10);
    CHECK(*end == '\0' && value > 0);
    return value;
}

}  // namespace

int main(int count, char** values) {
    const std::uint64_t messages = argument(count, values, 1, 100'000);
    const std::uint64_t readers = argument(count, values, 2, 3);
    const std::uint64_t chunks = argument(count, values, 3, 4);
    const auto begin = std::chrono::steady_clock::now();
    run(messages, readers, chunks);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::printf("ring_threads: %llu messages x %llu readers through %llu chunks, every byte as sent, %.1f s\n",
                static_cast<unsigned long long>(messages), static_cast<unsigned long long>(readers),
                static_cast<unsigned long long>(chunks), took.count());
}
