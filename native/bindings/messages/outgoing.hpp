// A message on its way out: the pieces of a pickle stream and the buffers beside it, all by reference. A
// Pickler writes to it as its file, and calls it as its buffer_callback.
#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "bindings/python/buffer.hpp"
#include "broadcast/frames.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class Outgoing {
public:
    Outgoing() = default;
    Outgoing(const Outgoing&) = delete;
    Outgoing& operator=(const Outgoing&) = delete;
    ~Outgoing() { clear(); }

    // The Pickler hands over large bytes objects as they are, everything else as one bytes object per frame.
    void write(nb::handle data) {
        stream_bytes_ += pieces_.emplace_back(data, PyBUF_SIMPLE).size();
    }

    // True leaves the buffer in the stream.
    bool add_buffer(nb::handle pickle_buffer) {
        const Py_buffer* inside = PyPickleBuffer_GetBuffer(pickle_buffer.ptr());
        if (inside == nullptr) throw nb::python_error();
        if (static_cast<std::uint64_t>(inside->len) < broadcast::kLeastOutOfBand) return true;
        buffers_.emplace_back(pickle_buffer, PyBUF_ANY_CONTIGUOUS);
        return false;
    }

    // The object written first; there must be one.
    nb::handle first_piece() const noexcept { return pieces_.front()->obj; }

    bool has_buffers() const noexcept { return !buffers_.empty(); }
    std::uint64_t stream_bytes() const noexcept { return stream_bytes_; }

    broadcast::FrameTable table() const {
        std::vector<std::uint64_t> sizes;
        for (const HeldBuffer& b : buffers_) sizes.push_back(b.size());
        return broadcast::FrameTable(stream_bytes_, std::move(sizes));
    }

    // Calls put(offset in the message, bytes, from) for every part, in order; stops at the first error and returns it.
    template <class Put>
    int for_each_part(const broadcast::FrameTable& table, Put&& put) const {
        if (!has_buffers()) return put_stream(0, put);
        const broadcast::MessageHeader header = table.header();
        if (const int error = put(0, sizeof header, &header)) return error;
        const auto sizes = table.sizes();
        if (const int error = put(sizeof header, sizes.size_bytes(), sizes.data())) return error;
        if (const int error = put_stream(table.stream().offset, put)) return error;
        for (std::size_t i = 0; i < buffers_.size(); ++i)
            if (const int error = put(table.buffers()[i].offset, table.buffers()[i].bytes, buffers_[i].data())) return error;
        return 0;
    }

    void clear() noexcept {
        pieces_.clear();
        buffers_.clear();
        stream_bytes_ = 0;
    }

private:
    template <class Put>
    int put_stream(std::uint64_t offset, Put&& put) const {
        for (const HeldBuffer& piece : pieces_) {
            if (const int error = put(offset, piece.size(), piece.data())) return error;
            offset += piece.size();
        }
        return 0;
    }

    std::vector<HeldBuffer> pieces_;
    std::vector<HeldBuffer> buffers_;
    std::uint64_t stream_bytes_ = 0;
};

}  // namespace memlane::bindings
