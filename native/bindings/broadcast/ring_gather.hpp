// One reader of several rings for Python. A message that is there: one native call.
#pragma once

#include <nanobind/nanobind.h>

#include <list>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/broadcast/ring_reader.hpp"
#include "broadcast/ring_gather.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class RingGather {
public:
    // `nothing`: what a call returns on timeout.
    RingGather(const nb::list& readers, nb::object nothing)
        : nothing_(std::move(nothing)), gather_(readers.size()) {
        for (const nb::handle reader : readers) {
            kept_.push_back(nb::borrow(reader));
            readers_.push_back(&nb::cast<RingReader&>(reader));
        }
        cores_.resize(readers_.size());
    }

    // What the next reader in turn whose call would not wait returns, or raises. Closed ones are left out.
    nb::object receive(nb::handle timeout, nb::handle cancel, nb::handle lend) {
        const OneAtATime one(*this);
        const std::optional<std::size_t> next = begin(timeout, cancel);
        return next ? receive_from(*next, lend) : nothing_;
    }

    // A list of what the next readers in turn have, as RingReader::receive_many; `nothing` on timeout.
    nb::object receive_many(nb::handle timeout, nb::handle cancel, nb::handle lend, std::size_t most) {
        const OneAtATime one(*this);
        const std::optional<std::size_t> next = begin(timeout, cancel);
        if (!next) return nothing_;
        if (nb::object objects = take_small(*next, most); objects.is_valid()) return objects;
        return list_of([&] { return receive_from(*next, lend); });
    }

    // The reader whose ring has ended gives its place to another.
    void replace(std::size_t at, const nb::object& reader) {
        const OneAtATime one(*this);
        readers_.at(at) = &nb::cast<RingReader&>(reader);
        kept_.at(at) = reader;
    }
    // The reader of which the last call has raised, instead of a message of its, whose decoding may raise anything.
    std::optional<std::size_t> ended() const noexcept { return ended_; }

private:
    // Also for a call that waits without the GIL: two would change what both look at.
    class OneAtATime {
    public:
        explicit OneAtATime(RingGather& gather) : call_(gather.call_) {
            if (!call_.begin()) raise_failure(gather.kept_.front(), "concurrent_use");
        }
        OneAtATime(const OneAtATime&) = delete;
        OneAtATime& operator=(const OneAtATime&) = delete;
        ~OneAtATime() { call_.end(); }

    private:
        OneCall& call_;
    };

    // A batch of one ring, and the call that takes it.
    struct Taking {
        explicit Taking(RingReader& reader) : call(reader), doing(reader, core::SlotActivity::decoding), batch(reader.core()) {}
        const RingReader::Call call;
        const RingReader::Doing doing;
        Batch batch;
    };

    // The small messages that are there, from that reader on. The first ring with something else ends it, and has its turn next.
    // Invalid if there are none.
    nb::object take_small(std::size_t next, std::size_t most) {
        nb::list objects;
        std::list<Taking> takings;
        for (std::size_t i = 0; i < readers_.size() && objects.size() < most; ++i) {
            const std::size_t at = (next + i) % readers_.size();
            RingReader& reader = *readers_[at];
            if (reader.is_closed()) continue;
            if (!reader.is_ready_anyway() && !reader.core().is_ready()) continue;
            if (i > 0) gather_.turn_to(at);  // the first has had its turn
            if (reader.is_ready_anyway()) break;
            const std::size_t before = objects.size();
            reader.take_small(takings.emplace_back(reader).batch, objects, most);
            if (objects.size() == before) break;
            gather_.turn_to(at + 1);
        }
        for (Taking& one : takings) one.batch.finish();
        return objects.size() > 0 ? nb::object(objects) : nb::object();
    }

    nb::object receive_from(std::size_t at, nb::handle lend) {
        RingReader& reader = *readers_[at];
        const bool is_decoded_again = reader.is_ready_anyway();
        const std::uint64_t before = reader.position();
        try {
            return reader.receive(nb::int_(0), nb::none(), lend);
        } catch (...) {
            if (!is_decoded_again && reader.position() == before) ended_ = at;
            throw;
        }
    }

    std::optional<std::size_t> begin(nb::handle timeout, nb::handle cancel) {
        ended_.reset();
        const os::Deadline deadline = to_deadline(timeout);
        if (!cancel.is_none() && !nb::hasattr(cancel, "is_set"))
            raise_error(Error::InvalidType, "cancel must be a threading.Event or None");
        return find(deadline, cancel);
    }

    std::optional<std::size_t> find(os::Deadline deadline, nb::handle cancel) {
        bool any = false;
        for (std::size_t i = 0; i < readers_.size(); ++i) {
            cores_[i] = readers_[i]->shared_core().get();
            any |= cores_[i] != nullptr;
            if (readers_[i]->is_ready_anyway()) return i;
        }
        if (!any) raise_error(Error::Closed, "this gather is closed");
        for (std::size_t i = 0; i < readers_.size(); ++i)
            if (cores_[i] != nullptr) {
                readers_[i]->check_own();
                break;
            }
        gather_.look_in_passing(cores_);
        if (const auto found = gather_.find(cores_)) return found;
        return wait(deadline, cancel);
    }

    std::optional<std::size_t> wait(os::Deadline deadline, nb::handle cancel) {
        std::vector<std::unique_ptr<RingReader::Call>> calls;
        RingReader* first = nullptr;
        for (std::size_t i = 0; i < readers_.size(); ++i) {
            if (cores_[i] == nullptr) continue;
            calls.push_back(std::make_unique<RingReader::Call>(*readers_[i]));
            if (first == nullptr) first = readers_[i];
        }
        first->check_own();
        Interruption look(first->self(), first->core().segment(), "message", cancel, [] { return false; });
        if (look.is_cancelled()) raise_failure(first->self(), "cancelled");
        first->check_own();
        const os::Nanoseconds longest = cancel.is_none() ? core::kLongestSlice : core::kSlice;
        const auto next = without_gil([&] { return gather_.next(cores_, deadline, look, longest); });
        if (next.loan) return next.loan;
        if (next.status == core::Status::interrupted) raise_failure(first->self(), "cancelled");
        return std::nullopt;
    }

    const nb::object nothing_;
    std::vector<nb::object> kept_;
    std::vector<RingReader*> readers_;
    std::vector<broadcast::RingReader*> cores_;  // of the call under way
    broadcast::RingGather gather_;
    std::optional<std::size_t> ended_;
    OneCall call_;
};

}  // namespace memlane::bindings
