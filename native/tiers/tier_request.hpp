// What another process asks of the process that has a disk tier open: a file beside the pair, OPENER.request-NUMBER, which the
// tier's process answers by writing into it. Whoever asks writes it under another name, renames it, and removes it.
#pragma once

#include <fcntl.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <system_error>

#include "core/access.hpp"
#include "os/clock.hpp"
#include "os/file.hpp"
#include "os/process.hpp"
#include "os/watch.hpp"
#include "tiers/slot_layout.hpp"

namespace memlane::tiers {

struct TierRequest {
    static constexpr std::array<char, 8> kMagic{'M', 'E', 'M', 'L', 'A', 'S', 'K', '1'};
    enum class What : std::uint32_t { clear = 1, purge = 2 };

    std::array<char, 8> magic = kMagic;
    What what = What::clear;
    std::uint32_t is_answered = 0;
    std::int32_t error = 0;  // the answer: 0 or an errno
    Namespace name_space{};  // of `purge`
};
static_assert(sizeof(TierRequest) == 36);

inline std::string request_prefix(const std::string& opener) { return opener + ".request-"; }

// The request in that file; not open, or without kMagic: it is none of this user's. Throws nothing.
struct OpenRequest {
    explicit OpenRequest(const std::string& path) : file(os::try_open(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK)) {
        try {
            if (file.is_open()) core::check_owner(path, os::facts_of(file), "");
            is_valid = file.is_open() && os::read_at(file, &asked, sizeof asked, 0) && asked.magic == TierRequest::kMagic;
        } catch (const std::exception&) {  // another user's, or not readable
        }
    }
    void answer(int error) noexcept {
        asked.error = error;
        asked.is_answered = 1;
        static_cast<void>(os::write_at(file, &asked, sizeof asked, 0));  // else the other side waits until its deadline
    }

    os::FileDescriptor file;
    TierRequest asked{};
    bool is_valid = false;
};

// The other side: a request that was made and is not answered yet. Removes it at the end.
class AskedRequest {
public:
    // Throws system_error.
    AskedRequest(const std::string& folder, const std::string& opener, const TierRequest& request)
        : path_(folder + "/" + request_prefix(opener) + std::to_string(os::own_pid())) {
        const std::string made = folder + "/" + opener + ".asks-" + std::to_string(os::own_pid());
        file_ = os::try_open(made, O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK);
        if (!file_.is_open()) os::throw_errno("cannot make " + made);
        core::check_owner(made, os::facts_of(file_), "remove it");
        int error = os::write_at(file_, &request, sizeof request, 0);
        watch_.emplace(file_.get());
        if (error == 0) error = os::rename(made, path_);
        if (error == 0) return;
        remove(made);
        os::throw_errno("cannot write " + made, error);
    }
    AskedRequest(const AskedRequest&) = delete;
    AskedRequest& operator=(const AskedRequest&) = delete;
    ~AskedRequest() { remove(path_); }

    // Waits for so long at most, or until a signal. The answer: 0 or an errno; nullopt: there is none yet. Throws system_error.
    std::optional<int> wait(os::Nanoseconds span) const {
        if (const auto answered = answer()) return answered;
        watch_->wait(span);
        return answer();
    }

private:
    void remove(const std::string& path) const noexcept {
        try {
            os::unlink_if_same(file_, path);
        } catch (const std::system_error&) {  // it stays, and the next owner takes no notice of what is there already
        }
    }

    std::optional<int> answer() const {
        TierRequest now;
        const bool is_answered = os::read_at(file_, &now, sizeof now, 0) && now.is_answered != 0;
        return is_answered ? std::optional<int>(now.error) : std::nullopt;
    }

    std::string path_;
    os::FileDescriptor file_;
    std::optional<os::FileWatch> watch_;
};

}  // namespace memlane::tiers
