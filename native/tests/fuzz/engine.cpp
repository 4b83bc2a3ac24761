// A coverage-guided fuzzer in one file, based on what g++ offers: -fsanitize-coverage=trace-pc,trace-cmp.
//
//   TARGET --seconds N [--random N] [--found FOLDER] --crash FILE FOLDER-OR-FILE...
//
// First it runs every input of the folders. Then, for N seconds, it mutates the inputs that reached something new, and
// keeps those that reach more (in --found, too). Something new is an edge between two basic blocks, or one taken 2, 3,
// 4 to 7, ... times (as in AFL). It also records the target's comparisons: where one operand occurs in the input, it is
// replaced by the other, which gets past magic numbers and lengths that must agree.
//
// A fault is a sanitizer's report, a signal, a failed check, an input that takes more than a minute, or an allocation
// that the options below forbid. The input is then saved in --crash, and the exit status is not 0.
#include "fuzz/engine.hpp"

#include <fcntl.h>
#include <sanitizer/common_interface_defs.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

extern "C" const char* __asan_default_options() {
    // No target has more than a few MiB of messages, so a larger allocation was made for a forged length.
    return "max_allocation_size_mb=64:hard_rss_limit_mb=1024:allocator_may_return_null=0:detect_stack_use_after_return=0";
}
extern "C" const char* __ubsan_default_options() { return "print_stacktrace=1:halt_on_error=1"; }

namespace memlane::fuzz {
namespace {

using Bytes = std::vector<std::uint8_t>;
using Clock = std::chrono::steady_clock;

constexpr std::size_t kMap = 1u << 13;
constexpr std::size_t kLongest = 4096;
constexpr unsigned kPatience = 60;  // seconds per input

struct Comparison {
    std::uint64_t one;
    std::uint64_t other;
    std::uint8_t width;
};

// Written by the instrumentation's callbacks. There is only one thread.
std::array<std::uint8_t, kMap> hits;
std::uintptr_t previous = 0;
std::array<Comparison, 256> comparisons;
std::size_t compared = 0;
bool is_watching = false;
std::uint64_t blocks_to_strike = 0;
void (*on_strike)() = nullptr;

Bytes current;
std::string crash_path;

void save() noexcept {
    const int file = ::creat(crash_path.c_str(), 0600);
    if (file < 0) return;
    if (::write(file, current.data(), current.size()) < 0) std::perror("cannot keep the input");
    ::close(file);
}

void on_alarm(int) {
    save();
    std::fputs("an input takes more than a minute\n", stderr);
    std::_Exit(77);
}

// One bit for how often an edge was taken.
std::uint8_t bucket(std::uint8_t count) noexcept {
    if (count < 4) return static_cast<std::uint8_t>(1u << count >> 1);
    return count < 8 ? 8 : count < 16 ? 16 : count < 32 ? 32 : count < 128 ? 64 : 128;
}

class Fuzzer {
public:
    Fuzzer(std::uint64_t random, std::string found) : random_(random), found_(std::move(found)) {}

    void try_all_of(const std::filesystem::path& place) {
        std::vector<std::filesystem::path> files;
        if (std::filesystem::is_directory(place)) {
            for (const auto& entry : std::filesystem::directory_iterator(place)) files.push_back(entry.path());
            std::sort(files.begin(), files.end());
        } else if (std::filesystem::exists(place)) {
            files.push_back(place);
        }
        for (const auto& file : files) {
            std::ifstream stream(file, std::ios::binary);
            attempt(Bytes(std::istreambuf_iterator<char>(stream), {}));
        }
    }

    void go_on_until(Clock::time_point end) {
        if (corpus_.empty()) attempt(Bytes(16));
        if (corpus_.empty()) corpus_.emplace_back(16);
        while (Clock::now() < end)
            for (int i = 0; i < 64; ++i) {
                // Later inputs reach deeper, so half of the time it takes one of the last 32.
                const std::size_t count = corpus_.size();
                const std::size_t at = below(2) ? below(count) : count - 1 - below(std::min<std::size_t>(count, 32));
                const bool is_new = attempt(changed(corpus_[at]));
                if (is_new && !found_.empty()) keep(corpus_.back());
            }
    }

