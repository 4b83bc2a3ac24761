// Moving blocks: every layout and size, compared with a plain loop, on one to four threads; invalid pairs, which must be
// refused; and copies to a GPU, with memcpy in place of CUDA's functions. Also built with ThreadSanitizer.
#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "offload/copy_device.hpp"
#include "offload/copy_move.hpp"

using namespace memlane;
using namespace memlane::offload;

namespace {

std::mt19937_64 random_numbers{7};

struct Array {
    std::vector<std::byte> memory;
    Blocks blocks;

    // `gap`: bytes between two blocks; `shift`: offset of the first block from the memory's alignment.
    Array(std::int64_t count, std::int64_t bytes, std::int64_t gap = 0, std::int64_t shift = 0)
        : memory(static_cast<std::size_t>(shift + count * (bytes + gap) + 64)) {
        for (std::size_t at = 0; at + 8 <= memory.size(); at += 8) {
            const std::uint64_t eight = random_numbers();
            std::memcpy(memory.data() + at, &eight, 8);
        }
        const std::int64_t shape[] = {count, bytes};
        const std::int64_t strides[] = {bytes + gap, 1};
        blocks = *blocks_of(memory.data() + shift, shape, strides, 1);
    }
    std::byte* block(std::uint32_t id) const { return blocks.base + std::int64_t{id} * blocks.stride; }
};

// Random pairs, in groups of `neighbours` adjacent blocks.
std::vector<std::int64_t> some_pairs(std::uint64_t sources, std::uint64_t targets, std::size_t count, std::size_t neighbours) {
    std::vector<std::int64_t> to(targets / neighbours);
    std::iota(to.begin(), to.end(), 0);
    std::shuffle(to.begin(), to.end(), random_numbers);
    std::vector<std::int64_t> pairs;
    for (const std::int64_t group : to) {
        const auto start = static_cast<std::int64_t>(random_numbers() % (sources / neighbours)) * neighbours;
        for (std::size_t i = 0; i < neighbours && pairs.size() < 2 * count; ++i) {
            pairs.push_back(start + static_cast<std::int64_t>(i));
            pairs.push_back(group * static_cast<std::int64_t>(neighbours) + static_cast<std::int64_t>(i));
        }
    }
    return pairs;
}

void move_and_compare(std::int64_t bytes, std::int64_t blocks, std::size_t count, std::int64_t gap, std::int64_t shift,
                      std::size_t neighbours, unsigned threads) {
    const Array from(blocks, bytes, gap, shift);
    Array to(blocks, bytes, gap / 2, shift / 2);
    const auto pairs = some_pairs(blocks, blocks, count, neighbours);
    std::vector<std::byte> expected = to.memory;
    for (std::size_t i = 0; i < pairs.size(); i += 2) {
        const std::byte* const source = from.block(static_cast<std::uint32_t>(pairs[i]));
        const std::byte* const target = to.block(static_cast<std::uint32_t>(pairs[i + 1]));
        std::memcpy(expected.data() + (target - to.memory.data()), source, static_cast<std::size_t>(bytes));
    }
    Reading reading = check_pairs(pairs.data(), pairs.size() / 2, from.blocks, to.blocks);
    CHECK(reading.finding.fault == Fault::none);
    Move move(from.blocks, to.blocks, std::move(reading));
    CHECK(move.bytes() == pairs.size() / 2 * static_cast<std::uint64_t>(bytes));
    CHECK(move.run(threads, [] {}) == 0);
    CHECK(to.memory == expected);
}

void test_moves(std::initializer_list<unsigned> numbers) {
    for (const unsigned threads : numbers) {
        for (const std::int64_t bytes : {1, 64, 100})
            for (const std::size_t neighbours : {1u, 5u})
                move_and_compare(bytes, 20'000, 17'000, neighbours == 1 ? 3 : 0, 16, neighbours, threads);
        move_and_compare(1024, 10'000, 9'000, 0, 0, 1, threads);    // streamed, in whole cache lines
        move_and_compare(4096, 3000, 2500, 0, 16, 3, threads);      // streamed, not in whole lines
        move_and_compare(5001, 2000, 1800, 77, 5, 1, threads);
        move_and_compare(65536, 160, 140, 65536, 0, 1, threads);    // rows of a region
        move_and_compare(3 << 20, 5, 4, 8, 3, 1, threads);          // several units each
        move_and_compare(64, 10, 0, 0, 0, 1, threads);              // no pairs
    }
}

// Copies blocks of two pieces, stored backwards, into contiguous blocks.
void test_pieces() {
    constexpr std::int64_t kBlocks = 50;
    std::vector<std::uint16_t> source(2 * kBlocks * 8);
    std::iota(source.begin(), source.end(), std::uint16_t{0});
    std::vector<std::uint16_t> target(kBlocks * 16, 0xffff);
    const std::int64_t shape[] = {kBlocks, 2, 8};
    const std::int64_t apart[] = {16, kBlocks * 16, -2};
    const std::int64_t whole[] = {32, 16, 2};
    const Blocks from = *blocks_of(source.data() + 7, shape, apart, 2);
    const Blocks to = *blocks_of(target.data(), shape, whole, 2);
    CHECK(from.extents.size() == 16 && to.is_contiguous() && from.apart && to.apart);
    CHECK(segments_of(from, to).size() == 16);
    std::vector<std::int32_t> pairs;
    for (int i = 0; i < kBlocks; ++i) pairs.insert(pairs.end(), {i, static_cast<std::int32_t>(kBlocks) - 1 - i});
    Move move(from, to, check_pairs(pairs.data(), kBlocks, from, to));
    move.run(2, [] {});
    for (int b = 0; b < kBlocks; ++b)
        for (int half = 0; half < 2; ++half)
            for (int i = 0; i < 8; ++i)
                CHECK(target[(kBlocks - 1 - b) * 16 + half * 8 + i] == half * kBlocks * 8 + b * 8 + 7 - i);
}

template <class Int>
Finding finding(std::vector<Int> pairs, const Blocks& from, const Blocks& to) {
    return check_pairs(pairs.data(), pairs.size() / 2, from, to).finding;
}

void test_refusals() {
    const Array a(10, 64);
    const Array b(1'000'000, 64);
    using Ids = std::vector<std::int64_t>;
    CHECK(finding(Ids{0, 0, 10, 1}, a.blocks, b.blocks).fault == Fault::no_such_source);
    CHECK(finding(Ids{0, 0, 9, 1'000'000}, a.blocks, b.blocks).pair == 1);
    CHECK(finding(Ids{-1, 0}, a.blocks, b.blocks).fault == Fault::no_such_source);
    CHECK(finding(std::vector<std::uint64_t>{0, ~0ull}, a.blocks, b.blocks).id == ~0ull);
    CHECK(finding(std::vector<std::int32_t>{0, -1}, a.blocks, b.blocks).fault == Fault::no_such_target);
    // Few ids that are far apart are sorted; dense ones use a bitmap.
    CHECK(finding(Ids{0, 999'999, 1, 5, 2, 999'999, 3, 5}, a.blocks, b.blocks).pair == 2);
    CHECK(finding(Ids{0, 7, 1, 5, 2, 5}, a.blocks, b.blocks).fault == Fault::target_twice);
    // Within one array: no block may be both read and written.
    CHECK(finding(Ids{1, 2, 2, 3}, b.blocks, b.blocks).fault == Fault::overlap);
    CHECK(finding(Ids{1, 1}, b.blocks, b.blocks).fault == Fault::overlap);
    CHECK(finding(Ids{1, 2, 1, 3}, b.blocks, b.blocks).fault == Fault::none);
    CHECK(finding(Ids{1, 999'999, 500'000, 3}, b.blocks, b.blocks).fault == Fault::none);
}

// Blocks of any two strides in one memory, compared with a check that marks every byte.
void test_overlaps() {
    std::vector<std::byte> memory(4096);
    std::size_t refused = 0;
    for (int round = 0; round < 5'000; ++round) {
        const auto pick = [](std::int64_t low, std::int64_t high) {
            return low + static_cast<std::int64_t>(random_numbers() % static_cast<std::uint64_t>(high - low + 1));
        };
        const std::int64_t bytes = pick(1, 40);
        const auto array = [&] {
            const std::int64_t stride = (bytes + pick(0, 40)) * (pick(0, 1) ? 1 : -1);
            const std::int64_t shape[] = {pick(1, 12), bytes};
            const std::int64_t strides[] = {stride, 1};
            return *blocks_of(memory.data() + 2048 + pick(-500, 500), shape, strides, 1);
        };
        const Blocks from = array();
        const Blocks to = array();
        std::vector<std::int64_t> pairs;
        for (std::int64_t id = 0; id < static_cast<std::int64_t>(to.count); ++id)
            if (pick(0, 3) == 0) pairs.insert(pairs.end(), {pick(0, static_cast<std::int64_t>(from.count) - 1), id});
        std::vector<bool> read(memory.size());
        const auto start = [&](const Blocks& blocks, std::int64_t id) { return blocks.base + id * blocks.stride - memory.data(); };
        for (std::size_t i = 0; i < pairs.size(); i += 2)
            for (std::int64_t at = 0; at < bytes; ++at) read[start(from, pairs[i]) + at] = true;
        bool overlaps = false;
        for (std::size_t i = 0; i < pairs.size(); i += 2)
            for (std::int64_t at = 0; at < bytes; ++at) overlaps |= read[start(to, pairs[i + 1]) + at];
        const Fault fault = finding(pairs, from, to).fault;
        CHECK(fault == (overlaps ? Fault::overlap : Fault::none));
        refused += overlaps;
    }
    CHECK(refused > 100 && refused < 4'900);
}

// An exception from look() ends the move and its helpers.
void test_look() {
    const Array from(500, 1 << 16);
    Array to(500, 1 << 16);
    std::vector<std::int64_t> pairs;
    for (std::int64_t i = 0; i < 500; ++i) pairs.insert(pairs.end(), {i, i});
    for (int round = 0; round < 3; ++round) {
        Move move(from.blocks, to.blocks, check_pairs(pairs.data(), 500, from.blocks, to.blocks));
        bool thrown = false;
        try {
            move.run(3, [] { throw 1; });
        } catch (int) {
            thrown = true;
        }
        for (std::uint32_t i = 0; i < 500 && !thrown; ++i) CHECK(std::memcmp(from.block(i), to.block(i), 1 << 16) == 0);  // done before the first look
    }
}

void test_concurrent_moves() {
    const Array from(500, 4096);
    std::vector<std::thread> threads;
    std::vector<Array> targets;
    for (unsigned t = 0; t < 4; ++t) targets.emplace_back(500, 4096, t);
    for (unsigned t = 0; t < 4; ++t)
        threads.emplace_back([&from, &to = targets[t]] {
            std::vector<std::int64_t> pairs;
            for (std::int64_t i = 0; i < 500; ++i) pairs.insert(pairs.end(), {i, 499 - i});
            for (int round = 0; round < 5; ++round) {
                Move move(from.blocks, to.blocks, check_pairs(pairs.data(), 500, from.blocks, to.blocks));
                move.run(2, [] {});
            }
            for (std::uint32_t i = 0; i < 500; ++i) CHECK(std::memcmp(from.block(i), to.block(499 - i), 4096) == 0);
        });
    for (std::thread& thread : threads) thread.join();
}

int calls[3];

int fake_copy(void* to, const void* from, std::size_t bytes, int kind, void* stream) {
    CHECK(kind == 1 && stream != nullptr);
    std::memcpy(to, from, bytes);
    return ++calls[0] == 1000 ? 700 : 0;
}

int fake_copy_2d(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch, std::size_t bytes,
                 std::size_t rows, int kind, void* /*stream*/) {
    CHECK(kind == 1 && to_pitch >= bytes && from_pitch >= bytes && rows > 1);
    for (std::size_t r = 0; r < rows; ++r)
        std::memcpy(static_cast<char*>(to) + r * to_pitch, static_cast<const char*>(from) + r * from_pitch, bytes);
    ++calls[1];
    return 0;
}

int fake_batch(void** to, const void** from, std::size_t* bytes, std::size_t count, BatchAttributes* attributes,
               std::size_t* first, std::size_t attribute_count, void* /*stream*/) {
    CHECK(attributes->source_access_order == 1 && *first == 0 && attribute_count == 1);
    for (std::size_t i = 0; i < count; ++i) std::memcpy(to[i], from[i], bytes[i]);
    ++calls[2];
    return 0;
}

std::uintptr_t address_of(const std::byte* at) { return reinterpret_cast<std::uintptr_t>(at); }

Registered sorted(Registered begins) {
    std::sort(begins.begin(), begins.end());
    return begins;
}

void test_device() {
    CudaRuntime cuda;
    cuda.copy = fake_copy;
    cuda.copy_2d = fake_copy_2d;
    for (const bool has_batch : {false, true}) {
        for (const std::int64_t gap : {0, 64}) {
            const Array from(100, 256, gap);
            Array to(100, 256);
            // A run of ten pairs, and two single ones.
            std::vector<std::int64_t> pairs;
            for (std::int64_t i = 0; i < 10; ++i) pairs.insert(pairs.end(), {20 + i, 50 + i});
            pairs.insert(pairs.end(), {5, 99, 7, 3});
            const Reading reading = check_pairs(pairs.data(), 12, from.blocks, to.blocks);
            CHECK(reading.finding.fault == Fault::none);
            const auto copies = device_copies(from.blocks, to.blocks, reading.pairs, Direction::to_device, {});
            CHECK(copies.size() == 3 && copies[0].rows == (gap == 0 ? 1 : 10));
            // Registrations begin at the fourth block of the run, and within a single one.
            const Registered begins = {address_of(from.block(23)), address_of(from.block(20)), address_of(from.block(5)) + 100};
            const auto parts = device_copies(from.blocks, to.blocks, reading.pairs, Direction::to_device, sorted(begins));
            CHECK(parts.size() == 5 && parts[0].bytes * parts[0].rows == 3 * 256 && parts[2].bytes == 100);
            CHECK(parts[1].from == from.block(23) && parts[3].from == from.block(5) + 100 && parts[3].bytes == 156);
            cuda.batch_13 = has_batch ? fake_batch : nullptr;
            std::fill(calls, calls + 3, 0);
            int stream = 0;
            const Queued queued = queue_copies(cuda, copies, Direction::to_device, &stream);
            CHECK(queued.error == 0 && queued.copies == 3);
            const std::string ways = std::string(gap == 0 ? "" : "2d+") + (has_batch ? "batch" : "loop");
            CHECK(queued.ways.names() == ways && WaysTaken().names() == "none");
            CHECK(calls[1] == (gap == 0 ? 0 : 1));
            CHECK(calls[2] == (has_batch ? 1 : 0) && calls[0] == (has_batch ? 0 : gap == 0 ? 3 : 2));
            for (std::size_t i = 0; i < pairs.size(); i += 2)
                CHECK(std::memcmp(from.block(static_cast<std::uint32_t>(pairs[i])),
                                  to.block(static_cast<std::uint32_t>(pairs[i + 1])), 256) == 0);
        }
    }
    cuda.batch_13 = nullptr;
    calls[0] = 998;
    const Array from(4, 64, 1);
    const Array to(4, 64, 1);
    const std::int64_t pairs[] = {0, 2, 1, 1, 2, 0};
    const auto reading = check_pairs(pairs, 3, from.blocks, to.blocks);
    const auto copies = device_copies(from.blocks, to.blocks, reading.pairs, Direction::to_device, {});
    int stream = 0;
    const Queued queued = queue_copies(cuda, copies, Direction::to_device, &stream);
    CHECK(queued.error == 700 && queued.copies == 1);
}

// One copy more than a batch takes is a batch of its own.
void test_batch_limit() {
    CudaRuntime cuda;
    cuda.batch_13 = fake_batch;
    const Array from(kMostInBatch + 1, 16);
    const Array to(kMostInBatch + 1, 16);
    std::vector<std::int64_t> backwards;
    for (std::int64_t i = 0; i <= std::int64_t{kMostInBatch}; ++i)
        backwards.insert(backwards.end(), {i, std::int64_t{kMostInBatch} - i});
    const Reading reading = check_pairs(backwards.data(), kMostInBatch + 1, from.blocks, to.blocks);
    calls[2] = 0;
    int stream = 0;
    auto copies = device_copies(from.blocks, to.blocks, reading.pairs, Direction::to_device, {});
    const Queued queued = queue_copies(cuda, std::move(copies), Direction::to_device, &stream);
    CHECK(queued.error == 0 && queued.copies == kMostInBatch + 1 && calls[2] == 2);
    for (std::uint32_t i = 0; i <= kMostInBatch; ++i) CHECK(std::memcmp(from.block(i), to.block(kMostInBatch - i), 16) == 0);
}

}  // namespace

// With any argument: only what has threads.
int main(int argc, char**) {
    test_look();
    test_concurrent_moves();
    if (argc > 1) return test_moves({4}), 0;
    test_moves({1, 2, 4});
    test_pieces();
    test_refusals();
    test_overlaps();
    test_device();
    test_batch_limit();
}
