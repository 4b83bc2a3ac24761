// Releasing the GIL for work that may outlast the interpreter.
//
// CPython up to 3.13 ends a thread that requests the GIL of a finalizing interpreter by pthread_exit. That
// unwinds its stack through destructors that must not be unwound, which aborts the process. Such a thread,
// always a daemon, parks here instead until the process is gone.
#pragma once

#include <Python.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>

namespace memlane::bindings {

template <class Acquire>
auto acquire_gil_or_park(Acquire&& acquire) noexcept {
    try {
        return acquire();
    } catch (...) {  // the forced unwind, nothing else: it has no exception object to bind a reference to
        for (;;) ::pause();
    }
}

class WithoutGil {
public:
    WithoutGil() noexcept : state_(PyEval_SaveThread()) {}
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;
    ~WithoutGil() {
        acquire_gil_or_park([this] { PyEval_RestoreThread(state_); });
    }

private:
    PyThreadState* state_;
};

template <class Work>
auto without_gil(Work&& work) {
    const WithoutGil no_gil;
    return work();
}

// Takes the GIL back for a moment, inside WithoutGil.
class WithGil {
public:
    WithGil() noexcept : state_(acquire_gil_or_park([] { return PyGILState_Ensure(); })) {}
    WithGil(const WithGil&) = delete;
    WithGil& operator=(const WithGil&) = delete;
    ~WithGil() { PyGILState_Release(state_); }

private:
    PyGILState_STATE state_;
};

// From this size on, a copy takes longer than releasing and reacquiring the GIL.
inline constexpr std::size_t kCopyWithoutGil = 64u << 10;

// Runs `work` with or without the GIL, whichever is cheaper for `bytes` bytes.
template <class Work>
auto copying(std::uint64_t bytes, Work&& work) {
    return bytes < kCopyWithoutGil ? work() : without_gil(work);
}

}  // namespace memlane::bindings
