// A pool of blocks, and a policy of the user's behind it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>

#include "bindings/python/call_guard.hpp"
#include "bindings/python/failures.hpp"
#include "bindings/tiers/asked_keys.hpp"
#include "tiers/block_pool.hpp"
#include "tiers/shown_facts.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

inline nb::bytes bytes_of(tiers::KeyStore::Bytes key) { return nb::bytes(key.data(), key.size()); }

// A policy of the user's: `memlane.tiers.Policy`. It learns keys when they are reserved.
class PythonPolicy final : public tiers::Policy {
public:
    explicit PythonPolicy(nb::object policy) : policy_(std::move(policy)) {}

    void of(const tiers::BlockPool& pool) noexcept { pool_ = &pool; }
    nb::handle object() const noexcept { return policy_; }

    void touch(tiers::Block block) override { policy_.attr("touch")(bytes_of(pool_->key_of(block))); }
    tiers::Admission admit(tiers::Key) override { return tiers::Admission::kNew; }

    tiers::Block victim(tiers::Admission, tiers::Pins) override { return tiers::kNoBlock; }
    tiers::Block victim(tiers::Admission, tiers::Pins, std::span<const std::byte> incoming) override {
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
        const nb::object evicted = policy_.attr("evict")(bytes_of(incoming), is_free);
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
    const tiers::BlockPool* pool_ = nullptr;
};

inline core::SegmentId id_from(const nb::bytes& bytes) {
    core::SegmentId id{};
    std::memcpy(id.data(), bytes.c_str(), std::min(id.size(), bytes.size()));
    return id;
}

// A pool that calls back is not called meanwhile, by the policy or by another thread.
class PoolObject {
public:
    PoolObject(std::uint32_t blocks, nb::object policy) {
        if (blocks == 0) raise_error(Error::InvalidArgument, nb::str("a pool needs a block"));
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
        struct Publish {
            const PoolObject& self;
            ~Publish() { self.publish(); }
        } publish{*this};
        return work(*pool_);
    }

    void show(const nb::bytes& id, const std::string& name, const std::string& label) {
        shown_.show(id_from(id), name, label, pool_->blocks(), 0);
        publish();
    }

    tiers::BlockPool& pool() const noexcept { return *pool_; }

    static int traverse(PyObject* self, visitproc visit, void* arg) noexcept {
        Py_VISIT(Py_TYPE(self));
        if (!nb::inst_ready(self)) return 0;
        const auto* const pool = nb::inst_ptr<PoolObject>(self);
        if (pool->python_ != nullptr) Py_VISIT(pool->python_->object().ptr());
        return 0;
    }

    // For the garbage collector.
    nb::handle policy() const noexcept { return python_ == nullptr ? nb::handle() : python_->object(); }

private:
    void publish() const noexcept { shown_.publish(tiers::ShownFacts::of(*pool_)); }

    tiers::ShownFacts shown_;
    std::unique_ptr<tiers::BlockPool> pool_;
    PythonPolicy* python_ = nullptr;
    OneCall one_;
};

}  // namespace memlane::bindings
