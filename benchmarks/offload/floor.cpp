// How fast the machine itself can copy: memcpy from one large memory to another of the same size. Each thread copies its
// own part, over and over, for the whole measurement.
//
//     floor BYTES_OF_HALF BYTES_OF_BLOCK THREADS SECONDS     GB/s; 0 means that a block is the whole part
//
// Blocks are copied in random order, the same for all threads.
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

namespace {

double now() {
    timespec t{};
    clock_gettime(CLOCK_MONOTONIC, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

char* memory(std::size_t bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) std::exit(1);
    madvise(at, bytes, MADV_HUGEPAGE);  // as numpy does for its arrays
    std::memset(at, 1, bytes);
    return static_cast<char*>(at);
}

}  // namespace

int main(int count, char** arguments) {
    alarm(60);
    if (count != 5) return 2;
    const std::size_t half = std::strtoull(arguments[1], nullptr, 10);
    const std::size_t threads = std::strtoull(arguments[3], nullptr, 10);
    const std::size_t part = half / threads;
    const std::size_t asked = std::strtoull(arguments[2], nullptr, 10);
    const std::size_t block = asked == 0 ? part : asked;
    const double seconds = std::atof(arguments[4]);
    const char* const from = memory(half);
    char* const to = memory(half);
    std::vector<std::size_t> source(part / block);
    std::iota(source.begin(), source.end(), std::size_t{0});
    std::vector<std::size_t> target = source;
    std::mt19937_64 random(1);
    std::shuffle(source.begin(), source.end(), random);
    std::shuffle(target.begin(), target.end(), random);
    std::atomic<std::uint64_t> copied{0};
    const double start = now();
    const auto work = [&](std::size_t thread) {
        std::uint64_t bytes = 0;
        while (now() - start < seconds)
            for (std::size_t i = 0; i < source.size() && (i % 64 != 0 || now() - start < seconds); ++i) {
                std::memcpy(to + thread * part + target[i] * block, from + thread * part + source[i] * block, block);
                bytes += block;
            }
        copied += bytes;
    };
    std::vector<std::thread> others;
    for (std::size_t i = 1; i < threads; ++i) others.emplace_back(work, i);
    work(0);
    for (std::thread& other : others) other.join();
    std::printf("%f\n", static_cast<double>(copied.load()) / (now() - start) / 1e9);
}
