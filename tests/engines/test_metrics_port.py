"""`MEMLANE_METRICS_PORT` in vLLM's plugin: an exporter that lives as long as the engine."""

import os
import re
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

from tests.support import PATIENCE, until

ENGINE = """
import logging, multiprocessing, sys
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
from memlane.engines.vllm import register

def worker():
    register()

if __name__ == "__main__":
    register()
    register()
    process = multiprocessing.get_context("spawn").Process(target=worker)
    process.start()
    process.join()
    print("ready", flush=True)
    sys.stdin.readline()
"""


def engine(folder: Path, port: str) -> "subprocess.Popen[str]":
    script = folder / "engine.py"  # a file, for the processes that it spawns
    script.write_text(ENGINE)
    environment = {**os.environ, "MEMLANE_METRICS_PORT": port}
    return subprocess.Popen(
        [sys.executable, str(script)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answers(port: int) -> bool:
    where = f"http://127.0.0.1:{port}/metrics"
    gone = suppress(urllib.error.URLError, ConnectionError)
    with gone, urllib.request.urlopen(where, timeout=PATIENCE) as answer:
        return b"memlane_shm_bytes" in answer.read()
    return False


def test_it_lives_as_long_as_the_engine(tmp_path: Path) -> None:
    """Also if that is killed."""
    with engine(tmp_path, "0") as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.fullmatch(r"INFO metrics at http://127\.0\.0\.1:(\d+).*\n", line)
        assert found is not None, line
        port = int(found[1])
        assert answers(port)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"  # its process has ended, and all is logged
        process.kill()
        assert process.stderr.read() == ""
    until(lambda: not answers(port), "the exporter has ended")


def test_a_port_that_cannot_be_had(tmp_path: Path) -> None:
    """Is one warning, and the engine goes on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for port in (str(taken.getsockname()[1]), "many"):
            with engine(tmp_path, port) as process:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
                assert process.stderr is not None
                line = process.stderr.readline()
                assert line.startswith("WARNING no metrics: memlane export ended: ")
                assert ("Address already in use" in line) == (port != "many")
                _, rest = process.communicate("\n", timeout=PATIENCE)
                assert (process.returncode, rest) == (0, "")


def test_nothing_starts_unasked(tmp_path: Path) -> None:
    with engine(tmp_path, "") as process:
        out, said = process.communicate("\n", timeout=PATIENCE)
        assert (out, said) == ("ready\n", "")
