// The ring's ends in one process: the state table, laps, deadlines, death and release.
#include <csignal>
#include <cstring>
#include <thread>

#include "rings.hpp"

using namespace memlane;
using namespace memlane::testing;
using core::Status;

namespace {

void send(RingWriter& writer, std::uint64_t value) { put(must(writer.begin_nowait(sizeof value)), value); }
std::uint64_t receive(RingReader& reader) { return take(must(reader.begin_nowait())); }

void flags_follow_the_state_table() {
    const RingGeometry g{2, 64, 3};
    const auto segment = new_segment(g);
    RingWriter writer(segment, g, 64);
    const auto a_end = new_reader(*segment, g, 0);
    RingReader& a = *a_end;
    const auto b_end = new_reader(*segment, g, 1);
    RingReader& b = *b_end;
    const std::uint8_t* flags = &writer.ring().written(0);
    CHECK(flags[0] == 0 && flags[1] == 0 && flags[2] == 0);
    CHECK(a.begin_nowait().status == Status::would_block);
    send(writer, 7);
    CHECK(flags[0] == 1 && flags[1] == 0 && flags[2] == 0);
    CHECK(receive(a) == 7);
    CHECK(flags[0] == 1 && flags[1] == 1 && flags[2] == 0);
    CHECK(a.begin_nowait().status == Status::would_block);  // never a message twice
    send(writer, 8);
    send(writer, 9);
    CHECK(writer.begin_nowait(8).status == Status::would_block);  // b has not read
    CHECK(receive(b) == 7);
    send(writer, 10);
    CHECK(flags[0] == 1 && flags[1] == 0 && flags[2] == 0);
    for (const std::uint64_t expected : {8, 9, 10}) CHECK(receive(a) == expected && receive(b) == expected);
}

void laps_deliver_everything_in_order() {
    const RingGeometry g{1, 64, 2};
    const auto segment = new_segment(g);
    RingWriter writer(segment, g, 64);
    const auto reader_end = new_reader(*segment, g, 0);
    RingReader& reader = *reader_end;
    for (std::uint64_t i = 0; i < 1001; ++i) {
        send(writer, i);
        CHECK(receive(reader) == i);
    }
    CHECK(core::load_relaxed(writer.participants().slot(0).position) == 1001);
    CHECK(core::load_relaxed(writer.participants().slot(1).position) == 1001);
}

// A member that lies in all its words keeps at most what it may keep: the writer always has a chunk, and never the latest.
void a_liar_keeps_no_more_than_one() {
    const RingGeometry g{2, 64, 4};
    const auto segment = new_segment(g, core::kLatestOnly);
    RingWriter writer(segment, g, 64, 1u << 20);
    const auto reader_end = new_reader(*segment, g, 0);
    RingReader& reader = *reader_end;
    const auto liar_end = new_reader(*segment, g, 1);
    std::uint32_t& reading = writer.participants().slot(2).reading;
    std::uint64_t value = 0;
    for (const std::uint32_t lie : {0u, 1u, 2u, 3u, 4u, 5u, 1u << 31, UINT32_MAX}) {
        core::store_relaxed(reading, lie);
        for (int i = 0; i < 9; ++i) {
            send(writer, ++value);
            auto sample = must(reader.begin_nowait());
            send(writer, ++value);
            send(writer, ++value);
            CHECK(take(std::move(sample)) == value - 2);
            CHECK(receive(reader) == value);
        }
    }
    for (std::uint64_t chunk = 0; chunk < g.max_chunks; ++chunk)
        core::store_relaxed<std::uint8_t>(writer.ring().kept_by(chunk, 1), 1);
    CHECK(writer.is_next_kept());  // all are: a message goes to an extent, as with views
    const auto write = [&](broadcast::ExtentWriter& to) { return to.put(0, sizeof value, &value); };
    for (int i = 0; i < 9; ++i) {
        ++value;
        auto claim = must(writer.begin_nowait(0));
        CHECK(claim.spill(sizeof value, os::Deadline::never(), write, keep_waiting, true).status == Status::ok);
        claim.publish(ChunkKind::object, sizeof value);
        CHECK(receive(reader) == value);
    }
    liar_end->announce_close();
    CHECK(!writer.is_next_kept() || (writer.begin_nowait(8), !writer.is_next_kept()));
    CHECK(reader.skipped() == value - reader.messages());
}

void deadlines_end_waits_and_change_nothing() {
    const RingGeometry g{1, 64, 1};
    const auto segment = new_segment(g);
    RingWriter writer(segment, g, 64);
    const auto reader_end = new_reader(*segment, g, 0);
    RingReader& reader = *reader_end;
    const auto soon = [] { return os::Deadline::after(20 * os::kMillisecond); };
    CHECK(reader.begin(soon(), keep_waiting).status == Status::timed_out);
    send(writer, 1);
    CHECK(writer.begin(8, soon(), keep_waiting).status == Status::timed_out);
    CHECK(writer.begin(8, os::Deadline::never(), [](core::LookReason) { return true; }).status == Status::interrupted);
    CHECK(receive(reader) == 1);
    send(writer, 2);
    CHECK(receive(reader) == 2);
}

void sleeper_is_woken() {
    const RingGeometry g{1, 64, 1};
    const auto segment = new_segment(g);
    RingWriter writer(segment, g, 64);
    const auto reader_end = new_reader(*segment, g, 0);
    RingReader& reader = *reader_end;
    std::thread sleeper([&] {
        for (std::uint64_t i = 0; i < 2000; ++i) CHECK(take(must(reader.begin(os::Deadline::never(), keep_waiting))) == i);
    });
    for (std::uint64_t i = 0; i < 2000; ++i) put(must(writer.begin(8, os::Deadline::never(), keep_waiting)), i);
    sleeper.join();
}

void dead_reader_is_told_and_released() {
    const RingGeometry g{2, 64, 1};
    const core::SegmentId id = new_id();
    const std::string name = "memlane-test-" + std::to_string(::getpid()) + "-death";
    const auto segment =
        core::Segment::create(broadcast::plan_of(g), id, name, {{0, g.total_bytes()}}, RingWriter::kSlot);
    RingWriter writer(segment, g, 64);
    const Signal attached;
    const pid_t child = ::fork();
    if (child == 0) {
        RingReader reader(core::Segment::attach(name, broadcast::plan_of(g), id, 1), g, 0);
        attached.send();
        ::pause();
    }
    attached.wait();
    segment->remove_name();
    send(writer, 1);
    CHECK(!writer.release_reader(0));  // it lives
    ::kill(child, SIGSTOP);
    const auto soon = os::Deadline::after(300 * os::kMillisecond);
    CHECK(writer.begin(8, soon, keep_waiting).status == Status::timed_out);  // stopped is not dead
    ::kill(child, SIGKILL);
    const core::Outcome death = writer.begin(8, os::Deadline::never(), keep_waiting);
    CHECK(death.status == Status::peer_died && death.slot == 1);
    CHECK(exit_code(child) == 128 + SIGKILL);
    CHECK(writer.begin_nowait(8).status == Status::peer_died);  // and again in every call
    CHECK(writer.release_reader(0));
    CHECK(writer.begin_nowait(8).status == Status::would_block);  // reader 1 may still come
    CHECK(writer.release_reader(1));  // absent, so it can be released
    CHECK(writer.release_reader(1));
    send(writer, 2);
}

void closed_reader_is_not_waited_for() {
    const RingGeometry g{1, 64, 1};
    const auto segment = new_segment(g);
    RingWriter writer(segment, g, 64);
    {
        const auto reader_end = new_reader(*segment, g, 0);
        RingReader& reader = *reader_end;
        send(writer, 1);
        CHECK(writer.begin_nowait(8).status == Status::would_block);
        reader.announce_close();
    }
    send(writer, 2);
    send(writer, 3);
}

// One of five readers has left, one was released while absent, and the others give the chunk back one by one.
void only_the_last_reader_wakes_the_writer() {
    const RingGeometry g{5, 64, 1};
    const auto segment = new_segment(g);
    RingWriter writer(segment, g, 64);
    std::unique_ptr<RingReader> readers[4];
    for (std::size_t r = 0; r < 4; ++r) readers[r] = new_reader(*segment, g, r);
    CHECK(writer.release_reader(4));
    send(writer, 1);
    broadcast::RingWaits& waits = writer.ring().waits();
    core::store_relaxed<std::uint8_t>(waits.writer_parked, 1);
    readers[3]->announce_close();  // always wakes
    const std::uint32_t before = waits.consumed;
    for (std::size_t r = 0; r < 3; ++r) {
        CHECK(waits.consumed == before && waits.writer_parked == 1);
        CHECK(receive(*readers[r]) == 1);
    }
    CHECK(waits.consumed == before + 1 && waits.writer_parked == 0);
    send(writer, 2);
}

void rank_is_taken_once() {
    const RingGeometry g{1, 64, 1};
    const auto segment = new_segment(g);
    RingWriter writer(segment, g, 64);
    const auto first = new_reader(*segment, g, 0);
    bool refused = false;
    try {
        new_reader(*segment, g, 0);
    } catch (const core::RankTaken&) {
        refused = true;
    }
    CHECK(refused);
}

void foreign_chunk_has_no_descriptor() {
    const RingGeometry g{1, 64, 2};
    const auto segment = new_segment(g);
    RingWriter writer(segment, g, 64);
    const auto reader_end = new_reader(*segment, g, 0);
    RingReader& reader = *reader_end;
    for (std::uint64_t i = 0; i < 3; ++i) {  // leaves descriptors of older laps
        send(writer, i);
        receive(reader);
    }
    std::uint8_t* flags = &writer.ring().written(1);
    flags[1] = 0;
    flags[0] = 1;  // by hand, with the documented part alone
    CHECK(!must(reader.begin_nowait()).descriptor().has_value());
}

}  // namespace

int main() {
    flags_follow_the_state_table();
    laps_deliver_everything_in_order();
    a_liar_keeps_no_more_than_one();
    deadlines_end_waits_and_change_nothing();
    sleeper_is_woken();
    dead_reader_is_told_and_released();
    closed_reader_is_not_waited_for();
    only_the_last_reader_wakes_the_writer();
    rank_is_taken_once();
    foreign_chunk_has_no_descriptor();
    std::puts("ring: 9 properties hold");
}
