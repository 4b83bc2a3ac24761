// Every counter wraps, without consequences. What can wrap, and how it is compared:
//
//   futex words (published, consumed, membership)   32 bits, wrap in hours; equal or not, by the kernel alone
//   position, and the lap derived from it          64 bits; chunks by remainder, extents by difference
//   messages, bytes, waits, spills of a slot        64 bits; shown, never compared
//   spins that a Spinner skips                      at most 255
//   views of a slot                                 32 bits; at most one for each chunk
//   fork generation                                 64 bits; equal or not
//
// Times are nanoseconds since boot in signed 64 bits: 292 years.
#include <cstring>
#include <deque>
#include <random>
#include <thread>

#include "rings.hpp"

using namespace memlane;
using namespace memlane::testing;
using core::Status;

namespace {

void until_set(const std::uint8_t& parked) {
    while (core::load_relaxed(parked) == 0) ::sched_yield();
}

// Every message finds its reader asleep, and every returned chunk the writer, while the futex words wrap.
void sleepers_are_woken_over_the_end_of_the_word() {
    const RingGeometry g{1, 64, 1};
    const auto segment = new_segment(g);
    start_counters_near_their_ends(*segment);
    RingWriter writer(segment, g, 64);
    const auto reader_end = new_reader(*segment, g, 0);
    RingReader& reader = *reader_end;
    constexpr std::uint64_t kMessages = 5;
    std::thread other([&] {
        for (std::uint64_t i = 0; i < kMessages; ++i) {
            auto sample = must(reader.begin(os::Deadline::never(), keep_waiting));
            until_set(writer.ring().waits().writer_parked);
            CHECK(take(std::move(sample)) == i);
        }
    });
    for (std::uint64_t i = 0; i < kMessages; ++i) {
        until_set(writer.ring().parked_readers()[0]);
        put(must(writer.begin_nowait(8)), i);
        CHECK(writer.begin(8, os::Deadline::never(), keep_waiting).status == Status::ok);
    }
    other.join();
    CHECK(core::load_relaxed(writer.ring().waits().published) == kMessages - 2);
    CHECK(core::load_relaxed(writer.ring().waits().consumed) == kMessages - 2);
}

// The word wraps after the sleeper has found nothing, and before it sleeps: it must not fall asleep.
void wake_up_at_the_end_of_the_word_is_not_lost() {
    std::uint32_t word = UINT32_MAX;
    std::uint8_t parked = 0;
    core::Spinner spinner(2, 1);
    bool published = false;
    int looks = 0;
    const auto ready = [&] {
        if (published) return true;
        if (parked == 0) return false;
        published = true;  // right after this failed check
        core::wake_parked(&word, {&parked, 1});
        return false;
    };
    const core::WaitResult result = core::wait_until({&word, &parked}, spinner, os::Deadline::never(), ready,
                                                     [&](core::LookReason) { return ++looks > 0; });
    CHECK(result == core::WaitResult::ready && word == 0 && looks == 0);
}

void joining_is_seen_over_the_end_of_the_word() {
    const RingGeometry g{1, 64, 1};
    const auto segment = new_segment(g);
    RingWriter writer(segment, g, 64);
    std::uint32_t& membership = segment->header().membership;
    core::store_relaxed(membership, UINT32_MAX);
    std::thread other([&] {
        core::Spinner spinner(2, 1);
        const auto has_joined = [&] { return writer.participants().state(1) == core::SlotState::attached; };
        CHECK(core::wait_until({&membership}, spinner, os::Deadline::never(), has_joined, keep_waiting) ==
              core::WaitResult::ready);
    });
    const auto reader = new_reader(*segment, g, 0);
    other.join();
    CHECK(core::load_relaxed(membership) == 0);
}

// Random steps of a writer and two readers, compared with two lists, while the position wraps: with numbers of chunks
// that divide 2^64 and others, with small messages, and with some in extents.
void messages_keep_their_order_over_the_end_of_the_position() {
    for (const std::uint64_t chunks : {1, 2, 3, 4, 7, 10}) {
        std::mt19937_64 random(chunks);
        const RingGeometry g{2, 64, chunks};
        const auto segment = new_segment(g);
        const std::uint64_t first = 0 - 5 * chunks - 2;
        RingWriter writer(segment, g, 64, 1u << 20, first);
        const std::unique_ptr<RingReader> readers[] = {new_reader(*segment, g, 0, first),
                                                       new_reader(*segment, g, 1, first)};
        std::deque<std::uint64_t> expected[2];
        for (std::uint64_t sent = 0; sent < 20 * chunks;) {
            const auto who = random() % 3;
            if (who == 2) {
                const bool is_large = random() % 4 == 0;
                auto claim = writer.begin_nowait(8).loan;
                // Never overwrites an unread message, and is never blocked by messages that all have read.
                CHECK(claim || !expected[0].empty() || !expected[1].empty());
                if (!claim) continue;
                const std::uint64_t value = sent++;
                if (is_large) {
                    const auto write = [&](broadcast::ExtentWriter& to) {
                        return to.put(0, sizeof value, &value);
                    };
                    CHECK(claim->spill(sizeof value, os::Deadline::never(), write, keep_waiting).status == Status::ok);
                    claim->publish(ChunkKind::object, sizeof value);
                } else {
                    put(std::move(*claim), value);
                }
                for (auto& one : expected) one.push_back(value);
                CHECK(expected[0].size() <= chunks && expected[1].size() <= chunks);
                continue;
            }
            RingReader& reader = *readers[who];
            auto sample = reader.begin_nowait();
            CHECK(sample.status == (expected[who].empty() ? Status::would_block : Status::ok));
            if (!sample.loan) continue;
            CHECK(take(std::move(*sample.loan)) == expected[who].front());
            expected[who].pop_front();
        }
        CHECK(writer.position() == 15 * chunks - 2);
    }
}

// Fails if the ages of extents are compared by `<`: laps from before the wrap are then never over.
void extents_are_given_back_over_the_end_of_the_position() {
    const RingGeometry g{1, 64, 2};
    const auto segment = new_segment(g);
    const std::uint64_t first = 0 - 1;
    RingWriter writer(segment, g, 64, 0, first);
    const auto reader_end = new_reader(*segment, g, 0, first);
    RingReader& reader = *reader_end;
    const std::uint64_t before = os::facts_of(segment->file()).allocated;
    const std::vector<std::byte> message(3 * core::kPage, std::byte{7});
    for (int i = 0; i < 4; ++i) {
        auto claim = must(writer.begin_nowait(0));
        const auto write = [&](broadcast::ExtentWriter& to) {
            return to.put(0, message.size(), message.data());
        };
        CHECK(claim.spill(message.size(), os::Deadline::never(), write, keep_waiting).status == Status::ok);
        claim.publish(ChunkKind::object, message.size());
        must(reader.begin_nowait()).finish(message.size());
        CHECK(os::facts_of(segment->file()).allocated == before + message.size());
    }
}

void turns_before_the_end_are_other_turns() {
    for (const std::uint64_t chunks : {1, 3, 4}) {
        const RingGeometry g{1, 64, chunks};
        const auto segment = new_segment(g);
        const std::uint64_t first = 0 - 2 * chunks;
        RingWriter writer(segment, g, 64, 0, first);
        const auto reader_end = new_reader(*segment, g, 0, first);
        for (std::uint64_t i = 0; i < 2 * chunks; ++i) {
            put(must(writer.begin_nowait(8)), i);
            CHECK(take(must(reader_end->begin_nowait())) == i);
        }
        CHECK(reader_end->position() == 0);
        std::uint8_t* flags = &writer.ring().written(0);
        flags[1] = 0;
        flags[0] = 1;  // by hand, with the documented part alone
        CHECK(!must(reader_end->begin_nowait()).descriptor().has_value());
    }
}

void numbers_that_are_only_shown_go_on_from_0() {
    const RingGeometry g{1, 64, 1};
    const auto segment = new_segment(g);
    start_counters_near_their_ends(*segment);
    RingWriter writer(segment, g, 64);
    const auto reader_end = new_reader(*segment, g, 0);
    for (std::uint64_t i = 0; i < 3; ++i) {
        put(must(writer.begin(8, os::Deadline::never(), keep_waiting)), i);
        CHECK(take(must(reader_end->begin(os::Deadline::never(), keep_waiting))) == i);
    }
    for (const std::size_t slot : {0, 1}) {
        const core::ParticipantSlot& numbers = writer.participants().slot(slot);
        CHECK(numbers.bytes == 3 * 8 - 2 && numbers.waits == 2 && numbers.spills == UINT64_MAX);
    }
}

// If spinning never pays, waits spin ever more rarely, but at least every 256th one does, for however long.
void spins_are_never_left_out_for_ever() {
    core::Spinner spinner(1, 1);
    int left_out = 0;
    int most = 0;
    for (int i = 0; i < 5000; ++i) {
        bool has_looked = false;
        CHECK(!spinner.spin([&] {
            has_looked = true;
            return false;
        }));
        left_out = has_looked ? 0 : left_out + 1;
        most = std::max(most, left_out);
    }
    CHECK(most == 255);
}

}  // namespace

int main() {
    sleepers_are_woken_over_the_end_of_the_word();
    wake_up_at_the_end_of_the_word_is_not_lost();
    joining_is_seen_over_the_end_of_the_word();
    messages_keep_their_order_over_the_end_of_the_position();
    extents_are_given_back_over_the_end_of_the_position();
    turns_before_the_end_are_other_turns();
    numbers_that_are_only_shown_go_on_from_0();
    spins_are_never_left_out_for_ever();
    std::puts("wraps: 8 counters wrap and nothing happens");
}
