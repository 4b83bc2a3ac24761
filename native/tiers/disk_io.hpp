// The rows of a buffer, and a disk tier's files: blocks go from one to the other on threads that end with it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "os/clock.hpp"
#include "os/threads.hpp"
#include "tiers/disk_threads.hpp"
#include "tiers/disk_work.hpp"
#include "tiers/slot_file.hpp"

namespace memlane::tiers {

class DiskIo {
public:
    DiskIo(std::unique_ptr<SlotFile> file, std::byte* rows, unsigned threads)
        : file_(std::move(file)), work_(*file_, rows) {
        for (unsigned i = 0; i < threads; ++i) staging_.emplace_back(DiskThread::kPiece);
        threads_ = std::make_unique<os::Helpers>(threads, [this] {
            DiskThread(work_, staging_[started_.fetch_add(1)]).run();
        });
        if (threads_->missing() == threads) os::throw_errno("cannot start a thread for a tier", EAGAIN);
    }

    SlotFile& file() noexcept { return *file_; }
    DiskWork& work() noexcept { return work_; }

    // Whether nothing was under way: the rows are then nobody's. Call it before this is destroyed.
    bool close() {
        if (!work_.stop()) return false;
        threads_->join();
        return true;
    }

private:
    std::unique_ptr<SlotFile> file_;
    DiskWork work_;
    std::vector<Staging> staging_;  // of each thread
    std::atomic<std::size_t> started_ = 0;
    std::unique_ptr<os::Helpers> threads_;
};

}  // namespace memlane::tiers
