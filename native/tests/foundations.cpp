// The kernel guarantees that everything else relies on, tested between real processes: locks are dropped when their
// process ends, and only then, and a file works without its name.
#include <atomic>
#include <csignal>
#include <cstring>
#include <new>
#include <optional>
#include <vector>

#include "check.hpp"
#include "core/copy_together.hpp"
#include "core/liveness.hpp"
#include "core/sync.hpp"
#include "os/futex.hpp"
#include "os/mapping.hpp"
#include "os/process.hpp"
#include "os/threads.hpp"

using namespace memlane;
using testing::exit_code;
using testing::Signal;

namespace {

os::FileDescriptor new_file(std::uint64_t bytes) {
    os::FileDescriptor file = os::create_unnamed("/dev/shm");
    os::resize(file, bytes);
    CHECK(os::reserve(file, 0, bytes) == 0);
    return file;
}

// A parent takes the lock, maps the file, forks, and is killed. Its child lives on with the mapping and every inherited
// descriptor, but the lock is gone at once.
void lock_ends_with_its_process() {
    const os::FileDescriptor file = new_file(4096);
    core::LivenessLock observer(file);
    const Signal forked;
    const Signal go_on;
    const pid_t parent = ::fork();
    if (parent == 0) {
        core::LivenessLock lock(file);
        const os::Mapping mapping(file, 4096);
        CHECK(lock.take_slot(3));
        if (::fork() == 0) {
            forked.send();
            go_on.wait();  // alive, with the mapping, while the observer asks
            CHECK(mapping.base()[0] == std::byte{0});
            std::_Exit(0);
        }
        ::pause();
        std::_Exit(1);
    }
    forked.wait();
    CHECK(observer.is_held_by_other(3));
    CHECK(!observer.is_held_by_other(2));
    ::kill(parent, SIGKILL);
    CHECK(exit_code(parent) == 128 + SIGKILL);
    CHECK(!observer.is_held_by_other(3));
    go_on.send();
}

// The counterpart: a lock on the mapped descriptor itself outlives close(), so memlane never locks that one.
void lock_on_the_mapped_description_would_outlive_close() {
    const os::FileDescriptor file = new_file(4096);
    core::LivenessLock observer(file);
    os::FileDescriptor mapped = os::reopen(file);
    std::optional<os::Mapping> view(std::in_place, mapped, 4096);
    CHECK(os::try_lock(mapped, os::LockKind::exclusive, {core::kLockBase, 1}));
    mapped.close();
    CHECK(observer.is_held_by_other(0));
    view.reset();
    CHECK(!observer.is_held_by_other(0));
}

// Dropping the lock does not wait for views: the memory stays, the lock is gone.
void closing_with_a_live_view_gives_up_the_lock() {
    os::FileDescriptor file = new_file(4096);
    core::LivenessLock observer(file);
    core::LivenessLock lock(file);
    CHECK(lock.take_slot(0));
    const os::Mapping view(file, 4096);
    CHECK(observer.is_held_by_other(0));
    lock.release();
    file.close();
    CHECK(!observer.is_held_by_other(0));
    view.base()[0] = std::byte{7};
}

// A child that closes its copies, or ends, changes nothing for its parent.
void child_never_drops_the_parents_lock() {
    const os::FileDescriptor file = new_file(4096);
    core::LivenessLock observer(file);
    core::LivenessLock lock(file);
    CHECK(lock.take_slot(0));
    const pid_t child = ::fork();
    if (child == 0) {
        lock.release();
        std::_Exit(0);
    }
    CHECK(exit_code(child) == 0);
    CHECK(observer.is_held_by_other(0));
}

// A child's own lock may get the number of an inherited one, which is closed there. When the child drops the inherited
// one, its own stays closed to its children: one that lives longer does not keep the lock.
void dropping_an_inherited_lock_leaves_ones_own_alone() {
    const os::FileDescriptor file = new_file(4096);
    core::LivenessLock observer(file);
    core::LivenessLock inherited(file);
    const Signal forked;
    const Signal go_on;
    const pid_t child = ::fork();
    if (child == 0) {
        core::LivenessLock own(file);
        CHECK(own.take_slot(1));
        CHECK(own.file().get() == observer.file().get() || own.file().get() == inherited.file().get());
        inherited.release();
        observer.release();
        if (::fork() == 0) {
            forked.send();
            go_on.wait();
        }
        std::_Exit(0);
    }
    forked.wait();
    CHECK(exit_code(child) == 0);
    CHECK(!observer.is_held_by_other(1));
    go_on.send();
}

// After a file has lost its name, one process grows it, and the other sees it grown through the descriptor that it
// already has.
void nameless_file_is_seen_grown() {
    const os::FileDescriptor file = new_file(4096);
    const std::string path = "/dev/shm/memlane-test-" + std::to_string(::getpid());
    os::link_name(file, path);
    const Signal attached;
    const Signal grown;
    const pid_t reader = ::fork();
    if (reader == 0) {
        const os::FileDescriptor own = os::open_existing(path);
        const os::Mapping first(own, 4096);
        attached.send();
        grown.wait();
        CHECK(os::facts_of(own).links == 0);
        CHECK(os::facts_of(own).bytes == 3 * 4096);
        const os::Mapping whole(own, 3 * 4096);
        CHECK(std::memcmp(whole.base() + 8192, "extent", 6) == 0);
        std::_Exit(0);
    }
    attached.wait();
    os::unlink_if_same(file, path);
    CHECK(::access(path.c_str(), F_OK) != 0);
    CHECK(os::reserve(file, 4096, 8192) == 0);
    const os::Mapping whole(file, 3 * 4096);
    std::memcpy(whole.base() + 8192, "extent", 6);
    grown.send();
    CHECK(exit_code(reader) == 0);
}

void name_is_never_taken_from_another_file() {
    const os::FileDescriptor file = new_file(4096);
    const os::FileDescriptor other = new_file(4096);
    const std::string path = "/dev/shm/memlane-test-" + std::to_string(::getpid());
    os::link_name(file, path);
    bool refused = false;
    try {
        os::link_name(other, path);
    } catch (const std::system_error& e) {
        refused = e.code().value() == EEXIST;
    }
    CHECK(refused);
    os::unlink_if_same(other, path);
    CHECK(::access(path.c_str(), F_OK) == 0);
    os::unlink_if_same(file, path);
    CHECK(::access(path.c_str(), F_OK) != 0);
}

// As on machines whose pages are larger than the alignment of the offset.
void mapping_begins_anywhere() {
    const os::FileDescriptor file = new_file(3 * 4096);
    const os::Mapping whole(file, 3 * 4096);
    std::memcpy(whole.base() + 4200, "inside", 6);
    const os::Mapping part(file, 4096, 4200);
    CHECK(part.bytes() == 4096 && std::memcmp(part.base(), "inside", 6) == 0);
    part.populate(0, 4096);
    part.touch(0, 4096);
    CHECK(part.was_populated(0) && part.was_populated(4095));
    CHECK(std::memcmp(whole.base() + 4200, "inside", 6) == 0);
}

// Shared futexes work across different mappings of one file.
void futex_wakes_across_mappings() {
    const os::FileDescriptor file = new_file(4096);
    const os::Mapping ours(file, 4096);
    auto* word = reinterpret_cast<std::uint32_t*>(ours.base() + 64);
    const pid_t child = ::fork();
    if (child == 0) {
        const os::Mapping theirs(file, 4096);
        auto* same = reinterpret_cast<std::uint32_t*>(theirs.base() + 64);
        while (core::load_acquire(*same) == 0) os::futex_wait(same, 0, INT64_MAX);
        std::_Exit(0);
    }
    core::store_release(*word, 1u);
    os::futex_wake_all(word);
    CHECK(exit_code(child) == 0);
}

void process_facts_name_this_process() {
    const os::ProcessIdentity own = os::own_identity();
    CHECK(own.pid == static_cast<std::uint64_t>(::getpid()));
    CHECK(own.start_ticks > 0 && own.pid_namespace > 0);
    CHECK(os::activity_of(own) == os::Activity::running);
    os::ProcessIdentity reused = own;
    reused.start_ticks += 1;
    CHECK(os::activity_of(reused) == os::Activity::unknown);
    os::ProcessIdentity elsewhere = own;
    elsewhere.pid_namespace += 1;
    CHECK(os::activity_of(elsewhere) == os::Activity::unknown);
}

void copies_together_are_whole() {
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{4097}, std::size_t{1} << 20, (std::size_t{9} << 20) + 13}) {
        for (const std::size_t shift : {0, 1, 63}) {
            std::vector<std::byte> from(bytes + 64), to(bytes + 64, std::byte{0xee});
            for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 31 + (i >> 12));
            core::CopyTogether::copy(to.data() + shift, from.data() + 1, bytes);
            CHECK(std::memcmp(to.data() + shift, from.data() + 1, bytes) == 0);
            for (std::size_t i = 0; i < to.size(); ++i)
                if (i < shift || i >= shift + bytes) CHECK(to[i] == std::byte{0xee});
        }
    }
}

