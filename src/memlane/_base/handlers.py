"""Recognises errors that a signal handler raised. Called only once something has failed."""

from __future__ import annotations

from itertools import pairwise
from types import FrameType, TracebackType

_VARARGS = 4  # inspect.CO_VARARGS, without importing all of inspect


def raised_by_handler(trace: TracebackType | None) -> bool:
    """Returns whether a call of a signal handler is in the traceback.

    Python runs handlers between any two instructions, so their errors look like those of the code
    that they interrupted.
    """
    while trace is not None:
        if _is_handler(trace.tb_frame):
            return True
        trace = trace.tb_next
    return False


def _is_handler(frame: FrameType) -> bool:
    """Returns whether the function got what Python gives to handlers: a number, and the interrupted
    frame, which is its caller. The installed handlers prove less: many restore the former one and
    raise."""
    code = frame.f_code
    count = code.co_argcount
    given = [frame.f_locals.get(name) for name in code.co_varnames[:count]]
    if code.co_flags & _VARARGS:
        given += frame.f_locals.get(code.co_varnames[count + code.co_kwonlyargcount], ())
    return frame.f_back is not None and any(
        isinstance(number, int) and interrupted is frame.f_back
        for number, interrupted in pairwise(given)
    )
