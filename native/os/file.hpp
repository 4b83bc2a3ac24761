// Shared-memory files: created without a name, named when complete, opened without following links.
#pragma once

#include <dirent.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

namespace memlane::os {

[[noreturn]] inline void throw_errno(const std::string& what, int error = errno) {
    throw std::system_error(error, std::generic_category(), what);
}

class FileDescriptor {
public:
    FileDescriptor() noexcept = default;
    explicit FileDescriptor(int fd) noexcept : fd_(fd) {}
    FileDescriptor(FileDescriptor&& other) noexcept : fd_(other.release()) {}
    FileDescriptor& operator=(FileDescriptor&& other) noexcept {
        if (this != &other) {
            close();
            fd_ = other.release();
        }
        return *this;
    }
    ~FileDescriptor() { close(); }

    int get() const noexcept { return fd_; }
    bool is_open() const noexcept { return fd_ >= 0; }
    int release() noexcept { return std::exchange(fd_, -1); }
    // Linux frees the descriptor whatever close(2) returns, and a tmpfs file has nothing left to write.
    void close() noexcept {
        if (fd_ >= 0) ::close(std::exchange(fd_, -1));
    }

private:
    int fd_ = -1;
};

// In a process that has closed its standard streams, a new file takes their numbers, and what any library prints would
// be written into it. Returns the same description under a number of 3 or above; not open, with errno, if that fails.
inline FileDescriptor beyond_standard_streams(FileDescriptor file) noexcept {
    if (!file.is_open() || file.get() > STDERR_FILENO) return file;
    return FileDescriptor(::fcntl(file.get(), F_DUPFD_CLOEXEC, STDERR_FILENO + 1));
}

// On failure the descriptor is not open, and errno says why.
inline FileDescriptor try_open(const std::string& path, int flags) noexcept {
    int fd;
    do fd = ::open(path.c_str(), flags | O_CLOEXEC, 0600);
    while (fd < 0 && errno == EINTR);
    return beyond_standard_streams(FileDescriptor(fd));
}

inline FileDescriptor create_unnamed(const std::string& directory) {
    FileDescriptor file = try_open(directory, O_TMPFILE | O_RDWR);
    if (!file.is_open()) throw_errno("cannot create a file in " + directory);
    if (::fchmod(file.get(), 0600) != 0) throw_errno("cannot set the mode of a file in " + directory);
    return file;
}

inline void make_private(const FileDescriptor& file) {
    if (::fchmod(file.get(), 0600) != 0) throw_errno("cannot set the mode of a file");
}

inline FileDescriptor open_existing(const std::string& path) {
    FileDescriptor file = try_open(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK);
    if (!file.is_open()) throw_errno("cannot open " + path);
    return file;
}

// A second open file description of the same file. Unlike a dup(), it
// shares no locks with the first. Also works for files without a name.
inline FileDescriptor reopen(const FileDescriptor& file) {
    const std::string path = "/proc/self/fd/" + std::to_string(file.get());
    FileDescriptor second = try_open(path, O_RDWR);
    if (!second.is_open()) throw_errno("cannot reopen " + path + (errno == ENOENT ? " (is /proc mounted?)" : ""));
    return second;
}

// A second open file description of a file that another process of this user has open. Looks before it opens: opening what is
// no regular file may have effects. Throws system_error, ENODEV if it is none.
inline FileDescriptor open_of_other(std::int64_t pid, int descriptor) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
    const FileDescriptor found = try_open(path, O_PATH);
    if (!found.is_open()) throw_errno("cannot open " + path);
    struct stat s{};
    if (::fstat(found.get(), &s) != 0) throw_errno("cannot stat " + path);
    if (!S_ISREG(s.st_mode)) throw_errno(path + " is not a regular file", ENODEV);
    return reopen(found);
}

