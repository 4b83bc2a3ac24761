"""Functions that are called once a call is done: by a thread that waits for that, while there are
any."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from memlane._base.deadline import NEVER
from memlane._base.lifetime import start_thread
from memlane._locks import Lock
from memlane.workers.answers import Answers
from memlane.workers.table import Pending

_log = logging.getLogger("memlane.workers")


class Callbacks:
    """The callbacks of a group's calls."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._due: list[tuple[Pending, Callable[[], object]]] = []
        self._lock = Lock()
        self._thread: threading.Thread | None = None

    def add(self, call: Pending, callback: Callable[[], object]) -> None:
        """Calls it at once if the call is done."""
        with self._lock:
            self._due.append((call, callback))
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="memlane-callbacks", daemon=True)
                start_thread(thread)
                self._thread = thread
        self._call_done()

    def _run(self) -> None:
        try:
            while self._answers.wait(self._is_any_done, NEVER):
                self._call_done()
                with self._lock:
                    if not self._due:
                        self._thread = None
                        return
        finally:  # however the wait has ended
            self._call_done()

    def _is_any_done(self) -> bool:
        return not self._due or any(call.is_settled() for call, _ in self._due)

    def _call_done(self) -> None:
        """Each is called by the thread that removes it."""
        for entry in [*self._due]:
            if not entry[0].is_settled():
                continue
            try:
                self._due.remove(entry)
            except ValueError:
                continue
            try:
                entry[1]()
            except Exception:
                _log.exception("a callback of %s() has raised", entry[0].name)
