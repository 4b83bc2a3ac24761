"""An object that lives in its own process and is called from the test."""

import time
from collections.abc import Callable
from typing import Any

from tests.harness.link import Link
from tests.harness.peer import Peer
from tests.harness.waiting import PATIENCE


def serve(link: Link, target: object, greeting: object = None) -> None:
    """The role: send ``greeting``, then make the requested calls until told to stop."""
    link.tell(greeting)
    while (request := link.hear(timeout=10 * PATIENCE)) is not None:
        call, args, kwargs = request
        link.tell("begun")
        value, error = None, None
        try:
            if isinstance(call, str):
                value = getattr(target, call)(*args, **kwargs)
            else:
                value = call(target, *args, **kwargs)
        except BaseException as problem:
            error = problem.with_traceback(None)
        link.tell((value, error, time.monotonic()))
        del value, error, request, call, args, kwargs


class Remote:
    """The test's side of ``serve``; ``greeting`` is the role's first word."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.pid = peer.pid
        self.greeting = peer.hear()
        self.ended = float("nan")

    def begin(self, call: str | Callable[..., Any], *args: Any, **kwargs: Any) -> "Remote":
        """Start a method (or ``call(target, ...)``); returns when the call has begun."""
        self.peer.tell((call, args, kwargs))
        assert self.peer.hear() == "begun"
        return self

    def until_blocked(self) -> "Remote":
        """Return when the process sleeps in the call that has begun."""
        self.peer.until_asleep()
        return self

    def outcome(self, timeout: float = PATIENCE) -> Any:
        """The value of the call or its exception; the time of its end is in ``ended``."""
        value, error, self.ended = self.peer.hear(timeout)
        if error is not None:
            raise error
        return value

    def call(self, call: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Begin a call and wait for its outcome."""
        return self.begin(call, *args, **kwargs).outcome()

    def leave(self) -> None:
        """Let the role end: the object is dropped and the process exits."""
        self.peer.tell(None)
        self.peer.result()
