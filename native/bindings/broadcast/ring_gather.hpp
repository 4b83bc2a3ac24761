// One reader of several rings for Python: says which of them to read from next.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <utility>
#include <vector>

#include "bindings/broadcast/ring_reader.hpp"
#include "broadcast/ring_gather.hpp"

namespace memlane::bindings {

namespace nb = nanobind;

class RingGather {
public:
    explicit RingGather(const nb::list& readers) {
        for (const nb::handle reader : readers) {
            kept_.push_back(nb::borrow(reader));
            readers_.push_back(&nb::cast<RingReader&>(reader));
        }
        cores_.resize(readers_.size());
    }

    // The index of the next reader whose call would not wait, in turn; None on timeout. Closed ones are left out.
    nb::object next(nb::handle timeout, nb::handle cancel) {
        bool any = false;
        for (std::size_t i = 0; i < readers_.size(); ++i) {
            cores_[i] = readers_[i]->is_closed() ? nullptr : readers_[i]->shared_core().get();
            if (cores_[i] == nullptr) continue;
            any = true;
            if (readers_[i]->is_ready_anyway()) return nb::int_(i);
        }
        if (!any) raise_error(Error::Closed, "this gather is closed");
        if (const auto found = gather_.find(cores_)) return nb::int_(*found);
        return wait(timeout, cancel);
    }

private:
    nb::object wait(nb::handle timeout, nb::handle cancel) {
        std::vector<std::unique_ptr<RingReader::Call>> calls;
        RingReader* first = nullptr;
        for (std::size_t i = 0; i < readers_.size(); ++i) {
            if (cores_[i] == nullptr) continue;
            calls.push_back(std::make_unique<RingReader::Call>(*readers_[i]));
            if (first == nullptr) first = readers_[i];
        }
        const os::Deadline deadline = first->deadline_of(timeout);
        Interruption look(first->self(), first->core().segment(), "message", cancel, [] { return false; });
        if (look.is_cancelled()) raise_failure(first->self(), "cancelled");
        const os::Nanoseconds longest = cancel.is_none() ? core::kLongestSlice : core::kSlice;
        const auto next = without_gil([&] { return gather_.next(cores_, deadline, look, longest); });
        if (next.loan) return nb::int_(*next.loan);
        if (next.status == core::Status::interrupted) raise_failure(first->self(), "cancelled");
        return nb::none();
    }

    std::vector<nb::object> kept_;
    std::vector<RingReader*> readers_;
    std::vector<broadcast::RingReader*> cores_;  // of the call under way
    broadcast::RingGather gather_;
};

}  // namespace memlane::bindings
