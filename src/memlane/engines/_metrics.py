"""Starts `memlane export` beside an engine."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from typing import IO, cast

VARIABLE = "MEMLANE_METRICS_PORT"

logger = logging.getLogger("memlane")


def start_if_asked() -> None:
    """Starts the exporter on the port that the variable names, in the engine's first process. It
    ends with this process. Whatever goes wrong is one WARNING, and the engine goes on."""
    port = os.environ.pop(VARIABLE, "").strip()  # the engine's other processes do not see it
    if not port or multiprocessing.parent_process() is not None:
        return
    if not sys.executable:
        logger.warning("no metrics: this interpreter does not know how to start another")
        return
    command = [sys.executable, "-m", "memlane", "export", "--port", port]
    try:
        child = subprocess.Popen(
            [*command, "--ends-with", str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # or Ctrl-C would end it before the engine
        )
    except OSError as error:
        logger.warning("no metrics: cannot start memlane export: %s", error)
        return
    threading.Thread(target=_report, args=(child,), name="memlane-export", daemon=True).start()


def _report(child: subprocess.Popen[str]) -> None:
    """Logs where it listens, or why it does not."""
    output = cast("IO[str]", child.stdout)
    with output:
        line = output.readline().strip()
        if line.startswith("memlane: http://"):
            logger.info("metrics at %s", line.removeprefix("memlane: "))
            line = ""
        rest = output.read()
    child.wait()  # or it would stay a zombie
    said = " ".join(f"{line}\n{rest}".split())
    logger.warning("no metrics: memlane export ended: %s", said[-500:])
