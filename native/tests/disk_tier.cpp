// A disk tier on real files, with its threads, under random calls: what is loaded is what was stored. Through the page
// cache, and past it by io_uring, where the machine has it, and by threads. Also under ThreadSanitizer.
#include "tiers/disk_tier.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace memlane::tiers;
using memlane::os::Deadline;

namespace {

constexpr std::uint32_t kRows = 16, kSlots = 24, kKeys = 60;

// How a tier reads and writes.
struct Way {
    SlotFile::Direct direct;
    bool may_ring;
    std::uint64_t row_bytes;
};
constexpr auto kBuffered = SlotFile::Direct::never, kDirect = SlotFile::Direct::if_possible;
constexpr Way kWays[] = {
    {kBuffered, true, 6000}, {kDirect, true, 6000}, {kDirect, true, 8192}, {kDirect, false, 6000}, {kDirect, false, 8192}};

struct Keys {
    explicit Keys(const std::vector<std::uint64_t>& numbers) : digests(numbers.size()) {
        for (std::size_t at = 0; at < numbers.size(); ++at) {
            std::memcpy(digests[at].data(), &numbers[at], sizeof numbers[at]);
            asked.push_back({mixed(numbers[at]), digests[at]});
        }
    }
    std::vector<Digest> digests;
    std::vector<BlockPool::Asked> asked;
};

void fill(std::span<std::byte> row, std::uint64_t number) {
    for (std::uint64_t i = 0; i < row.size(); ++i) row[i] = static_cast<std::byte>(number * 31 + i * (number % 7 + 1));
}

bool is_filled(std::span<const std::byte> row, std::uint64_t number) {
    std::vector<std::byte> wanted(row.size());
    fill(wanted, number);
    return std::ranges::equal(row, wanted);
}

struct Call {
    bool is_store;
    std::vector<std::uint64_t> numbers;
    std::vector<Block> rows;
};

void random_calls(const std::string& folder, std::uint64_t seed, Way way) {
    std::mt19937_64 draw(seed);
    const Staging rows(way.row_bytes * kRows);
    const auto row_at = [&](Block at) { return std::span(rows.data() + at * way.row_bytes, way.row_bytes); };
    Namespace own{};
    own[0] = std::byte{1};
    auto file = std::make_unique<SlotFile>(folder, std::to_string(way.row_bytes), way.row_bytes, kSlots, own, way.direct);
    const SlotFile::Slots found = file->recover();
    BlockPool pool(static_cast<std::uint32_t>(file->slots()), "lru");
    DiskIo io(std::move(file), rows.data(), 3, way.may_ring);
    DiskTier tier(io, pool);
    {
        Keys keys({});
        for (const auto& kept : found.own) {
            keys.digests.push_back(kept.digest);
        }
        for (const Digest& digest : keys.digests) {
            std::uint64_t number;
            std::memcpy(&number, digest.data(), sizeof number);
            keys.asked.push_back({mixed(number), digest});
        }
        tier.restore(keys.asked, found.own, found.foreign);
    }
    std::map<DiskTier::Ticket, Call> calls;
    std::vector<bool> is_busy(kRows);
    const auto report = [&] {
        tier.collect();
        while (auto done = tier.take_done()) {
            if (draw() % 4 == 0) {  // as if it had been interrupted
                tier.put_back(*std::move(done));
                continue;
            }
            const Call& call = calls.at(done->ticket);
            for (std::size_t at = 0; at < call.numbers.size(); ++at) {
                if (done->ok[at] && !call.is_store) CHECK(is_filled(row_at(call.rows[at]), call.numbers[at]));
                is_busy[call.rows[at]] = false;
            }
            calls.erase(done->ticket);
        }
    };
    for (int step = 0; step < 400; ++step) {
        Call call{draw() % 2 == 0, {}, {}};
        for (Block row = 0; row < kRows && call.rows.size() < 4; ++row) {
            const std::uint64_t number = draw() % kKeys;
            if (is_busy[row] || std::ranges::find(call.numbers, number) != call.numbers.end()) continue;
            call.rows.push_back(row);
            call.numbers.push_back(number);
            is_busy[row] = true;
            if (call.is_store) fill(row_at(row), number);
        }
        const Keys keys(call.numbers);
#if defined(__SANITIZE_THREAD__)
        const bool is_short = !call.is_store && draw() % 10 == 0;  // a late store reads a row that may change: by design
#else
        const bool is_short = draw() % 10 == 0;
#endif
        const Deadline deadline =
            is_short ? Deadline::after(static_cast<std::int64_t>(draw() % 50'000)) : Deadline::never();
        const auto ticket = call.is_store ? tier.store(keys.asked, call.rows, deadline, true) : tier.load(keys.asked, call.rows, deadline);
        calls.emplace(ticket, call);
        const auto is_done = [&](const DiskTier::OrderRef& order) {
            return io.headers().wait(order, memlane::os::monotonic_now() + 60 * memlane::os::kSecond) == 0;
        };
        if (draw() % 20 == 0) {
            const auto order = tier.forget(Keys({draw() % kKeys, kKeys + draw() % 3}).asked);
            if (draw() % 2 == 0) CHECK(is_done(order));
        }
        if (draw() % 150 == 0) CHECK(is_done(tier.clear()));
        if (draw() % 3 == 0) report();
        while (std::ranges::find(is_busy, false) == is_busy.end()) report();
    }
    while (!calls.empty() || !tier.is_idle()) {
        report();
        std::this_thread::yield();
    }
    CHECK(pool.statistics().pinned == 0);
    CHECK(pool.statistics().reserved == 0);
    CHECK(pool.statistics().used <= kSlots);
    CHECK(io.close());
}

}  // namespace

int main() {
    char folder[] = "/tmp/memlane-disk-tier-XXXXXX";
    CHECK(::mkdtemp(folder) != nullptr);
    for (std::uint64_t seed = 0; seed < 30; ++seed) random_calls(folder, seed, kWays[seed % std::size(kWays)]);
    std::filesystem::remove_all(folder);
}
