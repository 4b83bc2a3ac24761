// `with` on a chunk: what `acquire_write` and `acquire_read` return.
//
// In C++, because a signal handler may raise between any two steps of Python: then the block would stay open for ever,
// and no other call could be made on its end.
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

    // `kept`: the queue and its end, which live as long as the block.
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
        } catch (const std::exception&) {  // there is nobody left to be told
        }
    }

    nb::object enter() {
        view_ = begin_();
        return view_;
    }

    // `kind`: of the error, or None.
    void exit(nb::handle kind, nb::handle /*error*/, nb::handle /*traceback*/) {
        if (view_.is_valid()) leave(kind.is_none());
    }

private:
    void leave(bool is_whole) {
        forget_view();
        end_(is_whole);
    }

    // Before it is counted what still refers to the chunk. A view of which there is another view cannot be released.
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
