// How a call on an endpoint ended. The bindings turn everything but `ok` into one Python exception.
#pragma once

#include <cstddef>
#include <optional>
#include <utility>

namespace memlane::core {

enum class Status {
    ok,
    would_block,  // a call that never waits found nothing to do
    timed_out,
    interrupted,  // the caller's own look() asked for it: a signal, a cancel
    closed,       // this end was closed, before or during the call
    peer_closed,
    peer_died,
};

struct Outcome {
    Status status = Status::ok;
    std::size_t slot = 0;  // of the peer, with peer_closed and peer_died
};

// The same of a call that takes something: what it took is there if the status is `ok`, and only then.
template <class Loan>
struct Taken : Outcome {
    Taken(const Outcome& outcome) : Outcome(outcome) {}
    Taken(Status why, std::size_t peer = 0) : Outcome{why, peer} {}
    Taken(Loan taken) : loan(std::move(taken)) {}
    std::optional<Loan> loan;
};

}  // namespace memlane::core
