"""Real object stores for tests: moto, which plays S3, on a port of its own."""

import importlib.util
import os
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.leaks import LASTING
from tests.support.missing import needs
from tests.support.servers import Server
from tests.support.waiting import PATIENCE

_NEEDED = ("obstore", "moto", "flask")
_MISSING = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
REFUSAL = needs(_MISSING[0]) if _MISSING else ""


class ObjectServer(Server):
    """One that has its buckets in memory; it can be stopped, killed and started again, empty."""

    def __init__(self, **environment: str) -> None:
        self._environment = os.environ | environment
        super().__init__()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def options(self) -> dict[str, Any]:
        """The options of a tier on it."""
        return {
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "access_key_id": "user",
            "secret_access_key": "secret",
            "client_options": {"allow_http": True},
        }

    def launch(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment,
        )

    def create(self, bucket: str) -> str:
        """Makes a bucket, unless there is one. Returns its URL."""
        self._request("PUT", f"/{bucket}")
        return f"s3://{bucket}"

    def remove(self, bucket: str) -> None:
        self._request("DELETE", f"/{bucket}")

    def allow(self, calls: int) -> None:
        """From then on credentials are checked."""
        self._request("POST", "/moto-api/reset-auth", str(calls).encode())

    def _request(self, method: str, path: str, data: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.endpoint + path, data=data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                found: bytes = answer.read()
                return found
        except urllib.error.HTTPError as error:
            if error.code == 409:  # it is there already
                return b""
            raise


class Bucket:
    """The contents of one, seen without a tier. `url` and `options` are a tier's."""

    def __init__(self, url: str, **options: Any) -> None:
        import obstore

        self._obstore = obstore
        self._store = obstore.store.from_url(url, **options)

    def names(self) -> list[str]:
        return sorted(each["path"] for each in self._obstore.list(self._store).collect())

    def read(self, name: str) -> bytes:
        return bytes(self._obstore.get(self._store, name).bytes())

    def write(self, name: str, value: bytes) -> None:
        self._obstore.put(self._store, name, value)

    def remove(self, *names: str) -> None:
        self._obstore.delete(self._store, [*names])


@contextmanager
def lasting_server() -> Iterator[ObjectServer]:
    """One for several tests. The threads and descriptors that obstore keeps are there, too."""
    Bucket("memory:///").names()
    with ObjectServer() as server:
        LASTING.add(server.pid)
        try:
            yield server
        finally:
            LASTING.discard(server.pid)