    void report(const char* name, double seconds) const {
        std::size_t edges = 0;
        for (const std::uint8_t seen : seen_) edges += seen != 0;
        std::printf("%s: %llu inputs in %.1f s, %zu of them kept, %zu edges\n", name,
                    static_cast<unsigned long long>(tried_), seconds, corpus_.size(), edges);
    }

private:
    // Runs the input; true if it reached something new, and was therefore kept.
    bool attempt(Bytes input) {
        if (input.size() > kLongest) input.resize(kLongest);
        hits.fill(0);
        previous = 0;
        compared = 0;
        current = std::move(input);
        ++tried_;
        ::alarm(kPatience);
        is_watching = true;
        try_input(current);
        is_watching = false;
        strike_no_more();
        bool is_new = false;
        for (std::size_t i = 0; i < kMap; ++i) {
            if (hits[i] == 0) continue;
            const std::uint8_t bit = bucket(hits[i]);
            is_new |= (seen_[i] & bit) == 0;
            seen_[i] |= bit;
        }
        if (is_new) corpus_.push_back(current);
        return is_new;
    }

    Bytes changed(Bytes input) {
        for (std::size_t steps = 1 + below(4); steps > 0; --steps) change(input);
        return input;
    }

    void change(Bytes& input) {
        if (input.size() < 16) input.resize(16);
        switch (below(10)) {
            case 0: input[below(input.size())] ^= static_cast<std::uint8_t>(1u << below(8)); break;
            case 1: input[below(input.size())] = static_cast<std::uint8_t>(random_()); break;
            case 2:
            case 3: put(input, kNumbers[below(kNumbers.size())] + (below(4) ? 0 : below(5) - 2)); break;
            case 4: {  // adds or subtracts up to 32
                const std::size_t width = std::size_t{1} << below(4), at = place(input, width);
                std::uint64_t value = 0;
                std::memcpy(&value, &input[at], width);
                value += below(65) - 32;
                std::memcpy(&input[at], &value, width);
                break;
            }
            case 5: put(input, random_() >> below(64)); break;
            case 6: {  // inserts a record
                Bytes record(16);
                if (below(2)) std::copy_n(&input[16 * below(input.size() / 16)], 16, record.begin());
                input.insert(input.begin() + static_cast<std::ptrdiff_t>(16 * below(input.size() / 16 + 1)), record.begin(), record.end());
                break;
            }
            case 7:
                if (input.size() >= 32) {
                    const auto at = input.begin() + static_cast<std::ptrdiff_t>(16 * below(input.size() / 16));
                    input.erase(at, at + 16);
                }
                break;
            case 8: {  // takes over the end of another input
                const Bytes& other = corpus_[below(corpus_.size())];
                const std::size_t at = 16 * below(std::min(input.size(), other.size()) / 16 + 1);
                input.resize(at);
                if (at < other.size()) input.insert(input.end(), other.begin() + static_cast<std::ptrdiff_t>(at), other.end());
                break;
            }
            default: answer(input); break;
        }
    }

    // Replaces one operand of a comparison by the other.
    void answer(Bytes& input) {
        if (compared == 0) return;
        const Comparison c = comparisons[below(std::min(compared, comparisons.size()))];
        const bool turned = below(2);
        const std::uint64_t from = turned ? c.other : c.one, to = (turned ? c.one : c.other) + (below(4) ? 0 : below(3) - 1);
        const auto* pattern = reinterpret_cast<const std::uint8_t*>(&from);
        const auto at = std::search(input.begin(), input.end(), pattern, pattern + c.width);
        if (at != input.end())
            std::memcpy(&*at, &to, c.width);
        else
            put(input, to);
    }

    void put(Bytes& input, std::uint64_t value) {
        const std::size_t width = std::size_t{1} << below(4);
        std::memcpy(&input[place(input, width)], &value, width);
    }
    std::size_t place(const Bytes& input, std::size_t width) {
        return below(4) ? width * below(input.size() / width) : below(input.size() - width + 1);
    }

    void keep(const Bytes& input) const {
        std::uint64_t hash = 0xcbf29ce484222325;
        for (const std::uint8_t byte : input) hash = (hash ^ byte) * 0x100000001b3;
        char name[24];
        std::snprintf(name, sizeof name, "%016llx", static_cast<unsigned long long>(hash));
        std::ofstream(std::filesystem::path(found_) / name, std::ios::binary)
            .write(reinterpret_cast<const char*>(input.data()), static_cast<std::streamsize>(input.size()));
    }

    std::size_t below(std::size_t end) { return random_() % end; }

    static constexpr std::array<std::uint64_t, 24> kNumbers = {
        0, 1, 2, 4, 8, 63, 64, 127, 128, 255, 4095, 4096, 8192, 65535, 65536, 1u << 20, INT32_MAX, 1ull << 31, UINT32_MAX,
        1ull << 32, 1ull << 62, INT64_MAX, 1ull << 63, UINT64_MAX};

