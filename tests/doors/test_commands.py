"""Names on the command line: who serves them, what comes, what dead processes left."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import MessageQueue, WriterClosed
from tests.support import PATIENCE, Link, run_memlane, start, until

pytestmark = pytest.mark.usefixtures("commands")


def memlane(folder: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    done = run_memlane(*arguments, MEMLANE_RUN=str(folder))
    assert (done.returncode, done.stderr) == (0, ""), done
    return done


def found(folder: Path, *arguments: str) -> Any:
    return json.loads(memlane(folder, *arguments, "--json").stdout)


def serves(link: Link) -> None:
    """Role: serves until it is killed."""
    with MessageQueue(1, name="old/steps", serve=True):
        link.tell()
        signal.pause()


def test_ls_shows_names_and_who_serves_them(run: Path) -> None:
    assert found(run, "ls")["names"] == []
    assert not run.exists()
    with MessageQueue(1, name="steps", serve=True):
        peer = start(serves)
        peer.hear()
        names = found(run, "ls")["names"]
        assert names == [
            {"name": "old/steps", "pid": peer.pid},
            {"name": "steps", "pid": os.getpid()},
        ]
        peer.kill()
        text = memlane(run, "ls").stdout
        assert "old/steps nobody, since its process has died" in text
        assert f"steps     {os.getpid()} " in text
        assert found(run, "clean")["names"] == ["old/steps"]
        assert "old/steps name" in " ".join(memlane(run, "clean").stdout.split())
        assert "old/steps" in found(run, "clean", "--yes")["removed"]
        assert found(run, "ls")["names"] == [{"name": "steps", "pid": os.getpid()}]


def test_a_folder_of_names_that_is_refused_stops_no_command(run: Path) -> None:
    run.mkdir(mode=0o755)
    run.chmod(0o755)
    assert found(run, "ls")["names"] == []
    assert found(run, "clean")["names"] == []


def test_clean_takes_the_name_of_nobody_who_comes_meanwhile(run: Path) -> None:
    """It looks again under the lock under which names are claimed."""
    peer = start(serves)
    peer.hear()
    peer.kill()
    with MessageQueue(1, name="old/steps", serve=True):
        assert "old/steps" not in found(run, "clean", "--yes")["removed"]
        MessageQueue.open("old/steps", timeout=PATIENCE).close()


def test_open_prints_what_comes(run: Path) -> None:
    """A line for each message, arrays by their shape, and nothing that a terminal obeys."""
    command = [sys.executable, "-m", "memlane", "open", "steps"]
    with MessageQueue(2, name="steps", serve=True, late_readers=True) as writer:
        reader = MessageQueue.open("steps", 1)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as program:
            assert program.stdout is not None
            assert program.stderr is not None
            assert program.stderr.readline() == "reader 0 of steps\n"
            for message in ({"step": 1, "image": np.ones((3, 4))}, "\33[2J", [b"x" * 1000]):
                writer.enqueue(message)
            assert program.stdout.readline() == "{'image': <ndarray (3, 4) float64>, 'step': 1}\n"
            assert program.stdout.readline() == "'\\x1b[2J'\n"
            assert len(program.stdout.readline()) < 150
            writer.close()
            assert program.wait(PATIENCE) == 0
        with pytest.raises(WriterClosed):
            [reader.dequeue(PATIENCE) for _ in range(4)]
        reader.close()


def test_open_ends_after_a_number_of_messages(run: Path) -> None:
    """Its place is free for the next."""
    with MessageQueue(1, name="steps", serve=True) as writer:
        for number in range(3):
            program = subprocess.Popen(
                [sys.executable, "-m", "memlane", "open", "steps", "--count", "1"],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            until(
                lambda: writer.statistics().readers[0].state in ("running", "sleeping"), "it reads"
            )
            writer.enqueue(number)
            assert program.communicate(timeout=PATIENCE)[0] == f"{number}\n"
            assert program.returncode == 0


def test_open_says_what_is_missing(run: Path) -> None:
    done = run_memlane("open", "steps", "--timeout", "0.1", MEMLANE_RUN=str(run))
    assert done.returncode == 4
    assert done.stderr.startswith("memlane: ")
    assert "steps" in done.stderr
    assert len(done.stderr.splitlines()) == 1
