// `with` on a chunk: what `acquire_write` and `acquire_read` return.
//
// Written in C++, because a signal handler may raise between any two steps of Python: the block would then stay
// open for ever, and its end would refuse all other calls.
#pragma once

#include <nanobind/nanobind.h>

#include <functional>
#include <utility>

namespace memlane::bindings {

namespace nb = nanobind;

// Protected by the GIL.
class ChunkBlock {
public:
    using Begin = std::function<nb::object()>;
    using End = std::function<void(bool is_whole)>;

    // `kept`: the queue and its end, which must live as long as the block.
    ChunkBlock(nb::object kept, Begin begin, End end)
        : kept_(std::move(kept)), begin_(std::move(begin)), end_(std::move(end)) {}
    ChunkBlock(ChunkBlock&&) noexcept = default;
    ChunkBlock(const ChunkBlock&) = delete;
    ChunkBlock& operator=(const ChunkBlock&) = delete;
    ~ChunkBlock() {
        if (!view_.is_valid()) return;
        const nb::error_scope others;
        try {
            leave(false);
        } catch (const std::exception&) {  // nobody is left to catch it
        }
    }

    nb::object enter() {
        view_ = begin_();
        return view_;
    }

    // `kind`: the type of the exception, or None.
    void exit(nb::handle kind, nb::handle /*error*/, nb::handle /*traceback*/) {
        if (view_.is_valid()) leave(kind.is_none());
    }

private:
    void leave(bool is_whole) {
        forget_view();
        end_(is_whole);
    }

    // Called before references to the chunk are counted. A view that other views were made from cannot be released.
    void forget_view() {
        const nb::object view = std::move(view_);
        try {
            view.attr("release")();
        } catch (const nb::python_error& error) {
            if (!error.matches(PyExc_BufferError)) throw;
        }
    }

    nb::object kept_;
    Begin begin_;
    End end_;
    nb::object view_;  // while the block is open
};

}  // namespace memlane::bindings
