// The long part of a start: reserves the space of the whole region, and populates the pages of the caller's own
// part, on threads that need no interpreter. The caller looks in from time to time.
//
// Reserving (fallocate) only allocates the pages. That is about a third of the work, and single-threaded, because
// it holds the inode's lock. Populating zeroes and maps them, and runs in parallel. So one thread reserves piece
// after piece, and the others populate behind it, for hardly more processor time than populating alone.
//
// Where huge pages pay (huge_pages.hpp), that thread makes them instead, which reserves, zeroes and maps the space at once;
// populating then finds it mapped.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "core/errors.hpp"
#include "core/segment.hpp"
#include "core/sync.hpp"
#include "offload/huge_pages.hpp"
#include "offload/region_file.hpp"
#include "os/free_memory.hpp"
#include "os/threads.hpp"

namespace memlane::offload {

inline constexpr std::uint64_t kPiece = 32u << 20;  // between two checks of `stopping_`
inline constexpr std::uint64_t kSample = 8u << 20;  // in small pages, to learn what they cost
inline constexpr std::uint64_t kLeastHuge = 64u << 20;  // of a region that takes a sample

enum class Progress { working, reserved, done };

// `count` ranges of the region, `stride` bytes apart, cut off at `end`.
struct Cells {
    std::uint64_t offset;
    std::uint64_t bytes;
    std::uint64_t stride;
    std::uint64_t count;
    std::uint64_t end;

    static Cells run(std::uint64_t from, std::uint64_t end) noexcept {
        return {from, kPiece, kPiece, (end - from + kPiece - 1) / kPiece, end};
    }
    // A range without gaps is divided into pieces, so that threads can share it.
    static Cells of(std::uint64_t offset, std::uint64_t bytes, std::uint64_t stride, std::uint64_t count) noexcept {
        const std::uint64_t end = count == 0 ? offset : offset + (count - 1) * stride + bytes;
        if (count <= 1 || stride == bytes) return run(offset, end);
        return {offset, bytes, stride, count, end};
    }
    std::uint64_t begin_of(std::uint64_t i) const noexcept { return offset + i * stride; }
    std::uint64_t end_of(std::uint64_t i) const noexcept { return std::min(begin_of(i) + bytes, end); }
    std::uint64_t sum() const noexcept { return count == 0 ? 0 : (count - 1) * bytes + end_of(count - 1) - begin_of(count - 1); }
};

class Population {
public:
    // Needs the region mapped. Its builder reserves its space, too, in pages of that kind.
    Population(std::shared_ptr<RegionFile> region, const Cells& cells, bool is_builder, Pages pages, unsigned threads)
        : region_(std::move(region)),
          mapping_(region_->mapping()),
          cells_(cells),
          total_(region_->geometry().total_bytes),
          is_builder_(is_builder),
          pages_(kind_of(pages, total_)) {
        if (!is_builder_) {
            reserved_ = total_;
        } else if (pages_ != Pages::small) {
            // Huge pages are made within the file's length. But its full length must be seen last.
            const std::uint64_t grown = std::min(total_ / os::kHugePage * os::kHugePage, total_ - 1);
            if (os::facts_of(region_->file()).bytes < grown) os::resize(region_->file(), grown);
        }
        const std::lock_guard guard(mutex_);  // no helper begins before all are counted
        const unsigned wanted = std::max(threads, 1u);
        helpers_.emplace(wanted, [this] { work(); });
        running_ = wanted - helpers_->missing();
        if (running_ == 0) {  // the system has no thread to spare
            is_alone_ = true;
            running_ = 1;
        }
    }
    Population(const Population&) = delete;
    Population& operator=(const Population&) = delete;
    ~Population() { stop(); }

