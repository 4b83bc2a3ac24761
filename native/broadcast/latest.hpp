// The protocol of a ring whose readers want the latest message only (kLatestOnly). The writer never waits.
//
//   `latest` of the ring     1 + the ticket of the latest message; 0: none yet
//   `reading` of a reader    1 + the chunk whose message it reads; 0: none. A hazard pointer
//   a reader's flag          set while it keeps the chunk's bytes for a view; in extent_leases while it keeps an extent
//
// A ticket is message * max_chunks + chunk: which message it is, and where. No two messages have the same.
//
// A reader loads `latest`, says that it reads that chunk, and (full fence) loads `latest` again. If it is still the same,
// the writer, which looks at `reading` only after it has published another (full fence), will see it there: nothing of the
// message changes until the reader says otherwise. If not, there is a newer one, and the reader takes that.
//
// The writer takes a chunk that is not the latest and that nobody reads. Each reader reads one at most, so of
// n_reader + 2 chunks one is always free. If its bytes are kept, the message goes to an extent.
//
// A message costs the writer one line of each reader and a look at the chunk's flags, of which it writes none; a reader one
// full fence, and no wake-up of the writer.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <vector>

#include "broadcast/ring_layout.hpp"
#include "core/sync.hpp"

namespace memlane::broadcast {

class LatestWriter {
public:
    explicit LatestWriter(const Ring& ring)
        : ring_(ring), positions_(ring.geometry().max_chunks, kNone), is_read_(ring.geometry().max_chunks) {
        if (positions_.size() < ring.geometry().n_reader + 2) throw std::invalid_argument("too few chunks for the latest message");
    }

    // The chunk of the next message, the same until that is published or begun anew: once free it stays free.
    template <class IsGone>
    std::uint64_t next(IsGone&& is_gone) noexcept {
        if (next_) return *next_;
        look_at_readers(is_gone);
        // The first rather than the next, so that few are ever touched, and those that are stay in the caches.
        std::uint64_t found = kNone;
        for (std::uint64_t chunk = 0; chunk < positions_.size(); ++chunk) {
            if (!is_free(chunk)) continue;
            const bool is_kept = is_kept_by_any(chunk, is_gone);
            if (found != kNone && is_kept) continue;
            found = chunk;
            is_next_kept_ = is_kept;
            if (!is_kept) break;
        }
        next_ = found;
        return found;
    }
    // Call it when a message is begun: the views that kept the chunk may have ended.
    void begin() noexcept {
        if (is_next_kept_) next_.reset();
    }
    // True if a reader keeps its bytes.
    bool is_next_kept() const noexcept { return is_next_kept_; }

    void publish(std::uint64_t position) noexcept {
        const std::uint64_t chunk = *next_;
        SYNC_STORE(latest);
        core::store_release<std::uint64_t>(ring_.waits().latest, 1 + ring_.ticket_of(position, chunk));
        positions_[chunk] = position;
        latest_ = chunk;
        next_.reset();
    }

    // Calls visit(position, chunk) for the message in every chunk.
    template <class Visit>
    void for_each(Visit&& visit) const {
        for (std::uint64_t chunk = 0; chunk < positions_.size(); ++chunk)
            if (positions_[chunk] != kNone) visit(positions_[chunk], chunk);
    }

    // True if nobody reads the message, or will. It must have been published.
    template <class IsGone>
    bool is_over(std::uint64_t position, IsGone&& is_gone) noexcept {
        const auto at = std::find(positions_.begin(), positions_.end(), position);
        if (at == positions_.end()) return true;
        look_at_readers(is_gone);
        return is_free(static_cast<std::uint64_t>(at - positions_.begin()));
    }

    // True if nobody reads the chunk's message, or will, or keeps its bytes.
    template <class IsGone>
    bool is_unused(std::uint64_t chunk, IsGone&& is_gone) noexcept {
        look_at_readers(is_gone);
        return is_free(chunk) && !is_kept_by_any(chunk, is_gone);
    }

private:
    static constexpr std::uint64_t kNone = UINT64_MAX;

    // The fence at the end of every publish has come before.
    template <class IsGone>
    void look_at_readers(IsGone&& is_gone) noexcept {
        std::fill(is_read_.begin(), is_read_.end(), false);
        for (std::uint64_t r = 0; r < ring_.geometry().n_reader; ++r) {
            SYNC_LOAD(take);
            SYNC_LOAD(finish);
            const std::uint32_t reading = core::load_acquire(ring_.slot_of(r).reading);
            if (reading != 0 && reading <= is_read_.size() && !is_gone(r)) is_read_[reading - 1] = true;
        }
    }
    bool is_free(std::uint64_t chunk) const noexcept { return chunk != latest_ && !is_read_[chunk]; }

    template <class IsGone>
    bool is_kept_by_any(std::uint64_t chunk, IsGone&& is_gone) const noexcept {
        for (std::uint64_t r = 0; r < ring_.geometry().n_reader; ++r) {
            SYNC_LOAD(lease);
            SYNC_LOAD(drop);
            if (core::load_acquire(ring_.kept_by(chunk, r)) != kNotKept && !is_gone(r)) return true;
        }
        return false;
    }

    const Ring& ring_;
    std::vector<std::uint64_t> positions_;  // of the message in each chunk
    std::vector<bool> is_read_;             // as of the last look
    std::uint64_t latest_ = kNone;          // its chunk
    std::optional<std::uint64_t> next_;
    bool is_next_kept_ = false;
};

class LatestReader {
public:
    LatestReader(const Ring& ring, std::size_t reader) : ring_(ring), reading_(ring.slot_of(reader).reading) {}

    // True if there is a message of that position or a later one.
    bool has(std::uint64_t position) const noexcept {
        const std::uint64_t latest = core::load_relaxed(ring_.waits().latest);
        return latest != 0 && ring_.position_of(latest - 1) >= position;
    }

    // Call it if has(). Each turn but the last means that the writer has published another.
    void take() noexcept {
        // Relaxed: the fence orders both loads before all that is read of the message.
        SYNC_LOAD(latest);
        std::uint64_t latest = core::load_relaxed(ring_.waits().latest);
        for (;;) {
            ticket_ = latest - 1;
            // Release: it also says that this reader has finished with the chunk that was there.
            SYNC_STORE(take);
            core::store_release(reading_, 1 + static_cast<std::uint32_t>(ring_.chunk_at(ticket_)));
            SYNC_LOAD(latest);
            core::full_fence();
            const std::uint64_t again = core::load_relaxed(ring_.waits().latest);
            if (again == latest) return;
            latest = again;
        }
    }
    std::uint64_t ticket() const noexcept { return ticket_; }

    void finish() noexcept {
        SYNC_STORE(finish);
        core::store_release<std::uint32_t>(reading_, 0);
    }

private:
    const Ring& ring_;
    std::uint32_t& reading_;
    std::uint64_t ticket_ = 0;  // of the message that was taken last
};

}  // namespace memlane::broadcast
