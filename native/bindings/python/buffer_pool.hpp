// Memory for arrays that readers own, recycled when the last reference to an array is dropped.
//
// The C library maps fresh pages for every large allocation and unmaps them when it is freed; faulting them in
// costs more than the copy into them. Protected by the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>

#include "bindings/python/buffer.hpp"
#include "core/layout.hpp"
#include "os/mapping.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class BufferPool {
public:
    // Never destroyed: arrays may outlive static destructors.
    static BufferPool& instance() {
        static auto* const pool = new BufferPool;
        return *pool;
    }

    struct Block {
        void* memory;
        std::size_t bytes;
    };

    Block take(std::size_t bytes) {
        const std::size_t rounded = round(bytes);
        if (rounded < bytes) throw std::bad_alloc();
        const auto at = free_.lower_bound(rounded);
        if (at != free_.end() && at->first <= rounded + rounded / 4) {
            const Block block{at->second, at->first};
            kept_ -= block.bytes;
            free_.erase(at);
            return block;
        }
        const std::size_t alignment = rounded >= kHugePage ? kHugePage : core::kCacheLine;
        void* memory = std::aligned_alloc(alignment, rounded);
        if (memory == nullptr) {
            drop_all();
            memory = std::aligned_alloc(alignment, rounded);
        }
        if (memory == nullptr) throw std::bad_alloc();
        if (rounded >= kHugePage) os::prefer_huge_pages(memory, rounded);
        return {memory, rounded};
    }

    void give_back(const Block& block) noexcept {
        if (kept_ + block.bytes > kMostKept) {
            std::free(block.memory);
            return;
        }
        try {
            free_.emplace(block.bytes, block.memory);
            kept_ += block.bytes;
        } catch (const std::bad_alloc&) {
            std::free(block.memory);
        }
    }

private:
    static constexpr std::size_t kHugePage = 2u << 20;
    static constexpr std::size_t kMostKept = 256u << 20;

    void drop_all() noexcept {
        for (const auto& [bytes, memory] : free_) std::free(memory);
        free_.clear();
        kept_ = 0;
    }

    static std::size_t round(std::size_t bytes) noexcept {
        return core::align_up(std::max<std::size_t>(bytes, 1), bytes >= kHugePage ? kHugePage : 4096);
    }

    std::multimap<std::size_t, void*> free_;
    std::size_t kept_ = 0;
};

// Private, writable, aligned to 64 bytes; the base of the arrays made from it.
inline Buffer pooled_buffer(std::size_t bytes) {
    const BufferPool::Block block = BufferPool::instance().take(bytes);
    return {std::shared_ptr<void>(block.memory, [block](void*) { BufferPool::instance().give_back(block); }), block.memory,
            bytes, false};
}

inline void bind_buffer_pool(nb::module_& m) {
    m.def("pooled", &pooled_buffer, nb::arg("nbytes"),
          "Private, writable memory from a pool, with undefined contents.");
}

}  // namespace memlane::bindings
