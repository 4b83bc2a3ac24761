// The pool of blocks and the replay of a trace, for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/python/call_guard.hpp"
#include "bindings/python/failures.hpp"
#include "bindings/python/gil.hpp"
#include "bindings/python/systems.hpp"
#include "bindings/tiers/asked_keys.hpp"
#include "bindings/tiers/pool_object.hpp"
#include "tiers/block_pool.hpp"
#include "tiers/replay.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

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

// Keys that a call evicts, and their blocks. Python objects are made afterwards: collecting garbage may run any code, which would let other
// threads call the pool.
class Evicted {
public:
    auto into() {
        return [this](tiers::KeyStore::Bytes key, tiers::Block block) {
            keys_.emplace_back(reinterpret_cast<const char*>(key.data()), key.size());
            blocks_.push_back(block);
        };
    }
    // -1 for those that are in use again.
    std::vector<tiers::Block> aside(const tiers::BlockPool& pool) const {
        std::vector<tiers::Block> made = blocks_;
        for (tiers::Block& block : made)
            if (!pool.is_aside(block)) block = tiers::kNoBlock;
        return made;
    }
    nb::typed<nb::list, nb::bytes> list() const {
        nb::typed<nb::list, nb::bytes> made;
        for (const std::string& key : keys_) made.append(nb::bytes(key.data(), key.size()));
        return made;
    }

private:
    std::vector<std::string> keys_;
    std::vector<tiers::Block> blocks_;
};

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
    static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&PoolObject::traverse)}, {0, nullptr}};
    nb::class_<PoolObject>(m, "BlockPool", nb::type_slots(slots),
                           "Which key is in which block; `memlane.tiers.BlockPool` checks its arguments.")
        .def(nb::init<std::uint32_t, nb::object>(), "blocks"_a, "policy"_a)
        .def(
            "pin",
            [](PoolObject& self, nb::handle keys) {
                const AskedKeys asked(keys);
                return as_bytes(self.call([&](BlockPool& pool) { return pool.pin(asked.asked()); }));
            },
            "keys"_a)
        .def(
            "unpin",
            [](PoolObject& self, const nb::bytes& blocks) {
                self.pool().unpin(blocks_in(blocks));
            },
            "blocks"_a, "Also while another call is under way: a pin may be dropped at any time.")
        .def(
            "touch",
            [](PoolObject& self, nb::handle keys) {
                const AskedKeys asked(keys);
                self.call([&](BlockPool& pool) { pool.touch(asked.asked()); });
            },
            "keys"_a)
        .def(
            "reserve",
            [](PoolObject& self, nb::handle keys) {
                const AskedKeys asked(keys);
                Evicted evicted;
                const auto blocks = self.call([&](BlockPool& pool) { return pool.reserve(asked.asked(), evicted.into()); });
                return std::tuple(as_bytes(blocks), evicted.list(), as_bytes(evicted.aside(self.pool())));
            },
            "keys"_a,
            "The block of each key, -1 if it was skipped; what was evicted; where that is aside, or -1.")
        .def(
            "has",
            [](PoolObject& self, nb::handle keys) {
                const AskedKeys asked(keys);
                return self.call([&](BlockPool& pool) {
                    std::vector<bool> stored;
                    for (const BlockPool::Asked& key : asked.asked()) stored.push_back(pool.stored(key) != tiers::kNoBlock);
                    return stored;
                });
            },
            "keys"_a)
        .def(
            "set_aside",
            [](PoolObject& self, std::size_t count) { return self.call([&](BlockPool& pool) { return pool.set_aside(count); }); },
            "count"_a, "So many free blocks are spare, as far as there are; returns how many.")
        .def(
            "aside",
            [](PoolObject& self) {
                return as_bytes(self.call([](BlockPool& pool) {
                    const auto blocks = pool.aside();
                    return std::vector(blocks.begin(), blocks.end());
                }));
            },
            "The blocks that hold what was evicted.")
        .def(
            "reuse",
            [](PoolObject& self, const nb::bytes& blocks) {
                self.call([&](BlockPool& pool) { pool.reuse(blocks_in(blocks)); });
            },
            "blocks"_a, "Those that are aside are spare.")
        .def(
            "commit",
            [](PoolObject& self, const nb::bytes& blocks, const nb::bytes& mask) {
                const auto* const flags = reinterpret_cast<const bool*>(mask.c_str());
                self.call([&](BlockPool& pool) { pool.commit(blocks_in(blocks), {flags, mask.size()}); });
            },
            "blocks"_a, "mask"_a)
        .def(
            "give_back", [](PoolObject& self, const nb::bytes& blocks) { self.pool().give_back(blocks_in(blocks)); },
            "blocks"_a, "What was reserved and will not be committed; also while another call is under way.")
        .def(
            "insert",
            [](PoolObject& self, nb::handle keys) {
                const AskedKeys asked(keys);
                const bool is_done = self.call([&](BlockPool& pool) {
                    return std::ranges::all_of(asked.asked(), [&](const BlockPool::Asked& key) { return pool.insert(key); });
                });
                if (!is_done) raise_error(Error::InvalidArgument, nb::str("no block is free, or the key is there already"));
            },
            "keys"_a, "Stores and pins keys that are not there, in blocks that are free.")
        .def(
            "evict",
            [](PoolObject& self, std::size_t count, nb::handle kept) {
                const AskedKeys asked(kept);
                Evicted evicted;
                const bool is_done =
                    self.call([&](BlockPool& pool) { return pool.evict(count, asked.asked(), evicted.into()); });
                return is_done ? std::optional(evicted.list()) : std::nullopt;
            },
            "count"_a, "kept"_a, "The keys of so many blocks that are not pinned, nor of `kept`; None: there are less.")
        .def(
            "set_pinned",
            [](PoolObject& self, nb::handle keys, bool is_pinned) {
                const AskedKeys asked(keys);
                self.call([&](BlockPool& pool) {
                    if (is_pinned) {
                        pool.pin_each(asked.asked(), false);
                        return;
                    }
                    std::vector<tiers::Block> blocks;
                    for (const BlockPool::Asked& key : asked.asked()) blocks.push_back(pool.stored(key));
                    std::erase_if(blocks, [&](tiers::Block block) {
                        return block == tiers::kNoBlock || !pool.is_pinned(block);
                    });
                    pool.unpin(blocks);
                });
            },
            "keys"_a, "is_pinned"_a)
        .def(
            "forget",
            [](PoolObject& self, nb::handle keys) {
                const AskedKeys asked(keys);
                self.call([&](BlockPool& pool) { pool.forget(asked.asked()); });
            },
            "keys"_a)
        .def("show", &PoolObject::show, "id"_a, "name"_a, "Lets `memlane.inspect` see its counters.")
        .def("clear", [](PoolObject& self) { self.call([](BlockPool& pool) { pool.clear(); }); })
        .def("statistics", [](const PoolObject& self) { return statistics(self.pool()); })
        .def(
            "forecast",
            [](PoolObject& self, std::uint32_t more) {
                return counted(self.call([&](BlockPool& pool) { return pool.forecast(more); }));
            },
            "more_blocks"_a, "Counts of a pool with so many blocks more, since it was first asked for.");

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
