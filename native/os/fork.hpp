// Fork handling: the child gets a new generation number and immediately closes what only its parent may keep open.
#pragma once

#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <utility>

#include "os/file.hpp"

namespace memlane::os {

// Incremented in the child at each fork; an object created under another number belongs to an ancestor.
inline std::atomic<std::uint64_t>& fork_generation() noexcept {
    static std::atomic<std::uint64_t> generation{0};
    return generation;
}

// Descriptors that a forked child closes: locks, and connections of libraries. A pthread_atfork handler closes them,
// because it also sees forks that Python does not make. A number that has been reused for another file is left alone.
class ClosedInChildren {
public:
    static ClosedInChildren& all() {
        static auto* const made = [] {
            auto all = std::make_unique<ClosedInChildren>();
            const int error = ::pthread_atfork([] { ClosedInChildren::all().mutex_.lock(); },
                                               [] {
                                                   ++ClosedInChildren::all().forks_;
                                                   ClosedInChildren::all().mutex_.unlock();
                                               },
                                               [] { ClosedInChildren::all().close_in_child(); });
            // Without the handler a child would keep its parent's locks, so no lock may be taken.
            if (error != 0) throw_errno("cannot install a fork handler for descriptors", error);
            return all.release();  // never destroyed: a fork may come after static destructors
        }();
        return *made;
    }

    // While the lock is held, forks wait.
    std::unique_lock<std::mutex> hold() { return std::unique_lock(mutex_); }

    // Call all with the lock held. The inode distinguishes the file from later ones with the same number.
    std::uint64_t add(int fd) {
        struct stat file{};
        if (::fstat(fd, &file) != 0) throw_errno("cannot stat descriptor " + std::to_string(fd));
        open_.insert({fd, file.st_ino});
        return file.st_ino;
    }
    // Closed whatever it refers to by then, as one does that refers to a file for moments only.
    void add_any(int fd) { open_.insert({fd, kAny}); }
    static constexpr std::uint64_t kAny = 0;  // no file has this inode
    // The number of children that this process has had.
    std::uint64_t forks() const noexcept { return forks_.load(); }
    void remove(int fd, std::uint64_t inode) noexcept {
        if (const auto found = open_.find({fd, inode}); found != open_.end()) open_.erase(found);
    }

private:
    void close_in_child() noexcept {
        struct stat file{};
        for (const auto& [fd, inode] : open_)
            if (inode == kAny || (::fstat(fd, &file) == 0 && file.st_ino == inode)) ::close(fd);
        open_.clear();
        fork_generation().fetch_add(1);
        mutex_.unlock();
    }

    std::mutex mutex_;
    std::atomic<std::uint64_t> forks_ = 0;
    std::multiset<std::pair<int, std::uint64_t>> open_;
};

// A file that forked children close, so that it is this process's alone.
class OwnFile {
public:
    OwnFile() noexcept = default;
    // `open` returns a descriptor. No fork comes before the descriptor is registered.
    template <class Open>
    explicit OwnFile(Open&& open) {
        const auto no_fork = ClosedInChildren::all().hold();
        file_ = open();
        generation_ = fork_generation().load();
        inode_ = ClosedInChildren::all().add(file_.get());
    }
    // For a file of a disk, which may not answer: forks do not wait for it. `open` is called again if a fork came meanwhile,
    // since the child may have that descriptor; after some tries, as above.
    template <class Open>
    static OwnFile of_disk(Open&& open) {
        constexpr int kTries = 20;
        ClosedInChildren& all = ClosedInChildren::all();
        for (int tries = 0; tries < kTries; ++tries) {
            const std::uint64_t forks = all.forks();
            FileDescriptor file = open();
            const auto no_fork = all.hold();
            if (all.forks() == forks) return OwnFile(std::move(file), no_fork);
        }
        return OwnFile(open);
    }
    OwnFile(OwnFile&&) noexcept = default;
    OwnFile& operator=(OwnFile&& other) noexcept {
        close();
        file_ = std::move(other.file_);
        generation_ = other.generation_;
        inode_ = other.inode_;
        return *this;
    }
    ~OwnFile() { close(); }

    const FileDescriptor& file() const noexcept { return file_; }
    // False in a forked child, and if somebody closed the descriptor: its number may be another file's. A system call.
    bool is_intact() const noexcept {
        if (!file_.is_open() || !is_here()) return false;
        struct stat file{};
        return ::fstat(file_.get(), &file) == 0 ? file.st_ino == inode_ : errno != EBADF;
    }

    // The file, which children share from now on.
    FileDescriptor share() {
        const auto no_fork = ClosedInChildren::all().hold();
        if (is_here()) ClosedInChildren::all().remove(file_.get(), inode_);
        return std::move(file_);
    }

    // Unless it is intact, it is closed already, and its number is left alone.
    void close() noexcept {
        if (!file_.is_open()) return;
        const auto no_fork = ClosedInChildren::all().hold();
        if (is_here()) ClosedInChildren::all().remove(file_.get(), inode_);
        if (!is_intact()) file_.release();
        file_.close();
    }

    // Forks do not wait for it. A child that is forked meanwhile closes what has that number if it is the same file.
    void close_on_disk() noexcept {
        const int number = file_.get();
        if (!is_intact()) return close();
        file_.close();
        const auto no_fork = ClosedInChildren::all().hold();
        ClosedInChildren::all().remove(number, inode_);
    }

private:
    OwnFile(FileDescriptor file, const std::unique_lock<std::mutex>& /*no_fork*/)
        : file_(std::move(file)), generation_(fork_generation().load()), inode_(ClosedInChildren::all().add(file_.get())) {}

    bool is_here() const noexcept { return generation_ == fork_generation().load(); }

    FileDescriptor file_;
    std::uint64_t generation_ = 0;
    std::uint64_t inode_ = 0;
};

}  // namespace memlane::os
