// The interface between a fuzz target and the engine. Each target is one program: the engine and its `try_input`.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>

namespace memlane::fuzz {

using Input = std::span<const std::uint8_t>;

// Defined by the target: does with these bytes what the library does. Anything but a return is a fault.
void try_input(Input input);

// Call it if something that must hold does not; the engine saves the input.
[[noreturn]] void fail(const char* file, int line, const char* what);

// Calls `strike` between two basic blocks of the target, after `blocks` of them. It may call this again.
void strike_after(std::uint64_t blocks, void (*strike)());
void strike_no_more();

}  // namespace memlane::fuzz

#define FUZZ_CHECK(condition)                                                          \
    do {                                                                               \
        if (!(condition)) ::memlane::fuzz::fail(__FILE__, __LINE__, "not true: " #condition); \
    } while (false)
