// What a fuzz target says and may ask for. One target is one program: this engine and its `try_input`.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

namespace memlane::fuzz {

using Input = std::span<const std::uint8_t>;

// The target's: does with these bytes whatever the library does. Anything but a return is a fault.
void try_input(Input input);

// To be called for something that must not be; the engine keeps the input.
[[noreturn]] void fail(const char* file, int line, const char* what);

// `strike` is called between two basic blocks of the target, once so many of them have run; it may ask again.
void strike_after(std::uint64_t blocks, void (*strike)());
void strike_no_more();

}  // namespace memlane::fuzz

#define FUZZ_CHECK(condition)                                                          \
    do {                                                                               \
        if (!(condition)) ::memlane::fuzz::fail(__FILE__, __LINE__, "not true: " #condition); \
    } while (false)
