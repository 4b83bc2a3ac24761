// The pool of blocks: random calls beside a plain index, with every policy; and that eviction passes pinned blocks once.
// Under ThreadSanitizer: the thread that feeds a tuner beside the calls.
#include "tiers/block_pool.hpp"

#include <algorithm>
#include <ctime>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "check.hpp"
#include "tiers/refusals.hpp"

using namespace memlane::tiers;

namespace {

struct Keys {
    std::vector<std::string> texts;
    std::vector<BlockPool::Asked> asked;

    explicit Keys(const std::vector<std::uint64_t>& numbers) {
        for (const std::uint64_t number : numbers) texts.push_back("key " + std::to_string(number));
        for (std::size_t at = 0; at < numbers.size(); ++at)
            asked.push_back({mixed(numbers[at]), std::as_bytes(std::span(texts[at]))});
    }
};

// Stores what it can; returns the block of each number that was stored.
std::map<std::uint64_t, Block> store(BlockPool& pool, const std::vector<std::uint64_t>& numbers,
                                     std::map<std::string, Block>& index) {
    const Keys keys(numbers);
    const std::vector<Block> blocks = pool.reserve(keys.asked, [&](KeyStore::Bytes key, Block) {
        CHECK(index.erase({reinterpret_cast<const char*>(key.data()), key.size()}) == 1);
    });
    std::vector<Block> reserved;
    std::map<std::uint64_t, Block> stored;
    for (std::size_t at = 0; at < numbers.size(); ++at) {
        if (blocks[at] == kNoBlock) continue;
        reserved.push_back(blocks[at]);
        stored[numbers[at]] = index[keys.texts[at]] = blocks[at];
    }
    const std::unique_ptr<bool[]> all(new bool[reserved.size() + 1]);
    std::memset(all.get(), 1, reserved.size() + 1);
    pool.commit(reserved, {all.get(), reserved.size()});
    return stored;
}

void random_calls(const std::string& policy, std::uint64_t seed) {
    constexpr std::uint32_t blocks = 50;
    BlockPool pool(blocks, policy);
    std::mt19937_64 draw(seed);
    std::map<std::string, Block> index;
    std::vector<std::vector<Block>> pins;
    if (seed % 2 == 1) CHECK(pool.set_aside(5) == 5);
    for (int step = 0; step < 3000; ++step) {
        std::vector<std::uint64_t> numbers(draw() % 8);
        for (std::uint64_t& number : numbers) number = draw() % (draw() % 4 == 0 ? 1000 : 60);
        const Keys keys(numbers);
        switch (draw() % 8) {
            case 0:
                pool.forget(keys.asked);
                for (const std::string& text : keys.texts) index.erase(text);
                break;
            case 1:
                if (!pins.empty()) {
                    pool.unpin(pins.back());
                    pins.pop_back();
                }
                break;
            case 2:
            case 3: {
                const std::vector<Block> run = pool.pin(keys.asked);
                for (std::size_t at = 0; at < run.size(); ++at) CHECK(index.at(keys.texts[at]) == run[at]);
                CHECK(run.size() == keys.texts.size() || !index.contains(keys.texts[run.size()]));
                if (pins.size() < 4) {
                    pins.push_back(run);
                } else {
                    pool.unpin(run);
                }
                break;
            }
            default: {
                const auto stored = store(pool, numbers, index);
                for (const auto& pinned : pins)
                    for (const auto& [number, block] : stored)
                        CHECK(std::find(pinned.begin(), pinned.end(), block) == pinned.end());
            }
        }
        CHECK(pool.statistics().used <= blocks);
        const std::vector<Block> aside(pool.aside().begin(), pool.aside().end());
        CHECK(aside.size() <= 5 * (seed % 2));
        for (const auto& [key, block] : index) CHECK(std::find(aside.begin(), aside.end(), block) == aside.end());
        if (draw() % 3 == 0) pool.reuse({aside.data(), draw() % (aside.size() + 1)});
    }
    pool.reuse(std::vector(pool.aside().begin(), pool.aside().end()));
    for (const auto& pinned : pins) pool.unpin(pinned);
    CHECK(pool.set_aside(0) == 0 && pool.aside().empty() && pool.statistics().reserved == 0);
    CHECK(pool.statistics().used == index.size());
    if (TunerFeed* const feed = pool.tuner()) feed->settle();
}

// The last block that one call evicts stays aside; its blocks are where they were.
void the_last_victims_stay_aside() {
    BlockPool pool(8, "lru");
    CHECK(pool.set_aside(2) == 2);
    std::map<std::string, Block> index;
    store(pool, {0, 1, 2, 3, 4, 5}, index);
    const std::map<std::string, Block> before = index;
    const Keys keys({10, 11, 12, 13});
    std::vector<std::pair<std::string, Block>> evicted;
    const std::vector<Block> blocks = pool.reserve(keys.asked, [&](KeyStore::Bytes key, Block block) {
        evicted.emplace_back(std::string{reinterpret_cast<const char*>(key.data()), key.size()}, block);
    });
    CHECK(evicted.size() == 4);
    for (std::size_t at = 0; at < 4; ++at) {
        const auto& [key, block] = evicted[at];
        CHECK(before.at(key) == block && pool.is_aside(block) == (at >= 2));
        CHECK((std::find(blocks.begin(), blocks.end(), block) == blocks.end()) == (at >= 2));
    }
    const std::vector<Block> wrong{blocks[0]};
    pool.reuse(wrong);  // is not aside: nothing happens
    CHECK(pool.aside().size() == 2);
}

// 90 % pinned: each eviction takes the same time.
void pinned_blocks_are_passed_once() {
    constexpr std::uint32_t blocks = 100'000;
    BlockPool pool(blocks, "lru");
    std::map<std::string, Block> index;
    std::vector<std::uint64_t> numbers(blocks);
    for (std::uint32_t at = 0; at < blocks; ++at) numbers[at] = at;
    store(pool, numbers, index);
    numbers.resize(blocks / 10 * 9);
    const Keys keys(numbers);
    CHECK(pool.pin(keys.asked).size() == numbers.size());
    const std::clock_t start = std::clock();  // of the processor
    for (std::uint64_t number = blocks; number < 2 * blocks; ++number) CHECK(store(pool, {number}, index).size() == 1);
    // Passing all of the pinned blocks each time would take minutes.
    CHECK((std::clock() - start) / CLOCKS_PER_SEC < 20);
}

// A block that the medium has refused is used where there is no other, until it is brought back.
void refused_blocks_are_retired() {
    BlockPool pool(3, "lru");
    const auto none = [](KeyStore::Bytes, Block) {};
    const auto stored = [&](std::uint64_t number, bool is_good, BlockPool::Limits limits = {}) {
        const Block block = pool.reserve(Keys({number}).asked, none, limits).at(0);
        if (block == kNoBlock) return block;
        if (!is_good) pool.retire(block);
        pool.commit(std::vector{block}, std::span(&is_good, 1));
        return block;
    };
    const Block bad = stored(0, false);
    CHECK(pool.statistics().retired == 1 && pool.statistics().used == 0);
    for (std::uint64_t number = 1; number < 10; ++number) CHECK(stored(number, true) != bad);
    CHECK(pool.statistics().evicted == 7);
    CHECK(stored(10, true, {.victims = 0, .may_use_retired = false}) == kNoBlock);
    CHECK(stored(10, false, {.victims = 0}) == bad);
    pool.bring_back_one();
    CHECK(pool.statistics().retired == 0 && stored(11, false) == bad && pool.is_refused(bad));
    pool.bring_back();
    CHECK(stored(12, true) == bad && !pool.is_refused(bad));
    pool.forget(Keys({12}).asked);
    pool.retire_free();
    CHECK(pool.statistics().retired == 1 && pool.statistics().used == 2);
}

// Whatever a pinned block has, free or reserved, forgotten or refused, it is not used for another key.
void pinned_blocks_are_not_used() {
    const auto none = [](KeyStore::Bytes, Block) {};
    const bool good = true;
    for (const bool is_reserved : {false, true}) {
        BlockPool pool(2, "lru");
        const Block block = pool.reserve(Keys({0}).asked, none).at(0);
        if (!is_reserved) pool.give_back(std::vector{block});
        pool.pin(block);
        pool.forget(Keys({0}).asked);
        CHECK(pool.is_revoked(block) == is_reserved);
        if (is_reserved) {
            pool.unpin(std::vector{block});  // the reservation keeps it
            CHECK(pool.reserve(Keys({1, 2}).asked, none) == std::vector<Block>({1 - block, kNoBlock}));
            pool.pin(block);
            pool.commit(std::vector{block}, std::span(&good, 1));
        } else {
            CHECK(pool.reserve(Keys({1, 2}).asked, none) == std::vector<Block>({1 - block, kNoBlock}));
        }
        CHECK(pool.reserve(Keys({3}).asked, none).at(0) == kNoBlock);
        pool.unpin(std::vector{block});
        CHECK(pool.statistics().pinned == 0 && pool.statistics().used == 1);
        CHECK(pool.reserve(Keys({3, 4}).asked, none) == std::vector<Block>({block, kNoBlock}));
    }
}

// Of the keys of a call the policy sees the last first, as of those that it stores: what it remembers longest is the head of a
// prefix. Where not all fit, the first ones get the blocks.
void the_first_keys_of_a_call_are_remembered_longest() {
    const auto none = [](KeyStore::Bytes, Block) {};
    BlockPool pool(2, std::make_unique<TwoSegment>(2, 0, 3));  // declines what it does not remember
    CHECK(pool.reserve(Keys({0, 1, 2, 3, 4, 5}).asked, none) == std::vector<Block>(6, kNoBlock));
    CHECK(pool.reserve(Keys({0, 1, 2}).asked, none) == std::vector<Block>({0, 1, kNoBlock}));
}

// The medium refuses everything, and later nothing: in virtual time.
void refusals() {
    constexpr auto second = memlane::os::kSecond;
    using Trial = Refusals::Trial;
    Refusals medium;
    CHECK(medium.next(100 * second) == Trial::none && !medium.is_distrusted());
    int refused = 0;
    while (!medium.refused(false, 0)) ++refused;
    CHECK(refused == 63 && medium.is_distrusted());
    CHECK(medium.next(second - 1) == Trial::none);
    std::vector<Trial> trials;
    memlane::os::Nanoseconds now = 0, longest = 0, last = 0;
    for (; trials.size() < 12; now += second) {
        const Trial trial = medium.next(now);
        if (trial == Trial::none) continue;
        trials.push_back(trial);
        longest = std::max(longest, now - std::exchange(last, now));
        CHECK(!medium.refused(trial == Trial::retired, now));
    }
    CHECK(std::ranges::count(trials, Trial::victim) == 3 && trials.front() == Trial::retired);
    CHECK(longest == 60 * second);
    medium.succeeded(true);
    CHECK(!medium.is_distrusted() && medium.next(now + 1000 * second) == Trial::none);
}

// The medium takes what it then cannot read: the slots come back, but less and less often.
void refused_reads() {
    constexpr auto second = memlane::os::kSecond;
    using Trial = Refusals::Trial;
    Refusals medium;
    memlane::os::Nanoseconds now = 0;
    for (const int wait : {1, 2, 4, 8, 16, 32, 60, 60}) {
        medium.read_refused(now);
        medium.read_refused(now + second / 2);
        CHECK(medium.next(now + wait * second - 1) == Trial::none);
        now += wait * second;
        CHECK(medium.next(now) == Trial::retired && !medium.is_distrusted());
        medium.succeeded(true);
        CHECK(medium.next(now + 1000 * second) == Trial::none);
    }
}

// Beside a list of what was pushed.
void recent_keys(std::uint32_t most, std::uint64_t seed) {
    RecentKeys keys(most);
    std::deque<std::uint64_t> pushed;  // the newest first; 0: it has left
    std::mt19937_64 draw(seed);
    for (int step = 0; step < 2000; ++step) {
        const std::uint64_t number = 1 + draw() % (2 * most + 3);
        const auto found = std::ranges::find(pushed, number);
        const bool is_there = found != pushed.end();
        if (draw() % 3 > 0) {
            keys.push(mixed(number));
            if (is_there) *found = 0;
            pushed.push_front(number);
            if (pushed.size() > most) pushed.pop_back();
        } else {
            const std::uint32_t age = is_there ? static_cast<std::uint32_t>(found - pushed.begin()) : RecentKeys::kAbsent;
            CHECK(keys.take(mixed(number)) == age);
            if (is_there) *found = 0;
        }
        if (draw() % 500 == 0) {
            keys.clear();
            pushed.clear();
        }
    }
}

}  // namespace

// With any argument: only what has threads.
int main(int argc, char**) {
    const auto play = [](const char* policy) {
        for (std::uint64_t seed = 0; seed < 10; ++seed) random_calls(policy, seed);
    };
    play("tuned");
    if (argc > 1) return 0;
    for (const std::uint32_t most : {0u, 1u, 2u, 7u, 64u})
        for (std::uint64_t seed = 0; seed < 10; ++seed) recent_keys(most, seed);
    for (const char* const policy : {"lru", "arc", "s3fifo"}) play(policy);
    the_last_victims_stay_aside();
    pinned_blocks_are_passed_once();
    refused_blocks_are_retired();
    pinned_blocks_are_not_used();
    the_first_keys_of_a_call_are_remembered_longest();
    refusals();
    refused_reads();
    return 0;
}
