// The rows of a buffer, and a disk tier's files: blocks go from one to the other on threads that end with it. Past the
// page cache one thread with an io_uring is faster than several with pread and pwrite; through it, several.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "os/clock.hpp"
#include "os/threads.hpp"
#include "tiers/disk_ring.hpp"
#include "tiers/disk_threads.hpp"
#include "tiers/disk_work.hpp"
#include "tiers/folder_thread.hpp"
#include "tiers/header_work.hpp"
#include "tiers/slot_file.hpp"

namespace memlane::tiers {

class DiskIo {
public:
    // `may_ring`: whether it may be an io_uring, where there can be one.
    DiskIo(std::unique_ptr<SlotFile> file, std::byte* rows, unsigned threads, bool may_ring = true)
        : file_(std::move(file)), work_(*file_, rows), headers_(*file_, work_), ring_(may_ring && file_->is_direct() ? try_ring(work_) : nullptr) {
        if (ring_ != nullptr) {
            threads_ = std::make_unique<os::Helpers>(1, [this] { ring_->run(); });
        } else {
            for (unsigned i = 0; i < threads; ++i) staging_.emplace_back(DiskThread::kPiece);
            threads_ = std::make_unique<os::Helpers>(threads, [this] {
                DiskThread(work_, staging_[started_.fetch_add(1)]).run();
            });
        }
        header_thread_ = std::make_unique<os::Helpers>(1, [this] { headers_.run(); });
        if (threads_->started() == 0 || header_thread_->started() == 0) {
            close();
            os::throw_errno("cannot start a thread for a tier", EAGAIN);
        }
        folder_ = std::make_unique<FolderThread>(*file_, work_, headers_);
    }

    SlotFile& file() noexcept { return *file_; }
    DiskWork& work() noexcept { return work_; }
    HeaderWork& headers() noexcept { return headers_; }
    const FolderThread& folder() const noexcept { return *folder_; }
    const char* engine() const noexcept { return ring_ != nullptr ? "io_uring" : "threads"; }

    // True if nothing was under way: the rows are then nobody's. Call it before this is destroyed.
    bool close() {
        if (!headers_.is_idle()) return false;
        if (folder_ != nullptr) folder_->close();  // first: it gives the others work
        if (!headers_.is_idle() || !work_.stop()) return false;
        headers_.stop();
        threads_->join();
        header_thread_->join();
        file_->close();
        return true;
    }

private:
    static std::unique_ptr<DiskRing> try_ring(DiskWork& work) {
        try {
            return std::make_unique<DiskRing>(work);
        } catch (const std::exception&) {  // an old kernel, a container's policy, no descriptor, no memory
            return nullptr;
        }
    }

    std::unique_ptr<SlotFile> file_;
    DiskWork work_;
    HeaderWork headers_;
    std::unique_ptr<DiskRing> ring_;  // null: the threads do without
    std::vector<Staging> staging_;  // of each thread
    std::atomic<std::size_t> started_ = 0;
    std::unique_ptr<os::Helpers> threads_, header_thread_;
    std::unique_ptr<FolderThread> folder_;
};

}  // namespace memlane::tiers
