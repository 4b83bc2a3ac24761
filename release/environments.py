"""Interpreters, and new virtual environments for the checks of a release, in which nothing of the
caller's is set."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

SYSTEM = "/usr/local/bin:/usr/bin:/bin"
_KEPT = re.compile(  # what pip needs to reach its index, and how the caller compiles
    r"(?i)PIP_\w+|(https?|all|no)_proxy|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
    r"|CXX|CMAKE_CXX_COMPILER_LAUNCHER|CCACHE_\w+"
)


def kept_variables() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if _KEPT.fullmatch(name)}


def interpreter_of(version: str) -> str | None:
    """The CPython of that version on the path, or pyenv's."""
    name = f"python{version}"
    pyenv = Path.home().glob(f".pyenv/versions/{version}.*/bin/{name}")
    # pyenv has a shim on the path for each version, also for those that it will not run.
    found = [str(path) for path in (shutil.which(name), *pyenv) if path and _is_usable(path)]
    return found[0] if found else None


def _is_usable(interpreter: str | Path) -> bool:
    return subprocess.run([interpreter, "-c", ""], capture_output=True, check=False).returncode == 0


class Environment:
    """A virtual environment in `folder`."""

    def __init__(self, folder: Path, interpreter: str | Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        self._bin = folder / "bin"
        self.python = self._bin / "python"
        self.run(interpreter, "-m", "venv", folder)

    def program(self, name: str) -> Path:
        """One of the programs that are installed in it."""
        return self._bin / name

    def install(self, *requirements: str | Path) -> None:
        """Installs from wheels, with no compiler in reach."""
        pip = ["-m", "pip", "install", "-q", "--disable-pip-version-check", "--only-binary=:all:"]
        self.run(self.python, *pip, *requirements, system="")

    def run(
        self,
        *command: str | Path,
        where: Path | None = None,
        system: str = SYSTEM,
        may_fail: bool = False,
    ) -> str:
        """Runs a program that finds the environment's own and those in the path `system`.

        Returns its output. One that fails shows it, and ends the check.
        """
        done = subprocess.run(
            [*map(str, command)],
            cwd=where,
            env=self._variables(system),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode and not may_fail:
            print(done.stdout)
            sys.exit(f"exit status {done.returncode} of {' '.join(map(str, command))}")
        return done.stdout

    def show(self, *command: str | Path) -> None:
        """The same, but its output is seen while it runs."""
        done = subprocess.run(
            [*map(str, command)],
            env=self._variables(SYSTEM),
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode:
            sys.exit(done.returncode)

    def _variables(self, system: str) -> dict[str, str]:
        path = f"{self._bin}:{system}".rstrip(":")
        return {"HOME": os.environ["HOME"], "LANG": "C.UTF-8", "PATH": path, **kept_variables()}
