// Ends that a thread watches: their descriptors are readable exactly while a call would not wait, and nothing is lost.
#include "core/watcher.hpp"

#include <poll.h>

#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "rings.hpp"

using namespace memlane;
using core::Watch;
using testing::keep_waiting;

namespace {

constexpr int kPatience = 180'000;  // milliseconds

bool is_readable(const Watch& watch, int milliseconds) {
    pollfd asked{watch.fd(), POLLIN, 0};
    return ::poll(&asked, 1, milliseconds) == 1;
}

struct Pair {
    explicit Pair(std::uint64_t chunks)
        : geometry{1, 64, chunks},
          segment(testing::new_segment(geometry)),
          writer(segment, geometry, 64),
          reader(segment->join_same_mapping(1), geometry, 0, 0, 64) {}

    broadcast::RingGeometry geometry;
    std::shared_ptr<core::Segment> segment;
    broadcast::RingWriter writer;
    broadcast::RingReader reader;
};

// Both ends are watched, and call only when their descriptors say so; every tenth call of the reader blocks instead.
void messages(std::uint64_t count, std::uint64_t chunks) {
    Pair ends(chunks);
    std::thread writing([&] {
        Watch watch(ends.writer);
        watch.resume();
        for (std::uint64_t value = 1; value <= count;) {
            CHECK(is_readable(watch, kPatience));
            watch.pause();
            for (;;) {
                auto claim = ends.writer.begin_nowait(sizeof value);
                if (!claim.loan) break;
                testing::put(std::move(*claim.loan), value);
                if (++value > count) break;
            }
            watch.resume();
        }
    });
    Watch watch(ends.reader);
    watch.resume();
    for (std::uint64_t expected = 1; expected <= count;) {
        if (expected % 10 == 0) {
            watch.pause();
            auto sample = ends.reader.begin(os::Deadline::never(), keep_waiting);
            CHECK(testing::take(std::move(*sample.loan)) == expected++);
        } else {
            CHECK(is_readable(watch, kPatience));
            watch.pause();
            auto sample = ends.reader.begin_nowait();
            if (sample.loan) CHECK(testing::take(std::move(*sample.loan)) == expected++);
        }
        watch.resume();
    }
    writing.join();
    CHECK(!is_readable(watch, 0));
    ends.writer.announce_close();
    CHECK(is_readable(watch, kPatience));
}

// More ends than one thread takes; they come and go.
void many(std::size_t count) {
    std::vector<std::unique_ptr<Pair>> pairs;
    std::vector<std::unique_ptr<Watch>> watches;
    for (std::size_t i = 0; i < count; ++i) {
        pairs.push_back(std::make_unique<Pair>(2));
        watches.push_back(std::make_unique<Watch>(pairs.back()->reader));
        watches.back()->resume();
    }
    for (std::size_t round = 0; round < 3; ++round) {
        for (std::size_t i = 0; i < count; ++i) {
            CHECK(!is_readable(*watches[i], 0));
            testing::put(testing::must(pairs[i]->writer.begin_nowait(sizeof i)), i);
            CHECK(is_readable(*watches[i], kPatience));
            watches[i]->pause();
            CHECK(testing::take(testing::must(pairs[i]->reader.begin_nowait())) == i);
            if ((i + round) % 3 == 0) {
                watches[i]->leave();
                CHECK(is_readable(*watches[i], 0));
                watches[i] = std::make_unique<Watch>(pairs[i]->reader);
            }
            watches[i]->resume();
        }
    }
    for (auto& watch : watches) watch->leave();
}

}  // namespace

int main(int argc, char** argv) {
    const std::uint64_t count = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20'000;
    messages(count, 1);
    messages(count, 4);
    many(150);
}
