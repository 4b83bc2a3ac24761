"""A `memlane export` in its own process, and a browser that looks at it."""

from __future__ import annotations

import base64
import http.client
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.support.waiting import PATIENCE


class Exporter:
    """Attributes: port, and the process."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        self.process, self.port = process, port

    def get(self, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str]:
        """Status and text."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            connection.request(method, path, headers={} if host is None else {"Host": host})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def metrics(self) -> str:
        status, text = self.get("/metrics")
        assert status == 200, text
        return text

    def json(self) -> Any:
        status, text = self.get("/json")
        assert status == 200, text
        return json.loads(text)


PROGRAM = """
import json, sys
from memlane.__main__ import main
from memlane.cli import export
for name, value in json.loads(sys.argv.pop(1)).items():
    assert hasattr(export, name)
    setattr(export, name, value)
main()
"""


@contextmanager
def exporter(*arguments: str, **constants: float) -> Iterator[Exporter]:
    """The command, with other values of constants of its module: shorter waits."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(constants), "export", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            port = int(line.partition("http://127.0.0.1:")[2].partition("/")[0])
            yield Exporter(process, port)
        finally:
            process.kill()


class Browser:
    """Headless Chromium, by the protocol of WebDriver."""

    def __init__(self, port: int) -> None:
        self._port = port
        options = {"args": ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}}
        self._session = ""
        self._session = "/session/" + self._ask("POST", "/session", wanted)["sessionId"]

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE)
        try:
            text = None if body is None else json.dumps(body)
            connection.request(method, self._session + path, text)
            answer = json.loads(connection.getresponse().read())["value"]
        finally:
            connection.close()
        if isinstance(answer, dict) and "error" in answer:
            raise AssertionError(answer["message"])
        return answer

    def open(self, address: str, width: int, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._command("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width, 900)
        self._ask("POST", "/url", {"url": address})

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._command("Emulation.setDeviceMetricsOverride", **size)

    def _command(self, name: str, **parameters: Any) -> None:
        self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def run(self, script: str) -> Any:
        return self._ask("POST", "/execute/sync", {"script": script, "args": []})

    def errors(self) -> list[str]:
        seen = self._ask("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in seen if entry["level"] == "SEVERE"]

    def shoot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._ask("GET", "/screenshot")))

    def close(self) -> None:
        self._ask("DELETE", "")


@contextmanager
def browser() -> Iterator[Browser]:
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        subprocess.Popen(
            ["chromedriver", "--port=0"],
            env={**os.environ, "TMPDIR": folder},  # or its profiles would stay
            stdout=subprocess.PIPE,
            text=True,
        ) as driver,
    ):
        try:
            assert driver.stdout is not None
            port = 0
            while not port:
                line = driver.stdout.readline()
                assert line, "chromedriver has ended"
                with suppress(ValueError):
                    port = int(line.rpartition("on port ")[2].rstrip(".\n"))
            opened = Browser(port)
            try:
                yield opened
            finally:
                opened.close()
        finally:
            driver.kill()