// Names a complete file. Fails with EEXIST instead of replacing a file or following a link.
inline void link_name(const FileDescriptor& file, const std::string& path) {
    const std::string self = "/proc/self/fd/" + std::to_string(file.get());
    if (::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) != 0)
        throw_errno("cannot name the segment " + path);
}

struct FileFacts {
    dev_t device;
    ino_t inode;
    mode_t mode;
    uid_t owner;
    nlink_t links;
    std::uint64_t bytes;
    std::uint64_t allocated;  // bytes that have space, so without holes
    std::int64_t modified_ns, changed_ns;  // its bytes, and whatever is known of it, since the epoch

    bool is_regular() const noexcept { return S_ISREG(mode); }
    bool is_same_file(const FileFacts& other) const noexcept {
        return device == other.device && inode == other.inode;
    }
};

inline FileFacts to_facts(const struct stat& s) noexcept {
    const auto ns = [](const timespec& at) { return std::int64_t{at.tv_sec} * 1'000'000'000 + at.tv_nsec; };
    return {s.st_dev, s.st_ino, s.st_mode, s.st_uid, s.st_nlink, static_cast<std::uint64_t>(s.st_size),
            static_cast<std::uint64_t>(s.st_blocks) * 512, ns(s.st_mtim), ns(s.st_ctim)};
}

inline FileFacts facts_of(const FileDescriptor& file) {
    struct stat s{};
    if (::fstat(file.get(), &s) != 0) throw_errno("cannot stat a segment");
    return to_facts(s);
}

// Facts about whatever has that name, even if it may not be opened; nullopt if lstat fails.
inline std::optional<FileFacts> facts_at(const std::string& path) noexcept {
    struct stat s{};
    if (::lstat(path.c_str(), &s) != 0) return std::nullopt;
    return to_facts(s);
}

// Size of a file, for a descriptor that memlane does not own.
inline std::uint64_t bytes_of(int fd) {
    struct stat s{};
    if (::fstat(fd, &s) != 0) throw_errno("cannot stat descriptor " + std::to_string(fd));
    return static_cast<std::uint64_t>(s.st_size);
}

// Removes `path` if it still names `file`, and leaves any other file of that name alone. Returns whether it removed it.
inline bool unlink_if_same(const FileDescriptor& file, const std::string& path) {
    struct stat s{};
    if (::lstat(path.c_str(), &s) != 0) {
        if (errno == ENOENT) return false;
        throw_errno("cannot stat " + path);
    }
    if (!to_facts(s).is_same_file(facts_of(file))) return false;
    if (::unlink(path.c_str()) == 0) return true;
    if (errno != ENOENT) throw_errno("cannot remove " + path);
    return false;
}

// The file of that name has another from now on, in the place of whatever had it. 0 or an errno.
inline int rename(const std::string& from, const std::string& to) noexcept {
    return ::rename(from.c_str(), to.c_str()) == 0 ? 0 : errno;
}

// The entries of a directory, including "." and "..".
inline std::vector<std::string> names_in(const std::string& path) {
    DIR* opened;
    do opened = ::opendir(path.c_str());
    while (opened == nullptr && errno == EINTR);
    const std::unique_ptr<DIR, int (*)(DIR*)> directory(opened, ::closedir);
    if (!directory) throw_errno("cannot list " + path);
    std::vector<std::string> names;
    while (const dirent* entry = ::readdir(directory.get())) names.emplace_back(entry->d_name);
    return names;
}

// True if RLIMIT_FSIZE forbids a file of this length. Check before a file grows: otherwise the kernel sends SIGXFSZ,
// which kills the process unless it is ignored (Python ignores it, but programs that embed Python may not).
inline bool is_beyond_limit(std::uint64_t end) noexcept {
    struct rlimit limit{};
    return end > INT64_MAX || (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && end > limit.rlim_cur);
}

inline void resize(const FileDescriptor& file, std::uint64_t bytes) {
    if (is_beyond_limit(bytes)) throw_errno("cannot size a segment to " + std::to_string(bytes) + " bytes", EFBIG);
    while (::ftruncate(file.get(), static_cast<off_t>(bytes)) != 0)
        if (errno != EINTR) throw_errno("cannot size a segment to " + std::to_string(bytes) + " bytes");
}

// Wakes everybody who watches the file (os/watch.hpp), by setting its mode to the current value.
inline void notify_watchers(const FileDescriptor& file) noexcept {
    struct stat s{};
    if (::fstat(file.get(), &s) == 0) static_cast<void>(::fchmod(file.get(), s.st_mode & 07777));
}

// The free bytes of the file system; UINT64_MAX if it has no limit or does not report one.
inline std::uint64_t free_bytes(const FileDescriptor& file) noexcept {
    struct statvfs s{};
    if (::fstatvfs(file.get(), &s) != 0 || s.f_blocks == 0) return UINT64_MAX;
    return static_cast<std::uint64_t>(s.f_bavail) * s.f_frsize;
}

inline std::uint64_t total_bytes(const FileDescriptor& file) noexcept {
    struct statvfs s{};
    if (::fstatvfs(file.get(), &s) != 0 || s.f_blocks == 0) return UINT64_MAX;
    return static_cast<std::uint64_t>(s.f_blocks) * s.f_frsize;
}

// What reads and writes past the page cache must be multiples of: places in the file and lengths, and addresses. Nothing if
// the kernel does not say (before 6.1), zeroes if there are none for this file.
struct DirectAlignment {
    std::uint32_t offset, memory;
};
inline std::optional<DirectAlignment> direct_alignment(const FileDescriptor& file) noexcept {
    constexpr unsigned kDirectAlignment = 0x2000;  // STATX_DIOALIGN, which older headers lack
    constexpr std::size_t kMask = 0, kMemory = 0x98, kOffset = 0x9c;
    alignas(8) std::array<char, 256> found{};
    if (::syscall(SYS_statx, file.get(), "", AT_EMPTY_PATH, kDirectAlignment, found.data()) != 0) return std::nullopt;
    const auto field = [&](std::size_t at) {
        std::uint32_t value;
        std::memcpy(&value, found.data() + at, sizeof value);
        return value;
    };
    if ((field(kMask) & kDirectAlignment) == 0) return std::nullopt;
    return DirectAlignment{field(kOffset), field(kMemory)};
}

// True if its file system writes changed bytes elsewhere (btrfs), so that reserved space does not last.
inline bool copies_on_write(const FileDescriptor& file) noexcept {
    struct statfs s{};
    constexpr long kBtrfs = 0x9123683E;
    if (::fstatfs(file.get(), &s) != 0 || s.f_type != kBtrfs) return false;
    int flags = 0;
    return ::syscall(SYS_ioctl, file.get(), FS_IOC_GETFLAGS, &flags) != 0 || (flags & FS_NOCOW_FL) == 0;
}
// Makes a file without bytes write changed bytes where they were. Its file system may not know that.
inline void write_in_place(const FileDescriptor& file) noexcept {
    int flags = 0;
    if (::syscall(SYS_ioctl, file.get(), FS_IOC_GETFLAGS, &flags) != 0) return;
    flags |= FS_NOCOW_FL;
    static_cast<void>(::syscall(SYS_ioctl, file.get(), FS_IOC_SETFLAGS, &flags));
}

// True if its file system is memory.
inline bool is_tmpfs(const FileDescriptor& file) noexcept {
    struct statfs s{};
    return ::fstatfs(file.get(), &s) == 0 && s.f_type == TMPFS_MAGIC;
}

inline bool is_half_free(const FileDescriptor& file) noexcept {
    struct statvfs s{};
    return ::fstatvfs(file.get(), &s) != 0 || s.f_bavail >= s.f_blocks / 2;
}

// Reserves the space of a range, so that a full file system is an error here instead of a SIGBUS
// later. Returns 0 or an errno. Tries a single call first, because fallocate undoes exactly its own
// work when it fails. But tmpfs also fails with EINTR when any signal is pending, so under a profiling
// timer a large call might never finish. Each EINTR therefore halves the size of the pieces.
inline int reserve(const FileDescriptor& file, std::uint64_t offset, std::uint64_t bytes) noexcept {
    std::uint64_t most = bytes;
    const std::uint64_t end = offset + bytes;
    if (is_beyond_limit(end)) return EFBIG;
    while (offset < end) {
        const std::uint64_t piece = std::min(most, end - offset);
        if (::fallocate(file.get(), 0, static_cast<off_t>(offset), static_cast<off_t>(piece)) == 0)
            offset += piece;
        else if (errno == EINTR)
            most = std::max<std::uint64_t>(piece / 2, 64u << 10);
        else
            return errno;
    }
    return 0;
}

// Frees the space of a range, which reads as zeroes from then on.
inline void punch_hole(const FileDescriptor& file, std::uint64_t offset, std::uint64_t bytes) {
    while (::fallocate(file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                       static_cast<off_t>(bytes)) != 0)
        if (errno != EINTR) throw_errno("cannot give back " + std::to_string(bytes) + " bytes of a segment");
}

// The start of the first hole at or after `offset`; the end of the file counts as one.
inline std::uint64_t space_end(const FileDescriptor& file, std::uint64_t offset) {
    const off_t hole = ::lseek(file.get(), static_cast<off_t>(offset), SEEK_HOLE);
    if (hole < 0 && errno != ENXIO) throw_errno("cannot look for holes of a segment");
    return hole < 0 ? offset : static_cast<std::uint64_t>(hole);
}

// True if the whole range has space. Touching a hole of a mapped tmpfs file would allocate a page, or raise SIGBUS. One
// system call, which walks the pages at about 25 ns each.
inline bool has_space(const FileDescriptor& file, std::uint64_t offset, std::uint64_t bytes) {
    return space_end(file, offset) >= offset + bytes;
}

// The first offset at or after `offset` that has space, if there is one.
inline std::optional<std::uint64_t> next_data(const FileDescriptor& file, std::uint64_t offset) {
    const off_t data = ::lseek(file.get(), static_cast<off_t>(offset), SEEK_DATA);
    if (data >= 0) return static_cast<std::uint64_t>(data);
    if (errno != ENXIO) throw_errno("cannot look for the data of a segment");
    return std::nullopt;
}

// Writes all bytes and returns 0, or returns an errno. New tmpfs pages are not zeroed first.
inline int write_at(const FileDescriptor& file, const void* from, std::uint64_t bytes, std::uint64_t offset) noexcept {
    const char* at = static_cast<const char*>(from);
    if (is_beyond_limit(offset + bytes)) return EFBIG;
    while (bytes > 0) {
        const ssize_t n = ::pwrite(file.get(), at, bytes, static_cast<off_t>(offset));
        if (n > 0) {
            at += n;
            offset += static_cast<std::uint64_t>(n);
            bytes -= static_cast<std::uint64_t>(n);
        } else if (n == 0) {
            return ENOSPC;
        } else if (errno != EINTR) {
            return errno;
        }
    }
    return 0;
}

// False if the file ends inside the range. A hole reads as zeroes and takes no space, unlike touching it in a mapping.
inline bool read_at(const FileDescriptor& file, void* to, std::uint64_t bytes, std::uint64_t offset) {
    char* at = static_cast<char*>(to);
    while (bytes > 0) {
        const ssize_t n = ::pread(file.get(), at, bytes, static_cast<off_t>(offset));
        if (n > 0) {
            at += n;
            offset += static_cast<std::uint64_t>(n);
            bytes -= static_cast<std::uint64_t>(n);
        } else if (n == 0) {
            return false;
        } else if (errno != EINTR) {
            throw_errno("cannot read a segment");
        }
    }
    return true;
}

}  // namespace memlane::os