    std::mt19937_64 random_;
    std::string found_;
    std::array<std::uint8_t, kMap> seen_{};
    std::vector<Bytes> corpus_;
    std::uint64_t tried_ = 0;
};

}  // namespace

void fail(const char* file, int line, const char* what) {
    save();
    std::fprintf(stderr, "%s:%d: %s\n", file, line, what);
    __sanitizer_print_stack_trace();
    std::_Exit(76);
}

void strike_after(std::uint64_t blocks, void (*strike)()) {
    on_strike = strike;
    blocks_to_strike = std::max<std::uint64_t>(blocks, 1);
}
void strike_no_more() { blocks_to_strike = 0; }

namespace {

void note(std::uint64_t one, std::uint64_t other, std::uint8_t width) noexcept {
    if (is_watching && one != other) comparisons[compared++ % comparisons.size()] = {one, other, width};
}

}  // namespace
}  // namespace memlane::fuzz

// The functions that the target's instrumentation calls.
extern "C" {
void __sanitizer_cov_trace_pc() {
    using namespace memlane::fuzz;
    if (!is_watching) return;
    const auto here = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0));
    std::uint8_t& count = hits[(here ^ previous >> 1) % kMap];
    count = static_cast<std::uint8_t>(count + (count < 255));
    previous = here;
    if (blocks_to_strike != 0 && --blocks_to_strike == 0) {
        is_watching = false;
        on_strike();
        is_watching = true;
    }
}
void __sanitizer_cov_trace_cmp1(std::uint8_t a, std::uint8_t b) { memlane::fuzz::note(a, b, 1); }
void __sanitizer_cov_trace_cmp2(std::uint16_t a, std::uint16_t b) { memlane::fuzz::note(a, b, 2); }
void __sanitizer_cov_trace_cmp4(std::uint32_t a, std::uint32_t b) { memlane::fuzz::note(a, b, 4); }
void __sanitizer_cov_trace_cmp8(std::uint64_t a, std::uint64_t b) { memlane::fuzz::note(a, b, 8); }
void __sanitizer_cov_trace_const_cmp1(std::uint8_t a, std::uint8_t b) { memlane::fuzz::note(a, b, 1); }
void __sanitizer_cov_trace_const_cmp2(std::uint16_t a, std::uint16_t b) { memlane::fuzz::note(a, b, 2); }
void __sanitizer_cov_trace_const_cmp4(std::uint32_t a, std::uint32_t b) { memlane::fuzz::note(a, b, 4); }
void __sanitizer_cov_trace_const_cmp8(std::uint64_t a, std::uint64_t b) { memlane::fuzz::note(a, b, 8); }
void __sanitizer_cov_trace_cmpf(float, float) {}
void __sanitizer_cov_trace_cmpd(double, double) {}
void __sanitizer_cov_trace_switch(std::uint64_t value, const std::uint64_t* cases) {
    for (std::uint64_t i = 0; i < cases[0]; ++i)
        memlane::fuzz::note(value, cases[2 + i], static_cast<std::uint8_t>(cases[1] / 8));
}
}

int main(int count, char** words) {
    using namespace memlane::fuzz;
    double seconds = 0;
    std::uint64_t random = std::random_device{}();
    std::string found;
    std::vector<std::string> places;
    for (int i = 1; i < count; ++i) {
        const std::string word = words[i];
        const bool is_option = word.rfind("--", 0) == 0;
        if (is_option && i + 1 == count) {
            std::fprintf(stderr, "%s needs a value\n", words[i]);
            return 2;
        }
        if (word == "--seconds") seconds = std::stod(words[++i]);
        else if (word == "--random") random = std::stoull(words[++i]);
        else if (word == "--found") found = words[++i];
        else if (word == "--crash") crash_path = words[++i];
        else places.push_back(word);
    }
    __sanitizer_set_death_callback(save);
    ::signal(SIGALRM, on_alarm);
    const auto begin = Clock::now();
    Fuzzer fuzzer(random, found);
    for (const std::string& place : places) fuzzer.try_all_of(place);
    if (seconds > 0) fuzzer.go_on_until(begin + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
    ::alarm(0);
    fuzzer.report(std::filesystem::path(words[0]).filename().c_str(),
                  std::chrono::duration<double>(Clock::now() - begin).count());
    return 0;
}
