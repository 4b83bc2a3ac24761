"""Real Redis servers for tests: Debian's redis-server, on a socket and a port of its own."""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REFUSAL = "" if shutil.which("redis-server") else "redis-server is not installed"


class RedisServer:
    """One that runs in a folder; it can be stopped, killed and started again."""

    def __init__(self, folder: Path, *options: str, tls: bool = False) -> None:
        self.folder, self._options = folder, options
        folder.mkdir(exist_ok=True)
        self.port = free_port()
        self.path = folder / "redis.sock"
        self.tls_port = free_port() if tls else 0
        if tls:
            make_certificates(folder)
            self._options += (
                *("--tls-port", str(self.tls_port), "--tls-auth-clients", "no"),
                *("--tls-cert-file", str(folder / "server.crt")),
                *("--tls-key-file", str(folder / "server.key")),
                *("--tls-ca-cert-file", str(folder / "ca.crt")),
            )
        self.start()

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        command = [
            *("redis-server", "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--unixsocket", str(self.path), "--save", "", "--appendonly", "no"),
            *("--dir", str(self.folder), "--daemonize", "no", *self._options),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.call_when_up()

    def call_when_up(self) -> None:
        for _ in range(500):
            with socket.socket(socket.AF_UNIX) as probe:
                try:
                    probe.connect(str(self.path))
                    return
                except OSError:
                    time.sleep(0.01)
        raise TimeoutError("redis-server does not start")

    def call(self, *words: str | bytes) -> bytes:
        """Whatever it answers, as far as one read."""
        parts = [word.encode() if isinstance(word, str) else word for word in words]
        with socket.socket(socket.AF_UNIX) as own:
            own.connect(str(self.path))
            own.sendall(
                b"*%d\r\n" % len(parts)
                + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)
            )
            return own.recv(1 << 20)

    def received_bytes(self) -> int:
        """From all clients, since it was started."""
        answer = self.call("INFO", "stats").decode()
        return int(answer.partition("total_net_input_bytes:")[2].split()[0])

    def names(self) -> list[bytes]:
        """The names of all blocks; none of them has a line's end in its text."""
        answer = self.call("KEYS", "*")
        lines = answer.split(b"\r\n")
        return [line for line in lines[2::2] if line]

    def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def redis_server(folder: Path, *options: str, tls: bool = False) -> Iterator[RedisServer]:
    """One until the end of the block."""
    server = RedisServer(folder, *options, tls=tls)
    try:
        yield server
    finally:
        server.kill()


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        port: int = own.getsockname()[1]
        return port


def make_certificates(folder: Path) -> None:
    """An authority, and a server's certificate of it for 127.0.0.1 and localhost."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=tests"),
        *("-keyout", "ca.key", "-out", "ca.crt"),
    )
    openssl(
        *("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"),
        *("-keyout", "server.key", "-out", "server.csr"),
    )
    (folder / "names").write_text(names)
    openssl(
        *("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-days", "2", "-extfile", "names", "-out", "server.crt"),
    )
