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

// Blocks of a pool that somebody holds, until this object is gone at the latest. It exists as soon as they are held, and
// holds none as soon as they are given back: a signal's handler that raises comes before, or after.
class HeldBlocks {
public:
    HeldBlocks(nb::object pool, std::vector<tiers::Block> blocks) : pool_(std::move(pool)), blocks_(std::move(blocks)) {
        std::erase(blocks_, tiers::kNoBlock);
    }

    nb::bytes blocks() const { return as_bytes(blocks_); }

protected:
    // In a forked child there is nothing to give back.
    bool is_own() const noexcept { return generation_ == os::fork_generation().load(); }
    PoolObject& pool() const { return *nb::inst_ptr<PoolObject>(pool_); }
    std::vector<tiers::Block> taken() noexcept { return std::exchange(blocks_, {}); }

    nb::object pool_;
    std::vector<tiers::Block> blocks_;

private:
    std::uint64_t generation_ = os::fork_generation().load();
};

class PinnedBlocks : public HeldBlocks {
public:
    using HeldBlocks::HeldBlocks;
    PinnedBlocks(PinnedBlocks&&) = default;
    ~PinnedBlocks() { release(); }

    void release() {
        if (is_own() && !blocks_.empty()) pool().pool().unpin(taken());
    }
    void take(PinnedBlocks& other) {
        if (&other == this) return;
        blocks_.insert(blocks_.end(), other.blocks_.begin(), other.blocks_.end());
        other.blocks_.clear();
    }
};

class ReservedBlocks : public HeldBlocks {
public:
    using HeldBlocks::HeldBlocks;
    ReservedBlocks(ReservedBlocks&&) = default;
    ~ReservedBlocks() { release(); }

    void commit(const nb::bytes& mask) {
        if (!is_open_) {
            raise_error(Error::InvalidArgument, nb::str("this reservation has been committed or given back already"));
        }
        const auto* const flags = reinterpret_cast<const bool*>(mask.c_str());
        pool().call([&](tiers::BlockPool& pool) {
            is_open_ = false;
            const std::vector<tiers::Block> all = taken();
            pool.commit(all, {flags, mask.size()});
        });
    }
    void release() {
        is_open_ = false;
        if (is_own() && !blocks_.empty()) pool().pool().give_back(taken());
    }

private:
    bool is_open_ = true;
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
    made["dropped"] = counts.dropped;
    made["left_out"] = counts.left_out;
    return made;
}

}  // namespace

void bind_tiers(nb::module_& m) {
    using tiers::BlockPool;
    nb::class_<PinnedBlocks>(m, "PinnedBlocks", "`memlane.tiers.Pin`.")
        .def("blocks", &PinnedBlocks::blocks)
        .def("take", &PinnedBlocks::take, "other"_a, "Those of the other, too, which has none from now on.")
        .def("release", &PinnedBlocks::release);
    nb::class_<ReservedBlocks>(m, "ReservedBlocks", "`memlane.tiers.Reservation`.")
        .def("blocks", &ReservedBlocks::blocks)
        .def("commit", &ReservedBlocks::commit, "mask"_a)
        .def("release", &ReservedBlocks::release);

    static PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(&PoolObject::traverse)}, {0, nullptr}};
    nb::class_<PoolObject>(m, "BlockPool", nb::type_slots(slots),
                           "Which key is in which block; `memlane.tiers.BlockPool` checks its arguments.")
        .def(nb::init<std::uint32_t, nb::object>(), "blocks"_a, "policy"_a)
        .def(
            "pin",
            [](nb::handle_t<PoolObject> self, nb::handle keys) {
                const AskedKeys asked(keys);
                PoolObject& own = *nb::inst_ptr<PoolObject>(self);
                return PinnedBlocks(nb::borrow(self), own.call([&](BlockPool& pool) { return pool.pin(asked.asked()); }));
            },
            "keys"_a)
        .def(
            "touch",
            [](PoolObject& self, nb::handle keys) {
                const AskedKeys asked(keys);
                self.call([&](BlockPool& pool) { pool.touch(asked.asked()); });
            },
            "keys"_a)
        .def(
            "reserve",
            [](nb::handle_t<PoolObject> self, nb::handle keys) {
                const AskedKeys asked(keys);
                PoolObject& own = *nb::inst_ptr<PoolObject>(self);
                Evicted evicted;
                const auto blocks = own.call([&](BlockPool& pool) { return pool.reserve(asked.asked(), evicted.into()); });
                return std::tuple(ReservedBlocks(nb::borrow(self), blocks), as_bytes(blocks), evicted.list(),
                                  as_bytes(evicted.aside(own.pool())));
            },
            "keys"_a,
            "Blocks; of each key, -1 if it was skipped; what was evicted; where that is aside, or -1.")
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
            "pin_stored",
            [](nb::handle_t<PoolObject> self, tiers::Block next, std::size_t most) {
                PoolObject& own = *nb::inst_ptr<PoolObject>(self);
                std::vector<std::string> keys;
                const auto blocks = own.call([&](BlockPool& pool) {
                    const auto pinned = pool.pin_stored(next, most);
                    for (const tiers::Block block : pinned) {
                        const tiers::KeyStore::Bytes key = pool.key_of(block);
                        keys.emplace_back(reinterpret_cast<const char*>(key.data()), key.size());
                    }
                    return pinned;
                });
                PinnedBlocks held(nb::borrow(self), blocks);
                nb::typed<nb::list, nb::bytes> made;
                for (const std::string& key : keys) made.append(nb::bytes(key.data(), key.size()));
                return std::tuple(std::move(held), made, next);
            },
            "next"_a, "most"_a,
            "Pins up to `most` stored blocks from `next` on: the pin, their keys, where to go on.")
        // Without a guard: it calls nothing, and must not be refused beside a call that waits for a user's policy.
        .def(
            "count_dropped", [](PoolObject& self, std::uint64_t blocks) { self.pool().count_dropped(blocks); },
            "blocks"_a, "Counts evicted blocks that were lost.")
        .def(
            "set_left_out", [](PoolObject& self, std::uint32_t tiers) { self.pool().set_left_out(tiers); }, "tiers"_a,
            "Shows how many tiers behind the pool are not tried for now.")
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
        .def("show", &PoolObject::show, "id"_a, "name"_a, "label"_a, "Lets `memlane.inspect` see its counters.")
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
