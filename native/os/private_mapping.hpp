// A private mapping of a file that others keep writing to: reads see the file, writes stay private.
//
// A write copies its page, which then no longer follows the file. /proc/self/pagemap shows which pages are such copies:
// present (bit 63) or swapped out (62), and not backed by the file (61).
// https://docs.kernel.org/admin-guide/mm/pagemap.html
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "os/file.hpp"
#include "os/fork.hpp"
#include "os/mapping.hpp"

namespace memlane::os {

class PrivateMapping {
public:
    // `offset` must be a multiple of the page size. Pages are charged only once they are written to. The mapping is exempt
    // from an earlier mlockall(), which would copy every page at once.
    PrivateMapping(const FileDescriptor& file, std::size_t bytes, std::uint64_t offset) : bytes_(bytes) {
        void* base = ::mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_NORESERVE, file.get(), static_cast<off_t>(offset));
        if (base == MAP_FAILED) throw_errno("cannot map " + std::to_string(bytes) + " bytes");
        base_ = static_cast<std::byte*>(base);
        keep_from_core_dumps(base, bytes);
        if (::munlock(base, bytes) == 0 && ::mprotect(base, bytes, PROT_READ | PROT_WRITE) == 0) return;
        const int error = errno;
        ::munmap(base, bytes);
        throw_errno("cannot map " + std::to_string(bytes) + " bytes", error);
    }
    PrivateMapping(const PrivateMapping&) = delete;
    PrivateMapping& operator=(const PrivateMapping&) = delete;
    ~PrivateMapping() { ::munmap(base_, bytes_); }

    std::byte* base() const noexcept { return base_; }
    std::size_t bytes() const noexcept { return bytes_; }

    // Frees `other` once nothing needs this mapping any more.
    void keep(std::shared_ptr<void> other) noexcept { kept_ = std::move(other); }

    // Drops the copies in a range of whole pages, so that it shows the file again. False if that fails. If pagemap
    // cannot be read, drops all pages of the range, not only the copies. One call at a time, and no fork meanwhile.
    bool drop_copies(std::size_t offset, std::size_t bytes) noexcept {
        const std::size_t page = Mapping::page_bytes();
        const std::size_t end = offset + bytes;
        bool is_done = true;
        std::uint64_t entries[1024];
        for (std::size_t at = offset; at < end;) {
            const std::size_t count = std::min(std::size(entries), (end - at) / page);
            if (!read_pagemap(base_ + at, entries, count)) {
                is_done &= drop(at, end - at);
                break;
            }
            for (std::size_t i = 0; i < count;) {
                std::size_t run = i;
                while (run < count && is_copy(entries[run])) ++run;
                if (run > i) is_done &= drop(at + i * page, (run - i) * page);
                i = run + 1;
            }
            at += count * page;
        }
        return is_done;
    }

    // Copies every page of the range that is not a copy yet. The range then no longer depends on the file. False if some
    // page could not be copied.
    bool copy_all(std::size_t offset, std::size_t bytes) const noexcept {
        const auto begin = reinterpret_cast<std::uintptr_t>(base_ + offset);
        if (can_populate() && populate(begin, begin + bytes)) return true;
        // Pages that somebody has made read-only are writable for a moment.
        try {
            const std::vector<Protected> pages = not_writable(begin, begin + bytes);
            bool is_done = true;
            for (const Protected& one : pages) is_done &= protect(one, one.protection | PROT_READ | PROT_WRITE);
            if (is_done && can_populate())
                is_done = populate(begin, begin + bytes);
            else if (is_done)
                touch(begin, begin + bytes);
            for (const Protected& one : pages) protect(one, one.protection);
            return is_done;
        } catch (const std::exception&) {  // there is no /proc, descriptor or memory
            return false;
        }
    }

private:
    static constexpr std::uint64_t kPresent = std::uint64_t{1} << 63;
    static constexpr std::uint64_t kSwapped = std::uint64_t{1} << 62;
    static constexpr std::uint64_t kOfFile = std::uint64_t{1} << 61;

