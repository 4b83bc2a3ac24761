// Which messages wait for each other, for how long, and what their frame is. In virtual time.
#include "broadcast/frame_batch.hpp"

#include <string>

#include "check.hpp"

using memlane::broadcast::FrameBatch;
using memlane::broadcast::MessageFrame;
using memlane::os::Nanoseconds;

namespace {

constexpr Nanoseconds kMicrosecond = 1000;
constexpr int kMany = 1 << 20;

struct Sender {
    FrameBatch batch{std::string(MessageFrame::kHeaderBytes, '-')};
    Nanoseconds now = 1'000'000 * kMicrosecond;

    // The decision: it waits, is sent with what waits, or by itself.
    char send(Nanoseconds pause, std::size_t bytes = 100) {
        now += pause;
        if (!batch.is_stream(now) || !batch.fits(bytes)) return 'a';
        return batch.add(4, std::string(bytes, 'x')) ? 's' : 'w';
    }
    // A stream, as long as it takes.
    void stream(int messages = FrameBatch::kStream) {
        for (int i = 0; i < messages; ++i) send(kMicrosecond);
        batch.clear();
    }
};

void a_burst_does_not_wait() {
    Sender sender;
    sender.batch.open(0, kMany, kMany, sender.now);
    for (int burst = 0; burst < 100; ++burst)
        for (int i = 0; i < FrameBatch::kStream - FrameBatch::kStream / 3; ++i)
            CHECK(sender.send(i == 0 ? 1000 * kMicrosecond : kMicrosecond) == 'a');
    for (int i = 0; i < 1000; ++i) CHECK(sender.send(FrameBatch::kClose + 1) == 'a');
}

void nobody_waits_longer_than_that() {
    for (const Nanoseconds pause : {1, 7, 20, 40, 49}) {
        Sender sender;
        sender.batch.open(0, kMany, kMany, sender.now);
        sender.stream();
        Nanoseconds first = 0;
        int frames = 0;
        for (int i = 0; i < 2000; ++i) {
            if (sender.batch.count() == 0) first = sender.now + pause * kMicrosecond;
            const char fate = sender.send(pause * kMicrosecond, 20);
            CHECK(fate != 'a');
            CHECK(sender.now - first <= FrameBatch::kLongest);
            CHECK(sender.batch.until() == first + FrameBatch::kLongest);
            if (fate == 's') {
                ++frames;
                sender.batch.clear();
            }
        }
        CHECK(frames > 10);
    }
}

void a_pause_does_not_end_a_long_stream() {
    Sender sender;
    sender.batch.open(0, kMany, kMany, sender.now);
    sender.stream(2000);
    CHECK(sender.send(5000 * kMicrosecond) == 's');  // the next one would come too late, as far as can be known
    sender.batch.clear();
    CHECK(sender.send(kMicrosecond) == 'w');
    sender.batch.clear();
    for (int i = 0; i < 4; ++i) sender.send(5000 * kMicrosecond);
    CHECK(sender.send(kMicrosecond) == 'a');
}

void a_frame_has_what_it_says() {
    Sender sender;
    sender.batch.open(7, kMany, kMany, sender.now);
    sender.stream();
    const std::uint64_t first = sender.batch.first();
    int count = 0;
    while (sender.send(kMicrosecond, 1000) == 'w') ++count;
    CHECK(sender.batch.count() == static_cast<std::uint64_t>(count) + 1);
    CHECK(sender.batch.size() == 1000u * (count + 1));
    const std::string frame{sender.batch.frame()};
    CHECK(frame.size() <= FrameBatch::kFrameBytes);
    CHECK(frame.size() == (count + 1) * (1000 + MessageFrame::kHeaderBytes));
    for (int i = 0; i <= count; ++i) {
        const char* const at = frame.data() + i * (1000 + MessageFrame::kHeaderBytes);
        std::uint64_t sequence = 0, bytes = 0;
        std::memcpy(&sequence, at + MessageFrame::kSequenceAt, sizeof sequence);
        std::memcpy(&bytes, at + MessageFrame::kBytesAt, sizeof bytes);
        CHECK(sequence == first + i);
        CHECK(bytes == 1000);
        CHECK(at[MessageFrame::kKindAt] == 4);
        CHECK(std::string(at + MessageFrame::kHeaderBytes, 1000) == std::string(1000, 'x'));
    }
    sender.batch.clear();
    CHECK(sender.batch.first() == first + count + 1);
    CHECK(sender.batch.frame().empty());
}

void no_more_than_there_is_room_for() {
    Sender sender;
    sender.batch.open(0, kMany, kMany, sender.now);
    sender.stream();
    sender.batch.open(0, 3, kMany, sender.now);
    CHECK(sender.send(kMicrosecond) == 'w');
    CHECK(sender.send(kMicrosecond) == 'w');
    CHECK(sender.send(kMicrosecond) == 's');
    CHECK(sender.send(kMicrosecond) == 'a');
    sender.batch.clear();
    sender.batch.open(0, kMany, 250, sender.now);
    CHECK(sender.send(kMicrosecond) == 'w');
    CHECK(sender.send(kMicrosecond) == 's');  // there is no room for another one like it
    CHECK(sender.send(kMicrosecond, 51) == 'a');
    sender.batch.shut();
    CHECK(sender.send(kMicrosecond, 1) == 'a');
    CHECK(sender.batch.count() == 2);
}

}  // namespace

int main() {
    a_burst_does_not_wait();
    nobody_waits_longer_than_that();
    a_pause_does_not_end_a_long_stream();
    a_frame_has_what_it_says();
    no_more_than_there_is_room_for();
}
