// A shared mapping of a part of a file.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>

#include "os/file.hpp"

namespace memlane::os {

inline constexpr std::size_t kHugePage = 2u << 20;  // of x86-64, and of aarch64 with pages of 4 KiB

// For private memory of 2 MiB and more. Only advice: if the kernel refuses it, the pages are small.
inline void prefer_huge_pages(void* memory, std::size_t bytes) noexcept { ::madvise(memory, bytes, MADV_HUGEPAGE); }

// Keeps memory out of core dumps, which hold what users have sent, and would be as large as all segments. Only advice.
// MEMLANE_CORE_DUMPS=1, as it is when the process first maps memory, leaves it in them.
inline void keep_from_core_dumps(void* memory, std::size_t bytes) noexcept {
    static const bool wanted = [] {
        const char* const value = std::getenv("MEMLANE_CORE_DUMPS");
        return value != nullptr && std::strcmp(value, "1") == 0;
    }();
    if (!wanted) ::madvise(memory, bytes, MADV_DONTDUMP);
}

// Private memory in huge pages, which forked children do not have: a fork would copy all that the kernel has pinned, at
// once (32 MiB: 60 ms).
class OwnMemory {
public:
    explicit OwnMemory(std::size_t bytes) : bytes_(bytes) {
        mapped_ = ::mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (mapped_ == MAP_FAILED) throw_errno("cannot map " + std::to_string(bytes) + " bytes");
        base_ = static_cast<std::byte*>(mapped_) + (kHugePage - reinterpret_cast<std::uintptr_t>(mapped_) % kHugePage);
        prefer_huge_pages(base_, bytes);
        ::madvise(mapped_, bytes + kHugePage, MADV_DONTFORK);
        keep_from_core_dumps(mapped_, bytes + kHugePage);
    }
    OwnMemory(const OwnMemory&) = delete;
    OwnMemory& operator=(const OwnMemory&) = delete;
    ~OwnMemory() { ::munmap(mapped_, bytes_ + kHugePage); }

    std::byte* data() const noexcept { return base_; }
    std::size_t bytes() const noexcept { return bytes_; }

private:
    std::size_t bytes_;
    void* mapped_ = nullptr;
    std::byte* base_ = nullptr;
};

class Mapping {
public:
    enum class Access { read, write };
    enum class Aligned { to_pages, to_huge_pages };

