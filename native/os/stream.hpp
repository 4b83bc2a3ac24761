// Reading from a socket that does not block, until a deadline.
#pragma once

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <span>

#include "os/clock.hpp"

namespace memlane::os {

// How many bytes came, at least one, into these pieces of memory; 0: the other side has closed it; -1: errno says why not,
// ETIMEDOUT at the deadline.
inline std::ptrdiff_t receive(int socket, std::span<iovec> into, Deadline deadline) noexcept {
    msghdr message{};
    message.msg_iov = into.data();
    message.msg_iovlen = into.size();
    for (;;) {
        if (deadline.passed(monotonic_now())) {  // also if there is always more to read
            errno = ETIMEDOUT;
            return -1;
        }
        const ssize_t got = ::recvmsg(socket, &message, MSG_DONTWAIT);
        if (got >= 0) return got;
        if (errno == EINTR) continue;
        if (errno != EAGAIN) return -1;
        const Nanoseconds left = std::max<Nanoseconds>(0, deadline.at() - monotonic_now());
        constexpr Nanoseconds kLongest = 60 * kSecond;
        pollfd ready{socket, POLLIN, 0};
        ::poll(&ready, 1, static_cast<int>((std::min(left, kLongest) + kMillisecond - 1) / kMillisecond));
    }
}

}  // namespace memlane::os