    // Waits for news for at most a slice. Returns `reserved` at most once, before `done`. Rethrows a failure.
    Progress wait(os::Nanoseconds slice) {
        std::unique_lock lock(mutex_);
        if (is_alone_)
            work_here(lock, slice);
        else
            changed_.wait_for(lock, std::chrono::nanoseconds(slice), [this] { return is_news(); });
        if (failure_) {
            lock.unlock();
            stop();
            std::rethrow_exception(failure_);
        }
        if (running_ == 0) return Progress::done;
        if (!is_reserved_news()) return Progress::working;
        told_reserved_ = true;
        return Progress::reserved;
    }

    // Those that were made here.
    std::uint64_t huge_pages() const {
        const std::lock_guard guard(mutex_);
        return huge_pages_;
    }
    std::uint64_t done() const {
        const std::lock_guard guard(mutex_);
        return done_;
    }
    std::uint64_t bytes() const noexcept { return cells_.sum(); }
    // True if the kernel could not populate, so that pages were written to instead.
    bool was_touched() const {
        const std::lock_guard guard(mutex_);
        return touched_;
    }

    // False in a forked child: it has no threads, may call stop(), but must not destroy this, which would hang.
    bool is_own() const noexcept { return helpers_->are_here(); }

    // Stops the work; each thread finishes the piece that it is working on.
    void stop() noexcept {
        if (is_own()) {
            const std::lock_guard guard(mutex_);
            stopping_ = true;
            changed_.notify_all();
        }
        helpers_->join();
        mapping_.reset();  // a traceback may keep this object for long
    }

private:
    static Pages kind_of(Pages wanted, std::uint64_t total_bytes) noexcept {
        if (os::Mapping::page_bytes() != os::kHugePage / 512) return Pages::small;  // huge ones are larger there
        return wanted == Pages::huge_if_they_pay && total_bytes < kLeastHuge ? Pages::small : wanted;
    }

    void work() noexcept {
        std::unique_lock lock(mutex_);
        try {
            while (!stopping_ && step(lock)) {
            }
        } catch (...) {
            if (!lock.owns_lock()) lock.lock();
            if (!failure_) failure_ = std::current_exception();
            stopping_ = true;
        }
        if (!lock.owns_lock()) lock.lock();
        --running_;
        changed_.notify_all();
    }

    // The caller does the work itself, until there is news or the slice is over.
    void work_here(std::unique_lock<std::mutex>& lock, os::Nanoseconds slice) noexcept {
        const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(slice);
        try {
            while (!is_news() && std::chrono::steady_clock::now() < end)
                if (stopping_ || !step(lock)) running_ = 0;
        } catch (...) {
            if (!lock.owns_lock()) lock.lock();
            failure_ = std::current_exception();
        }
    }

    bool is_news() const noexcept { return running_ == 0 || failure_ || is_reserved_news(); }
    bool is_reserved_news() const noexcept {
        return is_builder_ && reserved_ == total_ && !told_reserved_;
    }

    // Does one piece of work; false if none is left.
    bool step(std::unique_lock<std::mutex>& lock) {
        if (!is_reserving_ && reserved_ < total_) {
            is_reserving_ = true;
            const std::uint64_t from = reserved_, bytes = std::min(kPiece, total_ - from);
            lock.unlock();
            const std::uint64_t huge_pages = reserve_piece(from, bytes);
            lock.lock();
            huge_pages_ += huge_pages;
            is_reserving_ = false;
            reserved_ = from + bytes;
            changed_.notify_all();
            return true;
        }
        if (next_ == cells_.count) {
            if (reserved_ == total_) return false;
            changed_.wait(lock);
            return true;
        }
        // As many cells as make up a piece, once they have their space.
        const std::uint64_t from = next_;
        const std::uint64_t to = std::min(cells_.count, from + std::max<std::uint64_t>(1, kPiece / cells_.bytes));
        if (cells_.end_of(to - 1) > reserved_) {
            changed_.wait(lock);
            return true;
        }
        next_ = to;
        lock.unlock();
        std::uint64_t bytes = 0;
        bool touched = false;
        for (std::uint64_t i = from; i < to; ++i) {
            touched |= !populate(cells_.begin_of(i), cells_.end_of(i) - cells_.begin_of(i));
            bytes += cells_.end_of(i) - cells_.begin_of(i);
        }
        lock.lock();
        done_ += bytes;
        touched_ |= touched;
        return true;
    }

