"""Whether a signal handler raised an error. Called only once something has failed."""

from __future__ import annotations

from types import TracebackType

from memlane._importing import fork_waits


def raised_by_handler(trace: TracebackType | None) -> bool:
    """Returns whether a signal handler that is installed now is in the traceback.

    Python runs handlers between any two instructions, so their errors look like those of the code
    that they interrupted.
    """
    with fork_waits:
        import signal

    handlers = [signal.getsignal(number) for number in range(1, signal.NSIG)]
    codes = {code for handler in handlers if (code := _code_of(handler)) is not None}
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(handler: object) -> object:
    """The code of a function, a method, a partial, or an object that can be called."""
    handler = getattr(handler, "func", handler)
    if callable(handler) and not hasattr(handler, "__code__"):
        handler = handler.__call__
    return getattr(handler, "__code__", None)
