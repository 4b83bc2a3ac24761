// A disk tier on real files, with its threads, under random calls: what is loaded is what was stored. Also under
// ThreadSanitizer.
#include "tiers/disk_tier.hpp"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace memlane::tiers;
using memlane::os::Deadline;

namespace {

constexpr std::uint64_t kRow = 6000;
constexpr std::uint32_t kRows = 16, kSlots = 24, kKeys = 60;

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

void fill(std::byte* row, std::uint64_t number) {
    for (std::uint64_t i = 0; i < kRow; ++i) row[i] = static_cast<std::byte>(number * 31 + i * (number % 7 + 1));
}

bool is_filled(const std::byte* row, std::uint64_t number) {
    std::vector<std::byte> wanted(kRow);
    fill(wanted.data(), number);
    return std::memcmp(row, wanted.data(), kRow) == 0;
}

struct Call {
    bool is_store;
    std::vector<std::uint64_t> numbers;
    std::vector<Block> rows;
};

void random_calls(const std::string& folder, std::uint64_t seed, bool direct) {
    std::mt19937_64 draw(seed);
    std::vector<std::byte> rows(kRow * kRows);
    Namespace own{};
    own[0] = std::byte{1};
    auto file = std::make_unique<SlotFile>(folder, "test", kRow, kSlots, own, direct);
    const SlotFile::Slots found = file->recover();
    BlockPool pool(static_cast<std::uint32_t>(file->slots()), "lru");
    DiskIo io(std::move(file), rows.data(), 3);
    DiskTier tier(io, pool);
    {
        Keys keys({});
        std::vector<Block> slots;
        for (const auto& kept : found.own) {
            std::uint64_t number;
            std::memcpy(&number, kept.digest.data(), sizeof number);
            keys.digests.push_back(kept.digest);
            slots.push_back(kept.slot);
        }
        for (const Digest& digest : keys.digests) {
            std::uint64_t number;
            std::memcpy(&number, digest.data(), sizeof number);
            keys.asked.push_back({mixed(number), digest});
        }
        tier.restore(keys.asked, slots, found.foreign);
    }
    std::map<DiskTier::Ticket, Call> calls;
    std::vector<bool> is_busy(kRows);
    const auto report = [&] {
        tier.collect();
        for (const auto& done : tier.take_done()) {
            const Call& call = calls.at(done.ticket);
            for (std::size_t at = 0; at < call.numbers.size(); ++at) {
                if (done.ok[at] && !call.is_store) CHECK(is_filled(rows.data() + call.rows[at] * kRow, call.numbers[at]));
                is_busy[call.rows[at]] = false;
            }
            calls.erase(done.ticket);
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
            if (call.is_store) fill(rows.data() + row * kRow, number);
        }
        const Keys keys(call.numbers);
#if defined(__SANITIZE_THREAD__)
        const bool is_short = !call.is_store && draw() % 10 == 0;  // a late store reads a row that may change: by design
#else
        const bool is_short = draw() % 10 == 0;
#endif
        const Deadline deadline =
            is_short ? Deadline::after(static_cast<std::int64_t>(draw() % 50'000)) : Deadline::never();
        const auto ticket = call.is_store ? tier.store(keys.asked, call.rows, deadline) : tier.load(keys.asked, call.rows, deadline);
        calls.emplace(ticket, call);
        if (draw() % 20 == 0) CHECK(tier.forget(Keys({draw() % kKeys}).asked) == 0);
        if (draw() % 150 == 0) tier.clear();
        if (draw() % 3 == 0) report();
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
    for (std::uint64_t seed = 0; seed < 12; ++seed) random_calls(folder, seed, seed % 2 == 0);
    std::filesystem::remove_all(folder);
}