    void reserve(std::uint64_t from, std::uint64_t bytes) {
        SYNC_STEP(reserve);
        const int error = os::reserve(region_->file(), from, bytes);
        if (error == 0) return;
        if (!core::is_exhaustion(error)) os::throw_errno("cannot reserve " + std::to_string(bytes) + " bytes", error);
        throw core::ShmExhausted(error, total_, from + os::free_bytes(region_->file()));
    }

    // In huge pages as far as those are wanted, there are any, and they pay. Returns their number.
    std::uint64_t reserve_piece(std::uint64_t from, std::uint64_t bytes) {
        const std::uint64_t end = from + bytes;
        std::uint64_t made = 0;
        if (pages_ == Pages::huge_if_they_pay && !account_) account_.emplace(small_page_cost(), total_);
        // As many for others as this piece takes: then nothing of theirs is moved.
        const bool has_room = pages_ == Pages::huge || (account_ && os::free_huge_pages() >= 2 * kPiece / os::kHugePage);
        for (; has_room && from + os::kHugePage <= end && (!account_ || account_->pays()); from += os::kHugePage) {
            const os::Nanoseconds began = os::thread_time();
            // Not always the first page: the one that is there decides the node, which may depend on its number.
            reserve(from + from / os::kHugePage % 512 * os::Mapping::page_bytes(), os::Mapping::page_bytes());
            const bool is_made = mapping_->make_huge(from);
            if (account_) account_->note(os::thread_time() - began, is_made);
            made += is_made;
            if (!is_made) reserve(from, os::kHugePage);
        }
        if (from < end) reserve(from, end - from);
        return made;
    }

    // Measured where the region begins; these pages become huge ones after that.
    os::Nanoseconds small_page_cost() {
        const os::Nanoseconds began = os::thread_time();
        reserve(0, kSample);
        mapping_->populate(0, kSample);
        return (os::thread_time() - began) / static_cast<std::int64_t>(kSample / os::kHugePage);
    }

    bool populate(std::uint64_t from, std::uint64_t bytes) {
        SYNC_STEP(populate);
        try {
            const bool again = !is_builder_ && mapping_->was_populated(from);
            if (again ? mapping_->populate_again(from, bytes) : mapping_->populate(from, bytes)) return true;
        } catch (const std::system_error& error) {
            // EFAULT means that a page has no space and can get none.
            if (error.code().value() == EFAULT) throw core::ShmExhausted(ENOSPC, total_, os::free_bytes(region_->file()));
            throw;
        }
        mapping_->touch(from, bytes);
        return false;
    }

    std::shared_ptr<RegionFile> region_;
    std::shared_ptr<os::Mapping> mapping_;
    const Cells cells_;
    const std::uint64_t total_;
    const bool is_builder_;
    const Pages pages_;
    std::optional<HugePageAccount> account_;  // of the thread that reserves

    mutable std::mutex mutex_;  // protects everything below
    std::condition_variable changed_;
    std::uint64_t reserved_ = 0;  // bytes, from the beginning
    bool is_reserving_ = false;
    std::uint64_t next_ = 0;  // the next cell
    std::uint64_t done_ = 0;
    std::uint64_t huge_pages_ = 0;
    bool touched_ = false;
    bool told_reserved_ = false;
    bool stopping_ = false;
    bool is_alone_ = false;  // no thread could be started
    unsigned running_ = 0;
    std::exception_ptr failure_;

    std::optional<os::Helpers> helpers_;
};

}  // namespace memlane::offload
