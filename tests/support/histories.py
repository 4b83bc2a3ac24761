"""The records of the ends of one queue, as each recorded it, and a check whether that is allowed.

A history has the records of a writer, its readers, and the process that disturbs them. Each has a
monotonic time, a word, and a number (of a message, a rank) or the name of an error:

    writer      sending k, then sent k or failed k; died r (a ReaderDied that it raised); closed
    reader r    got k; ended with an error
    trouble     killed, stopped, resumed (who); pulled, plugged (the cable to the remote readers)
"""

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support import late_since

WRITER = -1
SLACK = 1.5 + 1.0
"""Allowed beyond the bound: keep-alives (`docs/design/remote.md`), and what a call takes."""
_LEAST_PAUSE = 0.3  # TCP's shortest pause, plus the time it takes to plug the cable


@dataclass(frozen=True)
class Record:
    moment: float
    word: str
    what: int | str = 0


class Log:
    """A log of what one process did; complete even if the process is killed."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, word: str, what: int | str = 0) -> None:
        os.write(self._file, f"{time.monotonic():.6f} {word} {what}\n".encode())

    def close(self) -> None:
        os.close(self._file)

    @staticmethod
    def read(path: Path) -> list[Record]:
        records = []
        for line in path.read_text().splitlines() if path.exists() else []:
            moment, word, what = line.split(" ")
            is_number = what.lstrip("-").isdecimal()
            records.append(Record(float(moment), word, int(what) if is_number else what))
        return records


@dataclass
class History:
    """The history of one queue; `local` are the ranks that need no cable."""

    bound: float
    writer: list[Record]
    readers: dict[int, list[Record]]
    trouble: list[Record]
    local: set[int] = field(default_factory=set)

    def violations(self) -> list[str]:
        """Everything that must not happen, in words."""
        found = [*self._of_the_writer()]
        for rank in self.readers:
            found += self._of_order(rank)
            found += self._of_the_end(rank)
        return found

    # What is known ----------------------------------------------------------------------------

    def _killed(self, who: int) -> float | None:
        return next((r.moment for r in self.trouble if (r.word, r.what) == ("killed", who)), None)

    def _spans(self, begin: str, end: str) -> Iterator[tuple[float, float]]:
        begun: dict[int | str, float] = {}
        for record in self.trouble:
            if record.word == begin:
                begun[record.what] = record.moment
            elif record.word == end and record.what in begun:
                yield begun.pop(record.what), record.moment
        for moment in begun.values():
            yield moment, float("inf")

    def _was_gone(self, rank: int, moment: float) -> bool:
        """Returns whether its cable was pulled for so long before that moment that it may count as
        dead. TCP's retries double their pauses, so half of the bound may be enough; and two gaps
        count as one if TCP may not have retried between them."""
        if rank in self.local:
            return False
        if late_since(moment - 2 * self.bound, moment) >= self.bound / 4:
            return True  # the machine has let nobody run who could have answered
        first = last = 0.0
        for begin, end in self._spans("pulled", "plugged"):
            if begin - last > last - first + _LEAST_PAUSE:
                first = begin
            last = min(end, moment)
            if last - first >= self.bound / 2:
                return True
        return False

    def _latest(self, moment: float) -> float:
        """Returns when all ends must know of a death at that moment, whatever was stopped or cut
        since."""
        spans = [*self._spans("stopped", "resumed"), *self._spans("pulled", "plugged")]
        return (
            moment
            + self.bound
            + SLACK
            + sum(end - max(begin, moment) for begin, end in spans if moment < end < float("inf"))
        )

    def _is_late(self, cause: float, told: float) -> bool:
        """Returns whether that is later after a death than it may be."""
        latest = self._latest(cause)
        return told > latest and told > latest + late_since(cause, told)

    # What must hold ---------------------------------------------------------------------------

    def _of_order(self, rank: int) -> Iterator[str]:
        sent = numbers(self.writer, "sent")
        begun = numbers(self.writer, "sending")
        failed = set(numbers(self.writer, "failed"))
        got = numbers(self.readers[rank], "got")
        for number in got:
            if number in failed:
                yield f"reader {rank} got {number}, which was not sent"
        is_open = bool(begun) and begun[-1] not in failed and begun[-1:] != sent[-1:]
        possible = sent + begun[-1:] if is_open else sent
        if got != possible[: len(got)]:
            at = next(i for i, k in enumerate(got) if possible[i : i + 1] != [k])
            yield f"reader {rank} got {got[at]} where {possible[at : at + 1]} was due"

    def _of_the_end(self, rank: int) -> Iterator[str]:
        ends = [record for record in self.readers[rank] if record.word == "ended"]
        if not ends:
            if self._killed(rank) is None:
                yield f"reader {rank} never ended"
            return
        end = ends[0]
        if end.what == "WriterClosed":
            if numbers(self.readers[rank], "got") != numbers(self.writer, "sent"):
                yield f"reader {rank} was told of the end, but has not got everything"
            return
        if end.what not in ("WriterDied", "ReaderGivenUp"):
            yield f"reader {rank} ended with {end.what}"
            return
        cause = [m for m in (self._killed(WRITER),) if m is not None]
        was_accused = any((r.word, r.what) == ("died", rank) for r in self.writer)
        if cause:
            if self._is_late(min(cause), end.moment):
                yield f"reader {rank} learnt of the death {end.moment - min(cause):.1f} s late"
        elif not was_accused and not self._was_gone(rank, end.moment):
            yield f"reader {rank} was told that the writer died, which lived"

    def _of_the_writer(self) -> Iterator[str]:
        told = {
            record.what: record.moment for record in reversed(self.writer) if record.word == "died"
        }
        last = self.writer[-1].moment if self.writer else 0.0
        for rank in self.readers:
            cause = self._killed(rank)
            if cause is None:
                if rank in told and not self._was_gone(rank, told[rank]):
                    yield f"the writer was told that reader {rank} died, which lived"
                continue
            has_ended = any(r.word == "ended" and r.moment < cause for r in self.readers[rank])
            if not has_ended and self._is_late(cause, min(last, told.get(rank, last))):
                yield f"the writer was not told in time that reader {rank} died"


def numbers(records: Iterable[Record], word: str) -> list[int]:
    return [int(record.what) for record in records if record.word == word]
