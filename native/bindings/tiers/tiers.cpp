// The pool of blocks and the replay of a trace, for Python. Block numbers are passed as arrays of int32, as bytes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python/failures.hpp"
#include "bindings/python/gil.hpp"
#include "bindings/python/systems.hpp"
#include "tiers/block_pool.hpp"
#include "tiers/replay.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

// The keys of one call, checked before anything changes. They borrow from the caller's objects.
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
            // Of bytes themselves, whatever a subclass says: no Python code runs here.
            asked_.push_back({tiers::mixed(static_cast<std::uint64_t>(PyBytes_Type.tp_hash(key))), {data, size}});
        }
    }

    std::span<const tiers::BlockPool::Asked> asked() const noexcept { return asked_; }

private:
    nb::object sequence_;
    std::vector<tiers::BlockPool::Asked> asked_;
};

nb::bytes as_bytes(const std::vector<tiers::Block>& blocks) {
    return nb::bytes(reinterpret_cast<const char*>(blocks.data()), blocks.size() * sizeof(tiers::Block));
}

std::vector<tiers::Block> blocks_in(const nb::bytes& bytes) {
    std::vector<tiers::Block> blocks(bytes.size() / sizeof(tiers::Block));
    std::memcpy(blocks.data(), bytes.c_str(), blocks.size() * sizeof(tiers::Block));
    return blocks;
}

using Counted = nb::typed<nb::dict, nb::str, nb::int_>;

Counted counted(const tiers::Replay::Counts& counts) {
    Counted made;
    made["requests"] = counts.requests;
    made["accesses"] = counts.accesses;
    made["hits"] = counts.hits;
    made["prefix_hits"] = counts.prefix_hits;
    made["stores"] = counts.stores;
    return made;
}

Counted statistics(const tiers::BlockPool& pool) {
    const tiers::PoolStatistics counts = pool.statistics();
    Counted made;
    made["blocks"] = pool.blocks();
    made["used"] = counts.used;
    made["reserved"] = counts.reserved;
    made["pinned"] = counts.pinned;
    made["accesses"] = counts.accesses;
    made["hits"] = counts.hits;
    made["prefix_hits"] = counts.prefix_hits;
    made["stored"] = counts.stored;
    made["evicted"] = counts.evicted;
    made["declined"] = counts.declined;
    return made;
}

}  // namespace

void bind_tiers(nb::module_& m) {
    using tiers::BlockPool;
    nb::class_<BlockPool>(m, "BlockPool", "Which key is in which block; `memlane.tiers.BlockPool` checks its arguments.")
        .def(nb::init<std::uint32_t, const std::string&>(), "blocks"_a, "policy"_a)
        .def("pin", [](BlockPool& pool, nb::handle keys) { return as_bytes(pool.pin(AskedKeys(keys).asked())); }, "keys"_a)
        .def("unpin", [](BlockPool& pool, const nb::bytes& blocks) { pool.unpin(blocks_in(blocks)); }, "blocks"_a)
        .def("touch", [](BlockPool& pool, nb::handle keys) { pool.touch(AskedKeys(keys).asked()); }, "keys"_a)
        .def(
            "reserve",
            [](BlockPool& pool, nb::handle keys) {
                const AskedKeys asked(keys);
                nb::typed<nb::list, nb::bytes> evicted;
                const auto blocks = pool.reserve(asked.asked(), [&](tiers::KeyStore::Bytes key) {
                    evicted.append(nb::bytes(key.data(), key.size()));
                });
                return std::pair(as_bytes(blocks), evicted);
            },
            "keys"_a, "The block of each key, -1 if it was skipped; and the keys that were evicted.")
        .def(
            "commit",
            [](BlockPool& pool, const nb::bytes& blocks, const nb::bytes& mask) {
                const auto* const flags = reinterpret_cast<const bool*>(mask.c_str());
                pool.commit(blocks_in(blocks), {flags, mask.size()});
            },
            "blocks"_a, "mask"_a)
        .def("forget", [](BlockPool& pool, nb::handle keys) { pool.forget(AskedKeys(keys).asked()); }, "keys"_a)
        .def("clear", &BlockPool::clear)
        .def("statistics", &statistics)
        .def(
            "forecast", [](BlockPool& pool, std::uint32_t more) { return counted(pool.forecast(more)); }, "more_blocks"_a,
            "Counts of a pool with so many blocks more, since it was first asked for.")
        .def("settle", [](BlockPool& pool) {
            if (tiers::TunerFeed* const feed = pool.tuner()) without_gil([&] { feed->settle(); });
        });

    using tiers::Replay;
    nb::class_<Replay>(m, "Replay", "A policy alone, on a trace; `python -m memlane.tiers.replay` runs it.")
        .def(nb::init<const std::string&, std::uint32_t>(), "policy"_a, "blocks"_a)
        .def(
            "request",
            [](Replay& replay, const std::vector<std::int64_t>& ids) {
                std::vector<tiers::Key> keys;
                for (const std::int64_t id : ids) keys.push_back(tiers::mixed(static_cast<std::uint64_t>(id)));
                without_gil([&] { replay.request(keys); });
            },
            "ids"_a)
        .def("counts", [](const Replay& replay) { return counted(replay.counts()); });
}

}  // namespace memlane::bindings
