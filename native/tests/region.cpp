// A region shared by holders in one process: which one creates it, waits, takes over, removes the name. Also run under
// ThreadSanitizer, which sees the threads that populate, but not the locks, because these are the kernel's.
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "check.hpp"
#include "offload/population.hpp"
#include "offload/region_file.hpp"
#include "os/free_memory.hpp"

using namespace memlane;
using namespace memlane::offload;

namespace {

constexpr os::Nanoseconds kSlice = 100 * os::kMillisecond;
constexpr RegionGeometry kShape{24 * (1u << 20) + 5, 6, 4u << 20, 1u << 20};

std::string name() { return "memlane-test-region-" + std::to_string(os::own_pid()); }

std::shared_ptr<RegionFile> holder(const RegionGeometry& g = kShape) {
    return std::make_shared<RegionFile>("/dev/shm", name(), g);
}

bool is_named() { return ::access(("/dev/shm/" + name()).c_str(), F_OK) == 0; }

void finish(Population& population) {
    for (;;) {
        const Progress state = population.wait(kSlice);
        if (state == Progress::done) return;
    }
}

// A range without gaps is divided into pieces, from its start to its end; one with gaps into its cells.
void parts_to_populate() {
    const Cells run = Cells::of(5, 100 * (1u << 20), 100 * (1u << 20), 1);
    CHECK(run.count == 4 && run.begin_of(0) == 5 && run.end_of(3) == 100 * (1u << 20) + 5);
    CHECK(run.sum() == 100 * (1u << 20));
    CHECK(Cells::of(0, 4096, 4096, 3).count == 1);
    const Cells cells = Cells::of(4096, 100, 8192, 3);
    CHECK(cells.count == 3 && cells.begin_of(2) == 4096 + 2 * 8192 && cells.sum() == 300);
    CHECK(Cells::of(77, 0, 0, 0).sum() == 0 && Cells::of(77, 0, 0, 0).count == 0);
}

// Every huge page earns what its bytes cost in small pages; 2 % of what all cost may be lost before the rest is small.
void huge_pages_that_pay() {
    constexpr std::uint64_t kPages = 1000;
    HugePageAccount account(100, kPages * os::kHugePage);  // may lose 2,000 ns
    for (int i = 0; i < 10; ++i) account.note(30, true);
    CHECK(account.pays());  // 700 gained
    for (int i = 0; i < 27; ++i) account.note(200, true);
    CHECK(account.pays());  // 2,000 lost
    account.note(1, false);
    CHECK(!account.pays());
}

// Blocks of 2 MiB, and of 4, in all zones.
void free_huge_pages_are_counted() {
    CHECK(os::free_huge_pages_in("") == 0);
    CHECK(os::free_huge_pages_in("Node 0, zone      DMA      1      1\n") == 0);
    CHECK(os::free_huge_pages_in("Node 0, zone      DMA      9      9      9      9      9      9      9      9      9      1      3 \n"
                             "Node 1, zone   Normal     10  20 0 0 0 0 0 0 0  5  230\n") == 1 + 2 * 3 + 5 + 2 * 230);
}

// What memlane.offload._start does; true for the creator.
bool start(const std::shared_ptr<RegionFile>& file, std::uint64_t worker, std::uint64_t participants, Pages pages) {
    Entry entry;
    while ((entry = file->enter(kSlice)) == Entry::waiting || entry == Entry::foreign) {
    }
    Space space;
    while ((space = file->await_space(kSlice)) == Space::waiting) {
    }
    const bool builds = space == Space::build;
    file->map();
    const Cells cells = Cells::of(worker * kShape.cell_bytes, kShape.cell_bytes, kShape.row_bytes, kShape.blocks);
    Population population(file, cells, builds, pages, 3);
    finish(population);
    CHECK(population.done() == population.bytes());
    if (builds) file->publish(population.huge_pages());
    while (file->mark_mapped(participants, kSlice) == Naming::waiting) {
    }
    return entry == Entry::created;
}

// Holders start at once, in threads: one creates, all see the same bytes, and the last to leave removes the name.
void holders_at_once(std::uint64_t participants, Pages pages) {
    std::vector<std::shared_ptr<RegionFile>> files;
    for (int i = 0; i < 4; ++i) files.push_back(holder());
    std::atomic<int> creators{0};
    std::vector<std::thread> threads;
    for (std::size_t i = 0; i < files.size(); ++i)
        threads.emplace_back([&, i] { creators += start(files[i], i, participants, pages); });
    for (std::thread& thread : threads) thread.join();
    CHECK(creators == 1);
    CHECK(is_named() == (participants == 0));
    files[0]->mapping()->base()[kShape.total_bytes - 1] = std::byte{7};
    for (const auto& file : files) {
        CHECK(file->mapping()->base()[kShape.total_bytes - 1] == std::byte{7});
        CHECK(os::facts_of(file->file()).allocated >= kShape.total_bytes);
        CHECK(file->huge_pages() == files[0]->huge_pages());
    }
    threads.clear();
    for (const auto& file : files)
        threads.emplace_back([&file] { CHECK(file->leave(os::kSecond).problem.empty()); });
    for (std::thread& thread : threads) thread.join();
    CHECK(!is_named());
}

// The builder leaves before it has reserved the space, and the waiting holder continues with the same file.
void a_waiter_takes_over() {
    const auto first = holder(), second = holder();
    CHECK(first->enter(0) == Entry::created);
    CHECK(first->await_space(0) == Space::build);
    CHECK(second->enter(0) == Entry::joined);
    CHECK(second->await_space(0) == Space::waiting);
    CHECK(second->builder() == os::own_pid());
    std::thread leaver([&] { CHECK(!first->leave(os::kSecond).removed_name); });
    while (second->await_space(kSlice) != Space::build) {
    }
    leaver.join();
    CHECK(is_named());
    CHECK(second->leave(os::kSecond).removed_name);
}

// Stopping a population halfway ends its threads; the space that it reserved is freed with the file.
void a_population_is_stopped() {
    const auto file = holder();
    CHECK(file->enter(0) == Entry::created);
    CHECK(file->await_space(0) == Space::build);
    file->map();
    Population population(file, Cells::run(0, kShape.total_bytes), true, Pages::small, 3);
    population.stop();
    CHECK(population.done() <= kShape.total_bytes);
}

void another_geometry_is_refused() {
    const auto file = holder();
    CHECK(file->enter(0) == Entry::created);
    for (std::size_t i = 0; i < 4; ++i) {
        auto numbers = kShape.numbers();
        ++numbers[i];
        bool refused = false;
        try {
            holder({numbers[0], numbers[1], numbers[2], numbers[3]})->enter(0);
        } catch (const core::LayoutMismatch&) {
            refused = true;
        }
        CHECK(refused);
    }
}

// Touching every page keeps its contents, even those written at the same time.
void touching_keeps_what_is_there() {
    const os::FileDescriptor file = os::create_unnamed("/dev/shm");
    constexpr std::size_t bytes = 64 * 4096;
    CHECK(os::reserve(file, 0, bytes) == 0);
    const os::Mapping mapping(file, bytes);
    std::memset(mapping.base(), 5, bytes);
    std::atomic<bool> over{false};
    std::thread writer([&] {
        std::atomic_ref<unsigned char> first(reinterpret_cast<unsigned char&>(mapping.base()[4096]));
        for (int i = 0; !over; ++i) {
            const auto value = static_cast<unsigned char>(i);
            first.store(value);
            CHECK(first.load() == value);
        }
    });
    for (int i = 0; i < 200; ++i) mapping.touch(0, bytes);
    over = true;
    writer.join();
    for (std::size_t i = 0; i < bytes; ++i) CHECK(i == 4096 || mapping.base()[i] == std::byte{5});
}

}  // namespace

int main() {
    for (int i = 0; i < 10; ++i) {
        holders_at_once(0, Pages::small);
        holders_at_once(4, Pages::huge);
    }
    a_waiter_takes_over();
    a_population_is_stopped();
    another_geometry_is_refused();
    touching_keeps_what_is_there();
    parts_to_populate();
    huge_pages_that_pay();
    free_huge_pages_are_counted();
    CHECK(!is_named());
    return 0;
}
