"""Real Redis servers for tests: Debian's redis-server, on a socket and a port of its own."""

import shutil
import socket
import subprocess
from pathlib import Path

from tests.support.missing import needs
from tests.support.servers import Server, free_port

REFUSAL = "" if shutil.which("redis-server") else needs("redis-server")


class RedisServer(Server):
    """One that runs in a folder; it can be stopped, killed and started again."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        tls: bool = False,
        cluster: bool = False,
        config: str = "",
    ) -> None:
        self.folder, self._options = folder, options
        self._has_tls, self._is_cluster = tls, cluster
        self.tls_port = 0
        self._config = [config] if config else []
        folder.mkdir(exist_ok=True)
        self.path = folder / "redis.sock"
        if tls:
            make_certificates(folder)
            self._options += (
                *("--tls-auth-clients", "no", "--tls-cert-file", str(folder / "server.crt")),
                *("--tls-key-file", str(folder / "server.key")),
                *("--tls-ca-cert-file", str(folder / "ca.crt")),
            )
        super().__init__()

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def launch(self) -> "subprocess.Popen[bytes]":
        """Each time with ports of its own: another process may have taken one that was free."""
        ports = []
        if self._has_tls:
            self.tls_port = free_port()
            ports += ["--tls-port", str(self.tls_port)]
        if self._is_cluster:
            ports += ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
        command = [
            *("redis-server", *self._config, "--port", str(self.port), "--bind", "127.0.0.1"),
            *("--unixsocket", str(self.path), "--save", "", "--appendonly", "no"),
            *("--dir", str(self.folder), "--daemonize", "no", *ports, *self._options),
        ]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def connect(self) -> socket.socket:
        own = socket.socket(socket.AF_UNIX)
        try:
            own.connect(str(self.path))
        except OSError:
            own.close()
            raise
        return own

    def call(self, *words: str | bytes) -> bytes:
        """Whatever it answers, as far as one read."""
        parts = [word.encode() if isinstance(word, str) else word for word in words]
        with self.connect() as own:
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


def make_certificates(folder: Path) -> None:
    """An authority, and a server's certificate of it for 127.0.0.1 and localhost, with all that
    CPython 3.13 and later demand."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    names = "subjectAltName=DNS:localhost,IP:127.0.0.1"
    openssl(
        *("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=tests"),
        *("-keyout", "ca.key", "-out", "ca.crt", "-addext", "keyUsage=critical,keyCertSign"),
    )
    openssl(
        *("req", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"),
        *("-keyout", "server.key", "-out", "server.csr"),
    )
    (folder / "names").write_text(f"{names}\nauthorityKeyIdentifier=keyid\n")
    openssl(
        *("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key"),
        *("-CAcreateserial", "-days", "2", "-extfile", "names", "-out", "server.crt"),
    )
