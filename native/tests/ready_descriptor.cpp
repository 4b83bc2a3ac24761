// The descriptor for select and epoll: readable from the event or the deadline on, quiet once somebody has looked.
#include "core/ready_descriptor.hpp"

#include <poll.h>

#include "check.hpp"

using memlane::core::ReadyDescriptor;
using memlane::os::Deadline;
using memlane::os::monotonic_now;
using memlane::os::Nanoseconds;

namespace {

constexpr Nanoseconds kMicrosecond = 1000;

bool is_readable(const ReadyDescriptor& ready, int milliseconds) {
    pollfd asked{ready.fd(), POLLIN, 0};
    return ::poll(&asked, 1, milliseconds) == 1;
}

void says_what_is_ready() {
    ReadyDescriptor ready;
    CHECK(!is_readable(ready, 0));
    ready.set();
    ready.set();
    CHECK(is_readable(ready, 0));
    ready.take();
    CHECK(!is_readable(ready, 0));
}

void says_when_a_deadline_passes() {
    ReadyDescriptor ready;
    ready.set_at(Deadline::after(1'000'000 * kMicrosecond));
    ready.set_at(Deadline::after(kMicrosecond));  // the earlier one does not count any more
    CHECK(is_readable(ready, 500));
    ready.take();
    CHECK(!is_readable(ready, 0));
    ready.set_at(Deadline::after(kMicrosecond));
    CHECK(is_readable(ready, 500));
    ready.set_at(Deadline::never());
    CHECK(!is_readable(ready, 0));
}

// The clock may say it before the timer does.
void is_quiet_after_a_deadline_that_was_seen() {
    ReadyDescriptor ready;
    for (int round = 0; round < 2000; ++round) {
        const Deadline end = Deadline::after((5 + round % 50) * kMicrosecond);
        ready.set_at(end);
        while (!end.passed(monotonic_now())) {
        }
        ready.take();
        CHECK(!is_readable(ready, round % 100 == 0 ? 2 : 0));
        CHECK(!is_readable(ready, 0));
    }
}

}  // namespace

int main() {
    says_what_is_ready();
    says_when_a_deadline_passes();
    is_quiet_after_a_deadline_that_was_seen();
}
