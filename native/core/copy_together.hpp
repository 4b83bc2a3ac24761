// One long copy, shared with a second thread if a core is free.
//
// Both threads take units of 1 MiB from one counter, so the caller does whatever the helper does not. A helper that
// starts late, because its core was busy, finds nothing left to do, and nobody has waited for it. Measured here, 64 MiB
// into mapped pages: 3.7 ms alone, 2.4 ms together; 8 MiB: 0.26 and 0.21 ms.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "core/copy_streaming.hpp"
#include "os/process.hpp"
#include "os/threads.hpp"

namespace memlane::core {

class CopyTogether {
public:
    CopyTogether(std::byte* to, const std::byte* from, std::uint64_t bytes) noexcept : to_(to), from_(from), bytes_(bytes) {}

    // Call it without the GIL. If there is no second core, or no thread can be started, the caller copies alone.
    static void copy(std::byte* to, const std::byte* from, std::uint64_t bytes) noexcept {
        std::shared_ptr<CopyTogether> shared;
        try {
            shared = std::make_shared<CopyTogether>(to, from, bytes);
        } catch (const std::bad_alloc&) {
            return CopyTogether(to, from, bytes).work();
        }
        if (os::usable_cores() > 1) os::run_detached([shared] { shared->work(); });
        shared->work();
        for (std::uint64_t done = shared->done_; done < bytes; done = shared->done_) shared->done_.wait(done);
    }

private:
    static constexpr std::uint64_t kUnitBytes = 1u << 20;

    void work() noexcept {
        for (std::uint64_t at = next_.fetch_add(kUnitBytes); at < bytes_; at = next_.fetch_add(kUnitBytes)) {
            const std::uint64_t bytes = std::min(kUnitBytes, bytes_ - at);
            StreamingCopy streaming;
            streaming.add(to_ + at, from_ + at, bytes);
            streaming.finish();
            done_ += bytes;  // orders the copy before the caller's return
            done_.notify_one();
        }
    }

    std::byte* const to_;
    const std::byte* const from_;
    const std::uint64_t bytes_;
    std::atomic<std::uint64_t> next_{0};
    std::atomic<std::uint64_t> done_{0};
};

}  // namespace memlane::core
