"""A call in its own thread, so that a test can act while the call is blocked."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from tests.support.waiting import PATIENCE, until_asleep

T = TypeVar("T")


class Aside(Generic[T]):
    """Starts ``call(*args, **kwargs)`` at once; ``result()`` gives its value or its exception."""

    def __init__(self, call: Callable[..., T], *args: Any, **kwargs: Any) -> None:
        self._value: T
        self._error: BaseException | None = None
        self.ended = float("nan")
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(call, args, kwargs), daemon=True)
        self._thread.start()
        self._started.wait()

    def _run(self, call: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._started.set()
        try:
            self._value = call(*args, **kwargs)
        except BaseException as error:
            self._error = error
        finally:
            self.ended = time.monotonic()

    def until_blocked(self) -> "Aside[T]":
        """Return when the thread sleeps in its call, or the call has ended."""
        assert self._thread.native_id is not None
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            until_asleep(self._thread.native_id)
        return self

    def result(self, timeout: float = PATIENCE) -> T:
        """The value of the call, or its exception; the time of its end is in ``ended``."""
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise AssertionError(f"the call did not end within {timeout} s")
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback references the call's arguments
        return self._value
