// The bytes of one stored object while it is decoded, given out piece by piece: in place, or copied.
//
// Nothing here trusts the object's own lengths: a piece is given out once, and memory is allocated for it only
// after its length was compared with the bytes that are there.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>

#include "bindings/python/buffer_pool.hpp"
#include "bindings/python/failures.hpp"
#include "bindings/python/gil.hpp"
#include "core/sync.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

// Protected by the GIL.
class ObjectMemory {
public:
    // The owner is a private memoryview: nobody else can release it. It is one more export of the
    // object behind `shown`.
    ObjectMemory(nb::handle shown, bool is_view, bool allows_pickle) : is_in_place_(is_view), allows_pickle_(allows_pickle) {
        const nb::object view = PyMemoryView_Check(shown.ptr()) ? nb::borrow(shown) : view_of(shown);
        const Py_buffer* buffer = PyMemoryView_GET_BUFFER(view.ptr());
        if (!PyBuffer_IsContiguous(buffer, 'C')) throw nb::value_error("the memory is not contiguous");
        owner_ = view_of(buffer->obj == nullptr ? view : nb::borrow(buffer->obj));
        memory_ = static_cast<std::byte*>(buffer->buf);
        bytes_ = static_cast<std::size_t>(buffer->len);
        if (bytes_ < sizeof(Header)) raise_corrupt("{} bytes are too few for an object", bytes_);
        Header header;
        core::copy_privately(&header, memory_, sizeof header);
        if (std::memcmp(header.magic, kMagic, sizeof kMagic) != 0)
            raise_corrupt("it was not written by MsgpackSerde: it starts with {}", nb::bytes(header.magic, sizeof kMagic));
        if (header.version != kVersion)
            raise_corrupt("it has format version {}, this memlane reads version {}; use the same version of memlane on both "
                          "sides",
                          unsigned{header.version}, unsigned{kVersion});
        if (header.tree_bytes > bytes_ - sizeof(Header))
            raise_corrupt("its tree has {} bytes, but the object has {} in all", header.tree_bytes, bytes_);
        tree_end_ = sizeof(Header) + header.tree_bytes;
        next_ = begin_ = std::min(core::align_up(kPreamble + tree_end_, kAlignment) - kPreamble, bytes_);
    }

    // A private copy of the tree.
    nb::bytes tree() const { return nb::bytes(memory_ + sizeof(Header), tree_end_ - sizeof(Header)); }

    // Memory for an array: the next bytes, as many as its elements take. A writable array is a copy even where
    // the other pieces stay in place: no write reaches another process.
    nb::object array(std::size_t itemsize, nb::handle shape, bool is_writable) {
        const std::size_t bytes = bytes_of(itemsize, shape);
        std::byte* const at = take(bytes);
        if (is_in_place_ && !is_writable) return foreign_memory(owner_, at, bytes);
        return copy_of(at, bytes);
    }

    nb::object bytes(nb::handle length) {
        const std::size_t bytes = count_of(length);
        std::byte* const at = take(bytes);
        if (is_in_place_) return view_of(foreign_memory(owner_, at, bytes));
        return nb::bytes(at, bytes);
    }

    nb::object byte_array(nb::handle length) {
        const std::size_t bytes = count_of(length);
        return new_byte_array(take(bytes), bytes);
    }

    // A private, writable copy, even where the other pieces stay in place.
    nb::object copy(nb::handle length) {
        const std::size_t bytes = count_of(length);
        return copy_of(take(bytes), bytes);
    }

    // Drops the memory; nothing can be taken any more. The traceback of an error may keep this object.
    void release() {
        bytes_ = begin_ = next_ = 0;
        tree_end_ = sizeof(Header);
        owner_.reset();
    }

    bool allows_pickle() const noexcept { return allows_pickle_; }
    bool is_in_place() const noexcept { return is_in_place_; }
    void set_in_place(bool is_in_place) noexcept { is_in_place_ = is_in_place; }

private:
    // As in src/memlane/store/_wire.py.
    struct [[gnu::packed]] Header {
        char magic[3];
        std::uint8_t version;
        std::uint64_t tree_bytes;
    };
    static_assert(sizeof(Header) == 12);
    static constexpr char kMagic[3] = {'m', 'l', 's'};
    static constexpr std::uint8_t kVersion = 3;
    static constexpr std::size_t kAlignment = 64;
    static constexpr std::size_t kPreamble = 12;  // of an allocation, before the object

    static constexpr std::size_t kLeastPooled = 4096;  // below this, a new bytearray costs less than the pool
    static constexpr Py_ssize_t kMostDimensions = 64;
    static constexpr std::size_t kTooMany = std::numeric_limits<std::size_t>::max();

    template <class... Args>
    [[noreturn]] static void raise_corrupt(const char* format, const Args&... args) {
        raise_error(Error::CorruptMessage, nb::str(format).attr("format")(args...));
    }

    std::byte* take(std::size_t bytes) {
        const std::size_t left = bytes_ - next_;
        if (bytes > left) raise_corrupt("{} bytes were expected, but {} are left", bytes, left);
        std::byte* const at = memory_ + next_;
        next_ = begin_ + std::min(core::align_up(next_ - begin_ + bytes, kAlignment), bytes_ - begin_);
        return at;
    }

    // A length from the tree. One beyond 64 bits is more than any object has.
    static std::size_t count_of(nb::handle number) {
        if (PyLong_CheckExact(number.ptr())) {
            int overflow = 0;
            const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
            if (overflow > 0) return kTooMany;
            if (overflow == 0 && value >= 0) return static_cast<std::size_t>(value);
        }
        raise_corrupt("{!r} is not a length", number);
    }

    // numpy checks the product of an empty array's other lengths itself.
    static std::size_t bytes_of(std::size_t itemsize, nb::handle shape) {
        if (!PyList_CheckExact(shape.ptr()) || PyList_GET_SIZE(shape.ptr()) > kMostDimensions)
            raise_corrupt("an array's shape is not valid");
        std::size_t bytes = itemsize;
        bool is_empty = false;
        for (const nb::handle length : nb::borrow<nb::list>(shape)) {
            const std::size_t count = count_of(length);
            is_empty = is_empty || count == 0;
            if (__builtin_mul_overflow(bytes, count, &bytes) || count == kTooMany) bytes = kTooMany;
        }
        return is_empty ? 0 : bytes;
    }

    static nb::object new_byte_array(const std::byte* at, std::size_t bytes) {
        return nb::steal(
            PyByteArray_FromStringAndSize(reinterpret_cast<const char*>(at), static_cast<Py_ssize_t>(bytes)));
    }

    static nb::object copy_of(const std::byte* at, std::size_t bytes) {
        if (bytes < kLeastPooled) return new_byte_array(at, bytes);
        Buffer copy = pooled_buffer(bytes);
        copying(bytes, [&] { return std::memcpy(copy.memory(), at, bytes); });
        return nb::cast(std::move(copy));
    }

    nb::object owner_;
    std::byte* memory_;
    std::size_t bytes_;
    bool is_in_place_;
    bool allows_pickle_;
    std::size_t tree_end_;
    std::size_t begin_;  // of the pieces
    std::size_t next_;
};

}  // namespace memlane::bindings
