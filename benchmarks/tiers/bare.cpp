// What the hardware allows: a packed file, CRC-32C, no index, no deadlines. `bare FILE ROW_BYTES ROWS DIRECT THREADS`
// prints "store MB/s load MB/s" for each pass that standard input asks for, a line each.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "tiers/crc32c.hpp"
#include "tiers/disk_work.hpp"

using memlane::tiers::Crc32c;
using memlane::tiers::Staging;

namespace {

void check(bool is_good) {
    if (!is_good) {
        std::perror("bare");
        std::exit(1);
    }
}

template <class Work>
double seconds(std::size_t rows, int threads, const Work& work) {
    const auto began = std::chrono::steady_clock::now();
    std::atomic<std::size_t> next{0};
    std::vector<std::thread> all;
    for (int i = 0; i < threads; ++i)
        all.emplace_back([&] {
            for (std::size_t row; (row = next.fetch_add(1)) < rows;) work(row);
        });
    for (std::thread& each : all) each.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

}  // namespace

int main(int, char** given) {
    const std::size_t bytes = std::stoul(given[2]), rows = std::stoul(given[3]);
    const bool direct = std::stoi(given[4]) != 0;
    const int threads = std::stoi(given[5]);
    const int file = ::open(given[1], O_RDWR | O_CREAT | (direct ? O_DIRECT : 0), 0600);
    check(file >= 0);
    check(::fallocate(file, 0, 0, static_cast<off_t>(bytes * rows)) == 0);
    const Staging memory(bytes * rows);
    for (std::size_t i = 0; i < bytes * rows; i += 8) {
        const std::uint64_t word = i * 0x9e3779b97f4a7c15;
        std::memcpy(memory.data() + i, &word, sizeof word);
    }
    std::vector<std::uint32_t> sums(rows);
    const auto row = [&](std::size_t at) { return std::span<std::byte>(memory.data() + at * bytes, bytes); };
    while (std::getchar() == '\n') {
        const double store = seconds(rows, threads, [&](std::size_t at) {
            sums[at] = Crc32c::of(row(at));
            const auto offset = static_cast<off_t>(at * bytes);
            check(::pwrite(file, row(at).data(), bytes, offset) == static_cast<ssize_t>(bytes));
        });
        const double load = seconds(rows, threads, [&](std::size_t at) {
            const auto offset = static_cast<off_t>(at * bytes);
            check(::pread(file, row(at).data(), bytes, offset) == static_cast<ssize_t>(bytes));
            check(sums[at] == Crc32c::of(row(at)));
        });
        const double all = static_cast<double>(bytes * rows) / 1e6;
        std::printf("%f %f\n", all / store, all / load);
        std::fflush(stdout);
    }
}
