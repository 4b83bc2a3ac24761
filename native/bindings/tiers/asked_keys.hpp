// The keys of one call, checked before anything changes. They borrow from the caller's objects.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "bindings/python/failures.hpp"
#include "tiers/block_pool.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

inline tiers::Key hash_of(nb::handle key) noexcept {
    // That of bytes themselves, whatever a subclass says: no Python code runs here.
    return tiers::mixed(static_cast<std::uint64_t>(PyBytes_Type.tp_hash(key.ptr())));
}

class AskedKeys {
public:
    explicit AskedKeys(nb::handle keys)
        : sequence_(nb::steal(PySequence_Fast(keys.ptr(), "keys must be a sequence of bytes"))) {
        if (!sequence_.is_valid()) throw nb::python_error();
        const auto count = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(sequence_.ptr()));
        asked_.reserve(count);
        for (std::size_t at = 0; at < count; ++at) {
            PyObject* const key = PySequence_Fast_GET_ITEM(sequence_.ptr(), static_cast<Py_ssize_t>(at));
            if (!PyBytes_Check(key)) {
                raise_error(Error::InvalidType, "a key must be bytes, not " + std::string(Py_TYPE(key)->tp_name));
            }
            const auto size = static_cast<std::size_t>(PyBytes_GET_SIZE(key));
            if (size == 0 || size > tiers::kLongestKey) {
                raise_error(Error::InvalidArgument, "a key must have 1 to " + std::to_string(tiers::kLongestKey) +
                                                        " bytes, not " + std::to_string(size));
            }
            const auto* const data = reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(key));
            asked_.push_back({hash_of(key), {data, size}});
        }
    }

    std::span<const tiers::BlockPool::Asked> asked() const noexcept { return asked_; }

private:
    nb::object sequence_;
    std::vector<tiers::BlockPool::Asked> asked_;
};

// Block numbers are passed as arrays of int32, as bytes.
inline nb::bytes as_bytes(const std::vector<tiers::Block>& blocks) {
    return nb::bytes(reinterpret_cast<const char*>(blocks.data()), blocks.size() * sizeof(tiers::Block));
}

inline std::vector<tiers::Block> blocks_in(const nb::bytes& bytes) {
    std::vector<tiers::Block> blocks(bytes.size() / sizeof(tiers::Block));
    std::memcpy(blocks.data(), bytes.c_str(), blocks.size() * sizeof(tiers::Block));
    return blocks;
}

}  // namespace memlane::bindings
