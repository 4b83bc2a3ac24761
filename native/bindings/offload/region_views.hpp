// A region's memory for Python: RegionMap, which is used like an mmap.mmap, and RegionRows, one row of bytes
// per block. Everything made from them keeps the mapping.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <memory>
#include <utility>

#include "bindings/python/buffer.hpp"
#include "bindings/python/failures.hpp"
#include "os/mapping.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

// Once closed it exports nothing, but the memory stays mapped while this object exists: torch.frombuffer keeps
// the object that it was given, and no export of it.
class RegionMap {
public:
    explicit RegionMap(std::shared_ptr<os::Mapping> mapping) : mapping_(std::move(mapping)) {}

    bool is_closed() const noexcept { return is_closed_; }
    void close() noexcept { is_closed_ = true; }
    std::size_t size() const { return mapping().bytes(); }

    // Like mmap.mmap: bytes for a slice, an int for an index.
    nb::object get(const nb::object& key) const {
        const nb::object part = view_of(lender()).attr("__getitem__")(key);
        return PyMemoryView_Check(part.ptr()) ? part.attr("tobytes")() : part;
    }
    void set(const nb::object& key, const nb::object& value) const { view_of(lender()).attr("__setitem__")(key, value); }

    static int get_buffer(PyObject* self, Py_buffer* view, int flags) noexcept {
        try {
            return PyObject_GetBuffer(nb::inst_ptr<RegionMap>(self)->lender().ptr(), view, flags);
        } catch (nb::python_error& error) {
            error.restore();
            return -1;
        }
    }

private:
    const os::Mapping& mapping() const {
        if (is_closed_) raise_error(Error::InvalidArgument, "this region was cleaned up");
        return *mapping_;
    }
    nb::object lender() const { return nb::cast(Buffer(mapping_, mapping_->base(), mapping().bytes(), false)); }

    std::shared_ptr<os::Mapping> mapping_;
    bool is_closed_ = false;
};

// A plain 2-D memoryview cannot be indexed by row; this can, and memoryview() of it is 2-D.
class RegionRows {
public:
    RegionRows(std::shared_ptr<os::Mapping> mapping, std::size_t blocks, std::size_t row_bytes)
        : mapping_(std::move(mapping)),
          shape_{static_cast<Py_ssize_t>(blocks), static_cast<Py_ssize_t>(row_bytes)},
          strides_{static_cast<Py_ssize_t>(row_bytes), 1} {}

    std::size_t size() const noexcept { return static_cast<std::size_t>(shape_[0]); }
    std::size_t nbytes() const noexcept { return static_cast<std::size_t>(shape_[0] * shape_[1]); }
    nb::tuple shape() const { return nb::make_tuple(shape_[0], shape_[1]); }

    nb::object row(Py_ssize_t block) const {
        const Py_ssize_t at = block < 0 ? block + shape_[0] : block;
        if (at < 0 || at >= shape_[0]) throw nb::index_error("there is no such block");
        return shared_view(mapping_, static_cast<std::size_t>(at * shape_[1]), static_cast<std::size_t>(shape_[1]));
    }

    static int get_buffer(PyObject* self, Py_buffer* view, int flags) noexcept {
        auto* rows = nb::inst_ptr<RegionRows>(self);
        if (PyBuffer_FillInfo(view, self, rows->mapping_->base(), static_cast<Py_ssize_t>(rows->nbytes()), 0, flags) != 0)
            return -1;
        if ((flags & PyBUF_ND) != PyBUF_ND) return 0;
        view->ndim = 2;
        view->shape = rows->shape_;
        if ((flags & PyBUF_STRIDES) == PyBUF_STRIDES) view->strides = rows->strides_;
        return 0;
    }

private:
    std::shared_ptr<os::Mapping> mapping_;
    Py_ssize_t shape_[2];
    Py_ssize_t strides_[2];
};

}  // namespace memlane::bindings
