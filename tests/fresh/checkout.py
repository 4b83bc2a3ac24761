"""A fresh checkout: nothing is built, and the environment is empty."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_BUILT = {".venv", "build", "dist", "uv.lock"}
_FOR_PIP = re.compile(
    r"(?i)PIP_\w+|(https?|all|no)_proxy|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE|CURL_CA_BUNDLE"
)


def environment(**more: str) -> dict[str, str]:
    """A clean shell's: no PYTHON* and no MEMLANE*."""
    kept = {name: text for name, text in os.environ.items() if _FOR_PIP.fullmatch(name)}
    plain = {"HOME": os.environ["HOME"], "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
    return {**plain, **kept, **more}


class Checkout:
    """The files of the tree in another folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def new(cls, folder: Path) -> "Checkout":
        """Copies the tree without what was built in it."""

        def skipped(where: str, names: list[str]) -> set[str]:
            built = _BUILT if Path(where) == ROOT else set()
            return {name for name in names if name in built or re.match(r"\.\w+_cache|__pyc", name)}

        shutil.copytree(ROOT, folder, ignore=skipped, symlinks=True)
        return cls(folder)

    @property
    def python(self) -> Path:
        return self.folder / ".venv/bin/python"

    def run(self, *command: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        """Runs a command there; its two streams are one text."""
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment(**more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def make(self, *targets: str, python: str | Path = sys.executable) -> str:
        """Runs make, which must succeed; returns its output."""
        made = self.run("make", f"PYTHON={python}", *targets)
        assert made.returncode == 0, made.stdout
        return made.stdout

    def make_demo(self) -> None:
        """Runs the demo on this checkout's own code."""
        assert self.make("demo").count("nothing left of 7 segments") == 2
        code = "import memlane, memlane._native; print(memlane.__file__, memlane._native.__file__)"
        found = self.run(self.python, "-c", code).stdout
        package, native = re.findall(r"(/.*?\.(?:py|so))", found)
        assert Path(package) == self.folder / "src/memlane/__init__.py"
        assert Path(native).is_relative_to(self.folder)
