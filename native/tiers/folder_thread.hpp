// The thread that watches the folder of an open disk tier: it does what other processes ask for, also while nobody calls the
// tier, and notices that the tier's files were deleted or moved.
#pragma once

#include <fcntl.h>

#include <atomic>
#include <cerrno>
#include <memory>
#include <optional>
#include <string>
#include <system_error>

#include "os/clock.hpp"
#include "os/event.hpp"
#include "os/fork.hpp"
#include "os/threads.hpp"
#include "os/watch.hpp"
#include "tiers/disk_work.hpp"
#include "tiers/header_work.hpp"
#include "tiers/slot_file.hpp"
#include "tiers/tier_request.hpp"

namespace memlane::tiers {

class FolderThread {
public:
    FolderThread(SlotFile& file, DiskWork& work, HeaderWork& headers) : file_(file), work_(work), headers_(headers) {
        try {
            end_ = os::OwnFile([] { return os::make_event(); });
            folder_ = os::OwnFile::of_disk([&] {
                os::FileDescriptor made = os::try_open(file.folder(), O_RDONLY | O_DIRECTORY);
                if (!made.is_open()) os::throw_errno("cannot open " + file.folder());
                return made;
            });
            watch_ = std::make_unique<os::FolderWatch>(within(""));
        } catch (const std::system_error& error) {
            error_ = error.code().value();
            return;
        }
        is_detached_ = !file.has_names();
        thread_ = std::make_unique<os::Helpers>(1, [this] { run(); });
        if (thread_->started() == 0) error_ = EAGAIN;
    }

    // Why the folder is not watched; 0: it is.
    int error() const noexcept { return error_; }

    // True if a file of the tier, or its folder, was deleted or moved. Any thread.
    bool is_detached() const noexcept { return is_detached_.load(); }

    void close() noexcept {
        if (thread_ == nullptr) return;
        os::set_event(end_.file());
        thread_->join();
    }

private:
    static constexpr os::Nanoseconds kPatience = 4 * os::kSecond;  // with the disk; those who ask wait a little longer

    // The folder itself, or a file in it, wherever it was moved.
    std::string within(const std::string& name) const { return "/proc/self/fd/" + std::to_string(folder_.file().get()) + "/" + name; }

    void run() {
        const std::string requests = request_prefix(file_.opener());
        for (;;) {
            const auto seen = watch_->wait(end_.file());
            if (seen.empty()) return;
            for (const os::FolderWatch::Event& event : seen) {
                const bool is_own = event.name.empty() || event.name == file_.opener() + ".headers" || event.name == file_.opener() + ".data";
                if (is_own && (event.is_gone || !file_.has_names())) {
                    is_detached_ = true;
                    work_.wake();  // a poll says so in the log
                } else if (!event.is_gone && event.name.starts_with(requests)) {
                    serve(within(event.name));
                }
            }
        }
    }

    void serve(const std::string& path) {
        OpenRequest request(path);
        if (!request.is_valid || request.asked.is_answered != 0) return;
        const bool is_clear = request.asked.what == TierRequest::What::clear;
        if (!is_clear && request.asked.what != TierRequest::What::purge) return request.answer(ENOSYS);
        const auto order = std::make_shared<HeaderWork::Order>();
        if (is_clear) {
            headers_.clear(order);
        } else {
            headers_.purge(request.asked.name_space, order);
        }
        const std::optional<int> error = headers_.wait(order, os::monotonic_now() + kPatience);
        if (!error) headers_.note_late();
        request.answer(error.value_or(ETIMEDOUT));
    }

    SlotFile& file_;
    DiskWork& work_;
    HeaderWork& headers_;
    os::OwnFile end_, folder_;
    std::unique_ptr<os::FolderWatch> watch_;
    std::atomic<bool> is_detached_ = false;
    int error_ = 0;
    std::unique_ptr<os::Helpers> thread_;
};

}  // namespace memlane::tiers
