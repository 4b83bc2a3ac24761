// The pool of blocks and the replay of a trace, for Python. Block numbers are passed as arrays of int32, as bytes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bindings/python/call_guard.hpp"
#include "bindings/python/failures.hpp"
#include "bindings/python/gil.hpp"
#include "bindings/python/systems.hpp"
#include "tiers/block_pool.hpp"
#include "tiers/replay.hpp"

namespace memlane::bindings {

namespace nb = nanobind;
using namespace nb::literals;

namespace {

tiers::Key hash_of(nb::handle key) noexcept {
    // That of bytes themselves, whatever a subclass says: no Python code runs here.
    return tiers::mixed(static_cast<std::uint64_t>(PyBytes_Type.tp_hash(key.ptr())));
}

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
            asked_.push_back({hash_of(key), {data, size}});
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

nb::bytes bytes_of(tiers::KeyStore::Bytes key) { return nb::bytes(key.data(), key.size()); }

// A policy of the user's: `memlane.tiers.Policy`. It learns keys when they are reserved.
class PythonPolicy final : public tiers::Policy {
public:
    explicit PythonPolicy(nb::object policy) : policy_(std::move(policy)) {}

    void of(const tiers::BlockPool& pool) noexcept { pool_ = &pool; }
    nb::handle object() const noexcept { return policy_; }

    void touch(tiers::Block block) override { policy_.attr("touch")(bytes_of(pool_->key_of(block))); }
    tiers::Admission admit(tiers::Key) override { return tiers::Admission::kNew; }
    tiers::Admission admit(tiers::Key, std::span<const std::byte> bytes) override {
        incoming_ = bytes_of(bytes);
        return tiers::Admission::kNew;
    }

    tiers::Block victim(tiers::Admission, tiers::Pins) override {
        // Whoever keeps the function beyond the call may outlive the pool: no key is free then.
        const auto here = std::make_shared<const PythonPolicy*>(this);
        const struct End {
            const PythonPolicy*& here;
            ~End() { here = nullptr; }
        } end{*here};
        const nb::object is_free = nb::cpp_function([here](nb::handle key) {
            if (*here == nullptr) return false;
            const tiers::Block block = (*here)->find(key);
            return block != tiers::kNoBlock && !(*here)->pool_->is_pinned(block);
        });
        const nb::object evicted = policy_.attr("evict")(incoming_, is_free);
        if (evicted.is_none()) return tiers::kNoBlock;
        const tiers::Block block = find(evicted);
        if (block == tiers::kNoBlock || pool_->is_pinned(block)) {
            raise_error(Error::InvalidArgument, nb::str("evict() returned {!r}, which is not stored, or is pinned")
                                                    .attr("format")(evicted));
        }
        return block;
    }

    bool reserve(tiers::Block block) override {
        return nb::cast<bool>(nb::bool_(policy_.attr("insert")(bytes_of(pool_->key_of(block)))));
    }
    void give_back(tiers::Block block) override { remove(block); }
    void insert(tiers::Key, tiers::Block, tiers::Admission) override {}
    void unpinned(tiers::Block) override {}

    // What the pool has dropped cannot be had back, so an error is reported as one of a finalizer.
    void remove(tiers::Block block) override {
        try {
            policy_.attr("remove")(bytes_of(pool_->key_of(block)));
        } catch (nb::python_error& error) {
            error.discard_as_unraisable(policy_);
        }
    }

    void clear() override { policy_.attr("clear")(); }

private:
    tiers::Block find(nb::handle key) const {
        if (!PyBytes_Check(key.ptr())) return tiers::kNoBlock;
        const auto* const data = reinterpret_cast<const std::byte*>(PyBytes_AS_STRING(key.ptr()));
        return pool_->stored({hash_of(key), {data, static_cast<std::size_t>(PyBytes_GET_SIZE(key.ptr()))}});
    }

    nb::object policy_;
    nb::object incoming_;
    const tiers::BlockPool* pool_ = nullptr;
};

// A pool that calls back is not called meanwhile, by the policy or by another thread.
class PoolObject {
public:
    PoolObject(std::uint32_t blocks, nb::object policy) {
        if (nb::isinstance<nb::str>(policy)) {
            pool_ = std::make_unique<tiers::BlockPool>(blocks, nb::cast<std::string>(policy));
            return;
        }
        auto python = std::make_unique<PythonPolicy>(std::move(policy));
        python_ = python.get();
        pool_ = std::make_unique<tiers::BlockPool>(blocks, std::move(python));
        python_->of(*pool_);
    }

    template <class Call>
    auto call(const Call& work) {
        if (!one_.begin()) raise_error(Error::ConcurrentUse, nb::str("another call of this pool is under way"));
        const struct End {
            OneCall& one;
            ~End() { one.end(); }
        } end{one_};
        return work(*pool_);
    }

    tiers::BlockPool& pool() const noexcept { return *pool_; }

    static int traverse(PyObject* self, visitproc visit, void* arg) noexcept {
        Py_VISIT(Py_TYPE(self));
        if (!nb::inst_ready(self)) return 0;
        const auto* const pool = nb::inst_ptr<PoolObject>(self);
        if (pool->python_ != nullptr) Py_VISIT(pool->python_->object().ptr());
        return 0;
    }

private:
    std::unique_ptr<tiers::BlockPool> pool_;
    PythonPolicy* python_ = nullptr;
    OneCall one_;
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
                return self.call([&](BlockPool& pool) { return as_bytes(pool.pin(asked.asked())); });
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
                return self.call([&](BlockPool& pool) {
                    nb::typed<nb::list, nb::bytes> evicted;
                    const auto blocks = pool.reserve(
                        asked.asked(), [&](tiers::KeyStore::Bytes key) { evicted.append(bytes_of(key)); });
                    return std::pair(as_bytes(blocks), evicted);
                });
            },
            "keys"_a, "The block of each key, -1 if it was skipped; and the keys that were evicted.")
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
            "forget",
            [](PoolObject& self, nb::handle keys) {
                const AskedKeys asked(keys);
                self.call([&](BlockPool& pool) { pool.forget(asked.asked()); });
            },
            "keys"_a)
        .def("clear", [](PoolObject& self) { self.call([](BlockPool& pool) { pool.clear(); }); })
        .def("statistics", [](const PoolObject& self) { return statistics(self.pool()); })
        .def(
            "forecast",
            [](PoolObject& self, std::uint32_t more) {
                return self.call([&](BlockPool& pool) { return counted(pool.forecast(more)); });
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
