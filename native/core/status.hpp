// How a call on an end returned. The bindings turn each status except `ok` into a Python exception.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>

namespace memlane::core {

enum class Status {
    ok,
    would_block,  // a call that never waits found nothing to do
    timed_out,
    interrupted,  // the caller's look() ended the call: a signal, a cancel
    closed,       // this end was closed, before or during the call
    peer_closed,
    peer_died,
};

struct Outcome {
    Status status = Status::ok;
    std::size_t slot = 0;  // of the peer, with peer_closed and peer_died
};

// The outcome of a call that takes something: `loan` has a value if and only if the status is `ok`.
template <class Loan>
struct Taken : Outcome {
    Taken(const Outcome& outcome) : Outcome(outcome) {}
    Taken(Status why, std::size_t peer = 0) : Outcome{why, peer} {}
    Taken(Loan taken) : loan(std::move(taken)) {}
    std::optional<Loan> loan;
};

}  // namespace memlane::core
