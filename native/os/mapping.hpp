// One shared mapping of a part of a file, unmapped when its last owner goes.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>

#include "os/file.hpp"

namespace memlane::os {

// For private memory of 2 MiB and more. Advice: where it is refused, pages are small and nothing else changes.
inline void prefer_huge_pages(void* memory, std::size_t bytes) noexcept { ::madvise(memory, bytes, MADV_HUGEPAGE); }

class Mapping {
public:
    // `offset`: of whole pages. What lies beyond the file's end may be mapped, but not touched before the file grows.
    Mapping(const FileDescriptor& file, std::size_t bytes, std::uint64_t offset = 0) : bytes_(bytes) {
        void* base =
            ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), static_cast<off_t>(offset));
        if (base == MAP_FAILED) throw_errno("cannot map " + std::to_string(bytes) + " bytes");
        base_ = static_cast<std::byte*>(base);
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() { ::munmap(base_, bytes_); }

    std::byte* base() const noexcept { return base_; }
    std::size_t bytes() const noexcept { return bytes_; }

    // Maps pages that are reserved already, so that the first message does not pay for page faults (they cost
    // five times its copy). A speed-up only: kernels before 5.14 do not know it, and the faults come later then.
    void populate(std::size_t offset, std::size_t bytes) const {
        constexpr int kMadvPopulateWrite = 23;
        const std::size_t page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
        const std::size_t from = offset / page * page;
        const std::size_t to = std::min((offset + bytes + page - 1) / page * page, (bytes_ + page - 1) / page * page);
        while (::madvise(base_ + from, to - from, kMadvPopulateWrite) != 0) {
            if (errno == EINTR || errno == EAGAIN) continue;
            if (errno == EINVAL) return;
            throw_errno("cannot populate " + std::to_string(bytes) + " bytes of a segment");
        }
    }

private:
    std::byte* base_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace memlane::os
