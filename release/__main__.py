"""Builds the distributions of a release into dist/, and installs them as strangers do.

    python -m release sdist        the source distribution
    python -m release wheel        and a wheel for this interpreter
    python -m release wheels       and one for every interpreter on this machine that wheels are for
    python -m release containers   all wheels for this architecture, by cibuildwheel; needs Docker

`wheel` and `wheels` build from the source distribution, outside the tree. Their wheels get the
lowest manylinux tag that this machine's libraries allow. Each is installed into a new environment
without a compiler, and tested there as cibuildwheel tests it.
"""

import argparse
import os
import re
import shlex
import shutil
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

from release.contents import ROOT, VERSION, faults_of_sdist, faults_of_wheel
from release.environments import Environment, interpreter_of

DIST = ROOT / "dist"
WORK = ROOT / "build/release"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
CIBUILDWHEEL: dict[str, Any] = PROJECT["tool"]["cibuildwheel"]

_PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
_TYPED = ROOT / "tests/typing/queues.py"
_MISTYPED = """
import memlane

def send(queue: memlane.MessageQueue) -> int:
    return queue.export_handle()
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="release", description="Builds and checks a release.")
    parser.add_argument("what", choices=["sdist", "wheel", "wheels", "containers"])
    what = parser.parse_args().what
    check_tag(os.environ.get("RELEASE_TAG", ""))
    shutil.rmtree(DIST, ignore_errors=True)
    tools = Environment(WORK / "tools", sys.executable)
    tools.install(*PROJECT["project"]["optional-dependencies"]["release"])
    if what == "containers":
        build_in_containers(tools)
    else:
        sdist = build_sdist(tools)
    if what == "wheel":
        check_types(tools, build_and_test(tools, sys.executable, sdist))
    elif what == "wheels":
        for interpreter in interpreters():
            build_and_test(tools, interpreter, sdist)
    tools.run(tools.program("twine"), "check", "--strict", *DIST.iterdir())
    print(*sorted(str(path.relative_to(ROOT)) for path in DIST.iterdir()), sep="\n")


def check_tag(tag: str) -> None:
    """Links of the project's page lead to the tag of the version: it must be the one released."""
    if tag not in ("", f"v{VERSION}"):
        sys.exit(f"the tag to release is {tag}, but the version is {VERSION}")


def interpreters() -> list[str]:
    """Those on the path, and pyenv's, of the versions that wheels are built for."""
    found = []
    for version in re.findall(r"cp3(\d+)-", " ".join(CIBUILDWHEEL["build"])):
        interpreter = interpreter_of(f"3.{version}")
        print(f"CPython 3.{version}: {interpreter or 'not here'}", flush=True)
        found += [interpreter] if interpreter else []
    return found


def build_sdist(tools: Environment) -> Path:
    tools.run(tools.python, "-m", "build", "--sdist", "--outdir", DIST, ROOT)
    (sdist,) = DIST.iterdir()
    refuse(sdist, faults_of_sdist(sdist))
    return sdist


def build_and_test(tools: Environment, interpreter: str, sdist: Path) -> Environment:
    wheel = build_wheel(tools, interpreter, sdist)
    stranger = install(interpreter, wheel)
    test(stranger)
    return stranger


def build_wheel(tools: Environment, interpreter: str, sdist: Path) -> Path:
    """From the source distribution, by the interpreter's own pip."""
    started = time.monotonic()
    raw = WORK / "raw"
    shutil.rmtree(raw, ignore_errors=True)
    builder = Environment(WORK / "builder", interpreter)
    pip = ["-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps"]
    builder.run(builder.python, *pip, "--wheel-dir", raw, sdist)
    (built,) = raw.iterdir()
    before = {*DIST.iterdir()}
    auditwheel = tools.program("auditwheel")
    tools.run(auditwheel, "repair", "--plat", "auto", "--wheel-dir", DIST, built)
    (wheel,) = {*DIST.iterdir()} - before
    refuse(wheel, faults_of_wheel(wheel))
    print(f"{wheel.name}: built in {time.monotonic() - started:.0f} s", flush=True)
    return wheel


def build_in_containers(tools: Environment) -> None:
    cibuildwheel = tools.program("cibuildwheel")
    tools.show(cibuildwheel, "--platform", "linux", "--output-dir", DIST, ROOT)
    for wheel in DIST.iterdir():
        refuse(wheel, faults_of_wheel(wheel))


def install(interpreter: str, wheel: Path) -> Environment:
    """Installs the wheel into a new environment, where the README's first program must run."""
    started = time.monotonic()
    stranger = Environment(WORK / "stranger", interpreter)
    stranger.install(wheel)
    program = WORK / "first.py"
    program.write_text(_PROGRAMS[0])
    if not stranger.run(stranger.python, program, where=WORK, system=""):
        sys.exit("the README's first program prints nothing")
    seconds = time.monotonic() - started
    print(f"{wheel.name}: installed, and a first message sent, in {seconds:.1f} s", flush=True)
    return stranger


def test(stranger: Environment) -> None:
    """The tests that cibuildwheel runs on every wheel."""
    stranger.install(*CIBUILDWHEEL["test-requires"])
    command = shlex.split(CIBUILDWHEEL["test-command"].format(project=shlex.quote(str(ROOT))))
    said = stranger.run(ROOT / "tests/own_shm.sh", *command, where=ROOT)
    print(said.splitlines()[-1], flush=True)


def check_types(tools: Environment, stranger: Environment) -> None:
    """mypy and pyright know the types of the installed package: they refuse what is wrong alone."""
    folder = WORK / "types"
    folder.mkdir(exist_ok=True)
    (folder / "typed.py").write_text(_TYPED.read_text())
    (folder / "mistyped.py").write_text(_MISTYPED)
    mypy = (tools.program("mypy"), "--strict", "--python-executable", stranger.python)
    pyright = (tools.program("pyright"), "--pythonpath", stranger.python)
    for checker in (mypy, pyright):
        tools.run(*checker, "typed.py", where=folder)
        said = tools.run(*checker, "mistyped.py", where=folder, may_fail=True)
        if "Handle" not in said or "1 error" not in said:
            sys.exit(f"{checker[0].name} does not see memlane's types:\n{said}")
        print(f"{checker[0].name}: sees the types of the wheel", flush=True)


def refuse(distribution: Path, faults: list[str]) -> None:
    if faults:
        sys.exit("\n".join(f"{distribution.name}: {fault}" for fault in faults))


if __name__ == "__main__":
    main()
