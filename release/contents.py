"""Decides which files belong into the distributions."""

import re
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).parents[1]
_PACKAGE = ROOT / "src/memlane"
_TABLE = (_PACKAGE / "__init__.py").read_text()
(VERSION,) = re.findall(r'^__version__ = "(.*)"', _TABLE, re.MULTILINE)
_FOR_BUILDS = [
    "CMakeLists.txt",
    "LICENSE",
    "README.md",
    "native",
    "pyproject.toml",
    "release",
    "src",
]
_BUILT = re.compile(r"(?:\.venv|build|dist)/|.*(?:__pycache__|\.so$)")


def faults_of_wheel(wheel: Path) -> list[str]:
    """Returns what is wrong with its files and its metadata."""
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if not name.endswith("/")}
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        described = message_from_string(file.read(metadata).decode())
    information = metadata.removesuffix("METADATA")
    found = {name for name in names if not name.startswith(information)}
    sources = {f"memlane/{path.relative_to(_PACKAGE)}" for path in _sources()}
    extensions = {name for name in found if re.fullmatch(r"memlane/_native\.[\w.-]+\.so", name)}
    faults = [f"{name} does not belong into it" for name in sorted(found - sources - extensions)]
    faults += [f"{name} is missing" for name in sorted(sources - found)]
    if len(extensions) != 1:
        faults.append(f"there must be one extension, not {sorted(extensions)}")
    if f"{information}licenses/LICENSE" not in names:
        faults.append("the license is missing")
    return faults + _faults_of_metadata(described)


def faults_of_sdist(sdist: Path) -> list[str]:
    """Returns what is wrong with its files. That it suffices is shown by building from it."""
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    faults = [f"{name} was built, and is in it" for name in sorted(names) if _BUILT.match(name)]
    first = {name.partition("/")[0] for name in names}
    return faults + [f"{name} is missing" for name in _FOR_BUILDS if name not in first]


def _sources() -> list[Path]:
    found = (path for path in _PACKAGE.rglob("*") if path.is_file())
    return [path for path in found if not _BUILT.match(str(path.relative_to(_PACKAGE)))]


def _faults_of_metadata(described: Message) -> list[str]:
    faults = []
    expected = {
        "Name": "memlane",
        "Version": VERSION,
        "License-Expression": "Apache-2.0",
        "Description-Content-Type": "text/markdown",
    }
    for field, text in expected.items():
        if described[field] != text:
            faults.append(f"{field} is {described[field]}, not {text}")
    urls = dict(url.split(", ", 1) for url in described.get_all("Project-URL", []))
    if set(urls) != {"Source", "Documentation", "Issues", "Changelog"}:
        faults.append(f"it has the addresses {sorted(urls)}")
    return faults