// Copies of it cost memory, of which there is none after so many.
struct Scarce {
    std::atomic<int>& left;
    std::atomic<int>& ran;
    Scarce(std::atomic<int>& most, std::atomic<int>& count) : left(most), ran(count) {}
    Scarce(const Scarce& other) : left(other.left), ran(other.ran) {
        if (left.fetch_sub(1) <= 0) throw std::bad_alloc();
    }
    Scarce(Scarce&&) = default;
    void operator()() const { ran.fetch_add(1); }
};

void helpers_are_fewer_without_memory() {
    std::atomic<int> left{2}, ran{0};
    os::Helpers helpers(4, Scarce(left, ran));
    CHECK(helpers.started() == 2 && helpers.missing() == 2);
    helpers.join();
    CHECK(ran == 2);
}

}  // namespace

int main() {
    lock_ends_with_its_process();
    lock_on_the_mapped_description_would_outlive_close();
    closing_with_a_live_view_gives_up_the_lock();
    child_never_drops_the_parents_lock();
    dropping_an_inherited_lock_leaves_ones_own_alone();
    nameless_file_is_seen_grown();
    name_is_never_taken_from_another_file();
    mapping_begins_anywhere();
    futex_wakes_across_mappings();
    process_facts_name_this_process();
    copies_together_are_whole();
    helpers_are_fewer_without_memory();
    std::puts("foundations: 12 proofs hold");
}