    struct Protected {
        std::uintptr_t begin, end;
        int protection;
    };

    static bool protect(const Protected& pages, int protection) noexcept {
        return ::mprotect(reinterpret_cast<void*>(pages.begin), pages.end - pages.begin, protection) == 0;
    }

    static bool populate(std::uintptr_t begin, std::uintptr_t end) noexcept {
        constexpr int kMadvPopulateWrite = 23;
        int done;
        do done = ::madvise(reinterpret_cast<void*>(begin), end - begin, kMadvPopulateWrite);
        while (done != 0 && errno == EINTR);
        return done == 0;
    }

    // True if the kernel has the advice (5.14). Asked on a page of its own, because for a page that is read-only the
    // answer is the same error.
    static bool can_populate() noexcept {
        static const bool can = [] {
            const std::size_t bytes = Mapping::page_bytes();
            void* const page = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (page == MAP_FAILED) return true;
            const auto begin = reinterpret_cast<std::uintptr_t>(page);
            const bool has_it = populate(begin, begin + bytes);
            ::munmap(page, bytes);
            return has_it;
        }();
        return can;
    }

    // The pages must be writable.
    static void touch(std::uintptr_t begin, std::uintptr_t end) noexcept {
        for (std::uintptr_t at = begin; at < end; at += Mapping::page_bytes()) {
            std::atomic_ref<unsigned char> byte(*reinterpret_cast<unsigned char*>(at));
            unsigned char seen = byte.load(std::memory_order_relaxed);
            while (!byte.compare_exchange_weak(seen, seen, std::memory_order_relaxed)) {
            }
        }
    }

    // The parts of a range that may not be written to, as /proc/self/maps has them.
    static std::vector<Protected> not_writable(std::uintptr_t begin, std::uintptr_t end) {
        std::vector<Protected> found;
        std::ifstream maps("/proc/self/maps");
        if (!maps) throw_errno("cannot open /proc/self/maps");
        for (std::string line; std::getline(maps, line);) {
            unsigned long from = 0, to = 0;
            char kinds[5] = {};
            if (std::sscanf(line.c_str(), "%lx-%lx %4s", &from, &to, kinds) != 3 || to <= begin || from >= end || kinds[1] == 'w')
                continue;
            const int protection = (kinds[0] == 'r' ? PROT_READ : 0) | (kinds[2] == 'x' ? PROT_EXEC : 0);
            found.push_back({std::max<std::uintptr_t>(from, begin), std::min<std::uintptr_t>(to, end), protection});
        }
        return found;
    }

    // False if pagemap cannot be read. It shows the memory of the process that opened it, so a child opens its own.
    bool read_pagemap(const std::byte* first, std::uint64_t* entries, std::size_t count) noexcept {
        try {
            if (!pagemap_.is_intact()) {
                pagemap_.close();  // before a new one gets the same number and inode
                pagemap_ = OwnFile([] { return try_open("/proc/self/pagemap", O_RDONLY); });
            }
        } catch (const std::exception&) {  // there is no /proc, descriptor or memory
            return false;
        }
        const std::size_t bytes = count * sizeof *entries;
        const auto at = reinterpret_cast<std::uintptr_t>(first) / Mapping::page_bytes() * sizeof *entries;
        return ::pread(pagemap_.file().get(), entries, bytes, static_cast<off_t>(at)) == static_cast<ssize_t>(bytes);
    }

    static bool is_copy(std::uint64_t entry) noexcept { return (entry & (kPresent | kSwapped)) != 0 && (entry & kOfFile) == 0; }

    bool drop(std::size_t offset, std::size_t bytes) const noexcept {
        constexpr int kMadvDontNeedLocked = 24;
        return ::madvise(base_ + offset, bytes, MADV_DONTNEED) == 0 || ::madvise(base_ + offset, bytes, kMadvDontNeedLocked) == 0;
    }

    const std::size_t bytes_;
    OwnFile pagemap_;
    std::byte* base_ = nullptr;
    std::shared_ptr<void> kept_;
};

}  // namespace memlane::os
