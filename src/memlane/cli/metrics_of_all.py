"""`memlane export --all`: metrics of all users and containers, each with whose they are.

A look at them needs processes of their own, which a server with threads must not fork: each answer
is of a command that looks once.
"""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
import time
from dataclasses import replace
from typing import Any

from memlane.cli.users import Answer, User, answers_of_all
from memlane.errors import system_fault
from memlane.inspect.looks import Looks
from memlane.inspect.segment import Deliveries, free_space
from memlane.metrics import exposition
from memlane.metrics.catalogue import DEATHS, LOOK_ERRORS, METRICS, Sample, measure
from memlane.metrics.tally import Tally, taken

_AFTER = 0.5  # seconds, after which a wait is shown
_FRESH = 1.0  # seconds that an answer serves for all who ask
_PATIENCE = 30.0
_WHOSE = ("uid", "pod", "container")
Whose = tuple[str, str, str]


def once() -> str:
    """Looks at all users' segments. One that could not be looked at counts as an error of a look;
    deaths are for who looks again and again."""
    answers, _, _ = answers_of_all(_printed, 0.0)
    samples: dict[str, list[Sample]] = {metric.name: [] for metric in METRICS}
    taken_names = set[Whose]()
    for user, answer in answers:
        whose = _whose(user, taken_names)
        found = _families(answer)
        samples[LOOK_ERRORS.name].append((whose, float(found is None)))
        for name, values in (found or {}).items():
            samples[name] += [((*labels, *whose), value) for labels, value in values]
    return exposition.text(
        (replace(metric, labels=(*metric.labels, *_WHOSE)), samples[metric.name])
        for metric in METRICS
        if metric is not DEATHS
    )


def _whose(user: User, others: set[Whose]) -> Whose:
    """The labels of a user: no others', as a scrape with two equal ones would be refused."""
    inside = user.container
    if inside is None:
        return str(user.uid), "", ""
    made = str(user.uid), inside.pod or "", ",".join(inside.ids)
    if made in others or not inside.ids:  # such as a mount namespace inside of a container
        made = (*made[:2], f"{made[2]} pid {inside.pids[0]}".lstrip())
    others.add(made)
    return made


def _printed() -> int:
    """The command that each user runs."""
    tally = Tally()
    families = measure(taken(Looks(after=_AFTER), tally), free_space(), tally)
    print(json.dumps([[metric.name, list(map(_as_json, samples))] for metric, samples in families]))
    return 0


def _as_json(sample: Sample) -> list[Any]:
    labels, value = sample
    return [labels, [value.seconds, value.counts] if isinstance(value, Deliveries) else value]


def _families(answer: Answer) -> dict[str, list[Sample]] | None:
    """Returns what a user has printed; None if that is nothing."""
    if answer.code:
        return None
    return {
        name: [(tuple(labels), _value(value)) for labels, value in samples]
        for name, samples in json.loads(answer.text)
        if name not in (DEATHS.name, LOOK_ERRORS.name)
    }


class Source:
    """The source of a server: one look for all who ask at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._text, self._at = "", float("-inf")

    def metrics(self) -> str:
        """Raises SystemFault if the command fails."""
        with self._lock:
            if time.monotonic() - self._at >= _FRESH:
                self._text, self._at = _said(), time.monotonic()
            return self._text

    def close(self) -> None:
        """Nothing goes on."""


def _said() -> str:
    # -P: else the working directory, in which others may write, would come before memlane's own.
    command = [sys.executable, "-P", "-m", "memlane", "export", "--all", "--once"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        try:
            text, _ = process.communicate(timeout=_PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            raise system_fault(errno.ETIMEDOUT, "the look at all users has no end") from None
    if process.returncode:
        raise system_fault(errno.EIO, "the look at all users has failed")
    return text.decode(errors="replace")


def _value(value: Any) -> float | Deliveries:
    if isinstance(value, list):
        seconds, counts = value
        return Deliveries(seconds, tuple(counts))
    return float(value)