    // `offset` need not be aligned, whatever the machine's page size. The range may extend beyond the file's end, but
    // that part must not be touched before the file grows. Huge pages of the file are mapped as such only at addresses
    // that are aligned as they are in the file.
    Mapping(const FileDescriptor& file, std::size_t bytes, std::uint64_t offset = 0, Access access = Access::write,
            Aligned aligned = Aligned::to_pages)
        : before_(offset % page_bytes()), bytes_(bytes) {
        const int protection = access == Access::write ? PROT_READ | PROT_WRITE : PROT_READ;
        const auto from = static_cast<off_t>(offset - before_);
        void* const at = aligned == Aligned::to_pages ? nullptr : aligned_room(before_ + bytes, static_cast<std::uint64_t>(from));
        void* first = ::mmap(at, before_ + bytes, protection, MAP_SHARED | (at != nullptr ? MAP_FIXED : 0), file.get(), from);
        if (first == MAP_FAILED) throw_errno("cannot map " + std::to_string(bytes) + " bytes");
        base_ = static_cast<std::byte*>(first) + before_;
        keep_from_core_dumps(first, before_ + bytes);
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() { ::munmap(base_ - before_, before_ + bytes_); }

    static std::size_t page_bytes() noexcept { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

    std::byte* base() const noexcept { return base_; }
    std::size_t bytes() const noexcept { return bytes_; }

    // A forked child does not have it.
    void keep_from_children() const {
        if (::madvise(first_page(), before_ + bytes_, MADV_DONTFORK) != 0) throw_errno("cannot keep memory from forked children");
    }

    // Frees `other` once nothing needs this mapping any more.
    void keep(std::shared_ptr<void> other) noexcept { kept_ = std::move(other); }

    // Populates pages, so that the first message does not pay for page faults (they cost five times its copy). False if
    // the kernel does not support it (before 5.14); the faults then come later.
    bool populate(std::size_t offset, std::size_t bytes) const { return advise(kMadvPopulateWrite, offset, bytes); }

    // The same for pages that another process has populated, in half the time: a
    // read fault maps sixteen of them. A later write causes no fault either,
    // because tmpfs does not track dirty pages. Slower if pages are only reserved.
    bool populate_again(std::size_t offset, std::size_t bytes) const { return advise(kMadvPopulateRead, offset, bytes); }
    bool was_populated(std::size_t offset) const noexcept {
        unsigned char page = 0;
        return ::mincore(first_page() + pages_of(offset, 1).first, 1, &page) == 0 && (page & 1) != 0;
    }

    // The same, by an atomic write to every page that changes nothing,
    // even if others write to it concurrently. The pages must have space.
    void touch(std::size_t offset, std::size_t bytes) const noexcept {
        const auto [from, to] = pages_of(offset, bytes);
        for (std::size_t at = from; at < to; at += page_bytes()) {
            std::atomic_ref<unsigned char> byte(reinterpret_cast<unsigned char&>(first_page()[at]));
            unsigned char seen = byte.load(std::memory_order_relaxed);
            while (!byte.compare_exchange_weak(seen, seen, std::memory_order_relaxed)) {
            }
        }
    }

    // Makes one huge page of these bytes, zeroes where there is nothing yet, and maps it; nothing else may have changed if
    // it returns false, as where there is no free one (Linux before 6.1 never has one). `offset` is a multiple of kHugePage.
    bool make_huge(std::size_t offset) const noexcept { return ::madvise(base_ + offset, kHugePage, kMadvCollapse) == 0; }

    // Applies to the whole mapping. Call it before populating. Only advice, as above.
    void advise_huge_pages(bool wanted) const noexcept {
        ::madvise(first_page(), before_ + bytes_, wanted ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    }

private:
    static constexpr int kMadvPopulateRead = 22;
    static constexpr int kMadvPopulateWrite = 23;
    static constexpr int kMadvCollapse = 25;

    // Reserves addresses, of which the first is a huge page's where the file has the beginning of one. nullptr: there are none.
    static void* aligned_room(std::size_t bytes, std::uint64_t offset) noexcept {
        const std::size_t pages = (bytes + page_bytes() - 1) / page_bytes() * page_bytes();
        void* const room = ::mmap(nullptr, pages + kHugePage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (room == MAP_FAILED) return nullptr;
        const std::size_t skipped = (offset - reinterpret_cast<std::uintptr_t>(room)) % kHugePage;
        std::byte* const first = static_cast<std::byte*>(room) + skipped;
        if (skipped > 0) ::munmap(room, skipped);
        ::munmap(first + pages, kHugePage - skipped);
        return first;
    }

    bool advise(int advice, std::size_t offset, std::size_t bytes) const {
        const auto [from, to] = pages_of(offset, bytes);
        while (::madvise(first_page() + from, to - from, advice) != 0) {
            if (errno == EINTR || errno == EAGAIN) continue;
            if (errno == EINVAL) return false;
            throw_errno("cannot populate " + std::to_string(bytes) + " bytes of a segment");
        }
        return true;
    }
    std::byte* first_page() const noexcept { return base_ - before_; }
    // The pages of these bytes: begin and end, relative to first_page().
    std::pair<std::size_t, std::size_t> pages_of(std::size_t offset, std::size_t bytes) const noexcept {
        const auto round_up = [page = page_bytes()](std::size_t at) { return (at + page - 1) / page * page; };
        const std::size_t from = before_ + offset;
        return {from / page_bytes() * page_bytes(), std::min(round_up(from + bytes), round_up(before_ + bytes_))};
    }

    std::size_t before_;  // bytes of the first page before `base_`
    std::byte* base_ = nullptr;
    std::size_t bytes_ = 0;
    std::shared_ptr<void> kept_;
};

}  // namespace memlane::os
