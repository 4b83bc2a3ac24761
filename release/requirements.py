"""Prints what memlane and its extras need, so that pip installs it while memlane is compiled.

python release/requirements.py EXTRA...
"""

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

PROJECT = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())["project"]


def requirements(extra: str) -> Iterator[str]:
    """Those of an extra, with those of the extras that it names."""
    for line in PROJECT["optional-dependencies"][extra]:
        if named := re.fullmatch(r"memlane\[(\w+)\](.*)", line):
            yield from (each + named[2] for each in requirements(named[1]))
        else:
            yield line


if __name__ == "__main__":
    print(
        *PROJECT["dependencies"],
        *(line for name in sys.argv[1:] for line in requirements(name)),
        sep="\n",
    )
