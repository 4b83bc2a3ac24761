"""The errors for refused moves. Installed for `native/bindings/offload/copy_blocks.cpp`."""

from __future__ import annotations

from memlane._native import install
from memlane.errors import InvalidArgument, MemlaneError, PairRefused, WrongProcess

_HINT = "nothing was moved"


def refusal(what: str, pair: int, block: int | None, sources: int, targets: int) -> MemlaneError:
    """The exception for the fault `what` of a pair, or of the two arrays."""
    match what:
        case "no_such_source":
            text = f"block {block} of src, which has {sources} blocks"
        case "no_such_target":
            text = f"block {block} of dst, which has {targets} blocks"
        case "target_twice":
            text = f"block {block} of dst, and so does an earlier one"
        case "overlap":
            text = (
                f"block {block} of dst, which shares memory with a block that one of the pairs "
                "reads; move it in two calls, or by way of other blocks"
            )
        case "tangled":
            return InvalidArgument(
                f"src and dst share memory, in layouts too different to tell their blocks apart; "
                f"{_HINT}. Copy to other memory first"
            )
        case "self_overlap":
            return InvalidArgument(
                f"blocks of dst may share memory with each other (its strides say so); {_HINT}"
            )
        case _:
            return WrongProcess(
                "a signal handler forked during this call: the move belongs to the parent process, "
                "and this one must not rely on what it has moved"
            )
    return PairRefused(f"pair {pair} names {text}; {_HINT}", what, pair, block)


install(move_refusal=refusal)
