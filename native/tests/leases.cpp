// Leases in a process that forks, whose memory is locked, and whose descriptors somebody else closes: what a lease
// shows never changes, and a new one shows the message.
#include <fcntl.h>
#include <sys/wait.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <string>
#include <thread>

#include "check.hpp"
#include "rings.hpp"

using namespace memlane;
using testing::exit_code;
using testing::Lent;

namespace {

std::atomic<long> allocations_left = -1;  // until one fails; negative: none does

void* allocate(std::size_t bytes) {
    const long left = allocations_left.load();
    if (left > 0) --allocations_left;
    void* const memory = left == 0 ? nullptr : std::malloc(bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

bool shows(const broadcast::Lease& lease, const Lent& lent, unsigned char value) {
    const std::byte* const memory = lease.memory();
    return std::all_of(memory, memory + lent.text.size(), [&](std::byte byte) { return byte == std::byte{value}; });
}

// Copies the pages of a message that nobody keeps any more, as mlock() does with what is locked beside an array.
void copy_what_nobody_uses(Lent& lent) {
    CHECK(lent.send(77) == lent.segment->bytes());
    auto first = lent.take();
    std::byte* const memory = first->memory();
    first.reset();
    for (std::byte* at = memory; at < memory + lent.text.size(); at += core::kPage) at[1] = std::byte{66};
}

void pages_that_nobody_used_are_dropped() {
    Lent lent;
    copy_what_nobody_uses(lent);
    lent.send(1);
    CHECK(shows(*lent.take(), lent, 1));
}

// Another thread forks while the pages that nobody used are dropped. The lease's copies, which a fork makes, are not
// among them.
void fork_while_a_lease_begins(int round) {
    Lent lent(32u << 20, 128u << 20);
    copy_what_nobody_uses(lent);
    const std::uint64_t first = lent.send(1);
    std::atomic<bool> begins = false;
    std::thread forking([&] {
        begins.wait(false);
        const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(10 * round);
        while (std::chrono::steady_clock::now() < end) {
        }
        const pid_t child = ::fork();
        if (child == 0) std::_Exit(0);
        CHECK(exit_code(child) == 0);
    });
    begins = true;
    begins.notify_one();
    const auto kept = lent.take();
    forking.join();
    lent.reader.own_leases();
    lent.reader.announce_close();
    CHECK(lent.send(2) == first);
    CHECK(shows(*kept, lent, 1));
}

int descriptor_of_pagemap() {
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code gone;
        if (std::filesystem::read_symlink(entry, gone).string().ends_with("/pagemap")) return std::stoi(entry.path().filename());
    }
    return -1;
}

// A program that closes descriptors it does not own, and one that opens a file of its own under the same number.
void descriptor_that_somebody_closes(bool is_reused, int messages) {
    int number = -1;
    {
        Lent lent;
        copy_what_nobody_uses(lent);
        number = descriptor_of_pagemap();
        CHECK(number >= 0);
        if (is_reused) {
            const os::FileDescriptor zero = os::try_open("/dev/zero", O_RDONLY);  // as pagemap: no page is a copy
            CHECK(::dup2(zero.get(), number) == number);
        } else {
            ::close(number);
        }
        for (int i = 1; i <= messages; ++i) {
            const auto value = static_cast<unsigned char>(i);
            lent.send(value);
            const auto kept = lent.take();
            CHECK(shows(*kept, lent, value));
            CHECK(descriptor_of_pagemap() >= 0);  // it is opened again
            kept->memory()[core::kPage] = std::byte{99};
        }
    }
    CHECK(!is_reused || ::close(number) == 0);  // it was left open
    CHECK(descriptor_of_pagemap() == -1);
}

// It has a page table of its own.
void child_does_not_inherit_pagemap() {
    Lent lent;
    lent.send(1);
    const auto kept = lent.take();
    CHECK(descriptor_of_pagemap() >= 0);
    const pid_t child = ::fork();
    if (child == 0) std::_Exit(descriptor_of_pagemap() == -1 ? 0 : 1);
    CHECK(exit_code(child) == 0);
}

// There is a lease, or none, or an error that says so.
void memory_is_short() {
    for (int enough = 0; enough < 12; ++enough) {
        Lent lent;
        lent.send(1);
        auto sample = testing::must(lent.reader.begin_nowait());
        const auto descriptor = *sample.descriptor();
        std::unique_ptr<broadcast::Lease> kept;
        allocations_left = enough;
        try {
            kept = sample.lease(descriptor);
        } catch (const std::bad_alloc&) {
        }
        allocations_left = -1;
        CHECK(enough < 11 || kept != nullptr);
        CHECK(kept == nullptr || shows(*kept, lent, 1));
    }
}

}  // namespace

void* operator new(std::size_t bytes) { return allocate(bytes); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

int main() {
    pages_that_nobody_used_are_dropped();
#ifndef MEMLANE_EMULATED  // qemu-user answers MADV_POPULATE_WRITE without doing it
    for (int round = 0; round < 20; ++round) fork_while_a_lease_begins(round);
#endif
    for (const int messages : {0, 3})
        for (const bool is_reused : {false, true}) descriptor_that_somebody_closes(is_reused, messages);
    child_does_not_inherit_pagemap();
    memory_is_short();
    std::puts("leases: nothing that is kept changes");
}
