// Orders of steps that would occur by chance once in a million runs, forced through the SYNC hooks.
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "rings.hpp"

using namespace memlane;
using namespace memlane::testing;
using core::Status;

namespace {

std::map<std::string, std::function<void()>> at_point;  // each runs once, when its point is next reached

void hook(const char* point) {
    const auto found = at_point.find(point);
    if (found == at_point.end()) return;
    const auto action = std::move(found->second);
    at_point.erase(found);
    action();
}

struct Pair {
    RingGeometry geometry{1, 64, 1};
    std::shared_ptr<core::Segment> segment = new_segment(geometry);
    RingWriter writer{segment, geometry, 64};
    std::unique_ptr<RingReader> reader_end = new_reader(*segment, geometry, 0);
    RingReader& reader = *reader_end;

    void send(std::uint64_t value) { put(must(writer.begin_nowait(8)), value); }
};

// The reader polls right before each of the writer's stores: it must see nothing until `publish`.
void nothing_is_seen_before_publish() {
    for (const char* point : {"retract.store", "reset.store", "publish.store"}) {
        Pair pair;
        pair.send(1);
        must(pair.reader.begin_nowait()).finish(8);
        bool looked = false;
        at_point[point] = [&] {
            looked = true;
            CHECK(pair.reader.begin_nowait().status == Status::would_block);
        };
        pair.send(2);
        CHECK(looked);
        CHECK(must(pair.reader.begin_nowait()).descriptor()->length == 8);
    }
}

// The writer does a whole lap between the reader's two loads: the message still arrives once and whole.
void turn_between_the_readers_two_loads() {
    for (const char* point : {"reset.load", "publish.load"}) {
        Pair pair;
        bool sent = false;
        at_point[point] = [&] {
            sent = true;
            pair.send(5);
        };
        auto first = pair.reader.begin_nowait();
        CHECK(sent);
        if (first.status != Status::ok) first.loan.emplace(must(pair.reader.begin_nowait()));
        first.loan->finish(8);
        CHECK(pair.reader.begin_nowait().status == Status::would_block);
    }
}

// True if `wait` ends before the slice that would rescue a lost wake-up. A busy machine may take as long once, not always.
template <class Wait>
bool is_woken(Wait wait) {
    for (int tries = 0; tries < 50; ++tries) {
        const os::Nanoseconds before = os::monotonic_now();
        wait();
        if (os::monotonic_now() - before < core::kSlice) return true;
    }
    return false;
}

// A message arrives when the reader has found nothing and is about to set `parked`, before and after it reads the word.
void no_wake_up_is_lost() {
    for (const char* point : {"wake.load", "park.store"}) {
        CHECK(is_woken([&] {
            Pair pair;
            bool sent = false;
            at_point[point] = [&] {
                sent = true;
                pair.send(6);
            };
            CHECK(pair.reader.begin(os::Deadline::never(), keep_waiting).status == Status::ok);
            CHECK(sent);
        }));
    }
}

// The same for the writer: the chunk is given back when the writer is about to sleep.
void no_wake_up_of_the_writer_is_lost() {
    for (const char* point : {"wake.load", "park.store"}) {
        CHECK(is_woken([&] {
            Pair pair;
            pair.send(1);
            at_point[point] = [&] {
                must(pair.reader.begin_nowait()).finish(8);
            };
            CHECK(pair.writer.begin(8, os::Deadline::never(), keep_waiting).status == Status::ok);
        }));
    }
}

// Two readers are last at once: each has given the chunk back before either checks the other. One of them wakes.
void one_of_two_last_readers_wakes() {
    const RingGeometry geometry{2, 64, 1};
    const auto segment = new_segment(geometry);
    RingWriter writer(segment, geometry, 64);
    const auto one = new_reader(*segment, geometry, 0);
    const auto other = new_reader(*segment, geometry, 1);
    must(writer.begin_nowait(8)).publish(ChunkKind::object, 8);
    auto one_sample = must(one->begin_nowait());
    auto other_sample = must(other->begin_nowait());
    broadcast::RingWaits& waits = writer.ring().waits();
    core::store_relaxed<std::uint8_t>(waits.writer_parked, 1);
    const std::uint32_t before = waits.consumed;
    at_point["park.load"] = [&] { other_sample.finish(8); };
    one_sample.finish(8);
    CHECK(waits.consumed > before && waits.writer_parked == 0);
}

// The writer sends its last message and ends after the reader has found nothing, before it checks the writer.
void what_was_sent_comes_before_the_end() {
    for (const char* point : {"join.load", "leave.load"}) {
        for (const bool dies : {true, false}) {
            Pair pair;
            at_point[point] = [&] {
                pair.send(7);
                if (dies) {
                    pair.segment->lock().release();  // as the kernel does
                } else {
                    pair.writer.announce_close();
                }
            };
            const os::Deadline now = os::Deadline::after(0);
            must(pair.reader.begin(now, keep_waiting)).finish(8);
            const Status end = dies ? Status::peer_died : Status::peer_closed;
            CHECK(pair.reader.begin(now, keep_waiting).status == end);
        }
    }
}

// The writer sends right before the reader marks the extent, before it gives the chunk back, and before it clears the
// mark: an extent is not written to while it is lent, and is used again afterwards.
void lent_extent_is_not_written_to() {
    Lent lent;
    const std::uint64_t first = lent.send(1);
    for (const char* point : {"lease.store", "consume.store"})
        at_point[point] = [&] { CHECK(lent.writer.begin_nowait(0).status == Status::would_block); };
    auto kept = lent.take();
    const std::uint64_t second = lent.send(2);
    CHECK(second != first && kept->memory()[0] == std::byte{1});
    kept->memory()[core::kPage] = std::byte{9};  // its own
    const auto other = lent.take();
    std::uint64_t third = 0;
    at_point["drop.store"] = [&] { third = lent.send(3); };
    kept.reset();
    CHECK(third != first && third != second && other->memory()[0] == std::byte{2});
    const auto last = lent.take();
    CHECK(lent.send(4) == first);
    const auto again = lent.take();
    CHECK(again->memory()[0] == std::byte{4} && again->memory()[core::kPage] == std::byte{4});
}

// The reader ends while the writer looks for leases: by then the reader's leases are copies.
[[maybe_unused]] void lease_of_a_reader_that_ends_is_a_copy() {
    Lent lent;
    const std::uint64_t first = lent.send(1);
    const auto kept = lent.take();
    at_point["lease.load"] = [&] {
        lent.reader.own_leases();
        lent.reader.announce_close();
    };
    CHECK(lent.send(2) == first);
    CHECK(kept->memory()[0] == std::byte{1} && kept->memory()[2 * core::kPage - 1] == std::byte{1});
}

// A sweep locks the place and removes the name during an attach: the error is a missing segment, not a taken place.
void place_that_a_sweep_holds_is_not_taken() {
    const RingGeometry geometry{1, 64, 1};
    const core::SegmentId id = new_id();
    const std::string name = "memlane-test-" + std::to_string(::getpid()) + "-swept";
    const auto segment = core::Segment::create(broadcast::plan_of(geometry), id, name, {{0, geometry.total_bytes()}}, 0);
    core::LivenessLock sweep(segment->file());
    at_point["header.load"] = [&] {
        CHECK(sweep.take_slot(1));
        segment->remove_name();
    };
    bool is_missing = false;
    try {
        core::Segment::attach(name, broadcast::plan_of(geometry), id, 1);
    } catch (const core::SegmentMissing&) {
        is_missing = true;
    }
    CHECK(is_missing);
}

// The mistake that the documented order prevents: the reader's flag is reset before the data is there.
void wrong_order_is_caught() {
    Pair pair;
    pair.send(1);
    must(pair.reader.begin_nowait()).finish(8);
    std::uint8_t* flags = &pair.writer.ring().written(0);
    flags[1] = 0;  // a writer that resets the flags while `written` is still 1 ...
    CHECK(pair.reader.begin_nowait().status == Status::ok);  // ... shows the reader its old message again
}

}  // namespace

int main() {
    core::sync_hook.store(hook);
    nothing_is_seen_before_publish();
    turn_between_the_readers_two_loads();
    no_wake_up_is_lost();
    no_wake_up_of_the_writer_is_lost();
    one_of_two_last_readers_wakes();
    what_was_sent_comes_before_the_end();
    lent_extent_is_not_written_to();
#ifndef MEMLANE_EMULATED  // qemu-user answers MADV_POPULATE_WRITE without doing it
    lease_of_a_reader_that_ends_is_a_copy();
#endif
    place_that_a_sweep_holds_is_not_taken();
    wrong_order_is_caught();
    CHECK(at_point.empty());
    std::puts("interleavings: 20 forced orders hold");
}
