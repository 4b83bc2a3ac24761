"""Runs all tests on CPython 3.12, 3.13 and 3.14, or on those that are named: `make pythons`.

    python -m release.pythons [VERSION ...]

Each version runs `make test` in a new copy of the tree: without torch, and again with it if there
is a CPU wheel of the version that the Makefile names. The copies and their logs are in
MEMLANE_PYTHONS, by default /var/tmp/memlane-pythons: never in the tree.

The interpreters are those on the path, and pyenv's. A version that is not there is installed from
Debian sid into a folder, which becomes the root folder of the tests; that tests a newer compiler
and C library, too. It needs root, and the Debian package debootstrap.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from release.contents import ROOT
from release.environments import interpreter_of, kept_variables

VERSIONS = ("3.12", "3.13", "3.14")
WORK = Path(os.environ.get("MEMLANE_PYTHONS", "/var/tmp/memlane-pythons"))
PACKAGES = "python{0},python{0}-venv,python{0}-dev,g++,make,git,ca-certificates,iproute2"
CERTIFICATES = "etc/ssl/certs/ca-certificates.crt"

# Nothing has to be unmounted: the mounts end with the last process in there. Not chroot, in which
# the tests could make neither namespaces of users nor hosts.
ENTER = """
root=$1 tree=$2; shift 2
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
cd "$root"
pivot_root . mnt
umount -l /mnt
cd "$tree"
exec "$@"
"""


def main() -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    results = [line for version in sys.argv[1:] or VERSIONS for line in results_of(version)]
    print(*results, sep="\n")
    if any(line.endswith("FAILED") for line in results):
        sys.exit(1)


def results_of(version: str) -> list[str]:
    interpreter = interpreter_of(version)
    root = Path("/") if interpreter else sid_with(version)
    tree = copy_of_tree(root, version)
    place: list[str] = []
    if not interpreter:
        place = ["unshare", "--mount", "sh", "-ec", ENTER, "sh", str(root), "/tree"]
    make = ["make", f"PYTHON={interpreter or f'python{version}'}"]
    lines = [run(f"CPython {version} without torch", tree, place, [*make, "TORCH=", "test"])]
    torch = f"{pinned_torch()}+cpu"
    search = ["-m", "pip", "install", "--dry-run", "--no-deps", "--only-binary=:all:", torch]
    if started(tree, place, [".venv/bin/python", *search], None).returncode:
        return [*lines, f"CPython {version} with torch: not run, as pip finds no {torch}"]
    (tree / ".venv/.packages-test").unlink()
    with_torch = [*make, f"TORCH={torch}", "test"]
    return [*lines, run(f"CPython {version} with torch", tree, place, with_torch)]


def run(what: str, tree: Path, place: list[str], command: list[str]) -> str:
    """Returns a line with the counts of all tests; it ends with FAILED if any failed."""
    log, began = WORK / f"{what}.log", time.monotonic()
    print(f"{what}: see {log}", flush=True)
    done = started(tree, place, command, log)
    sums = re.findall(r"^\d+ passed, .*", log.read_text(errors="replace"), re.MULTILINE)
    shown = sums[-1] if sums else "ended early"
    minutes = (time.monotonic() - began) / 60
    return f"{what}: {shown} in {minutes:.0f} min{'; FAILED' if done.returncode else ''}"


def started(
    tree: Path, place: list[str], command: list[str], log: Path | None
) -> subprocess.CompletedProcess[bytes]:
    """The command, which has ended; its output is in the log."""
    with open(log or os.devnull, "w") as output:
        return subprocess.run(
            [*place, *command],
            cwd=tree,
            env=variables(place),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )


def variables(place: list[str]) -> dict[str, str]:
    kept = kept_variables()
    if place:  # where the caller's compiler and its cache are not installed
        kept = {name: text for name, text in kept.items() if not re.match("CXX|CMAKE|CCACHE", name)}
    path = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
    return {"HOME": str(Path.home()), "LANG": "C.UTF-8", "PATH": path, **kept}


def pinned_torch() -> str:
    (torch,) = re.findall(r"^TORCH \?= (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return str(torch)


def copy_of_tree(root: Path, version: str) -> Path:
    """The files that git knows, as they are now."""
    tree = WORK / version if root == Path("/") else root / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name, follow_symlinks=False)
    return tree


def sid_with(version: str) -> Path:
    """A root folder with Debian sid and that CPython; one that is there already is used again."""
    root = WORK / f"sid-{version}"
    if not (root / f"usr/bin/python{version}").exists():
        if os.geteuid() != 0 or not shutil.which("debootstrap"):
            sys.exit(f"no CPython {version} here; getting Debian's needs root and debootstrap")
        print(f"CPython {version}: installing Debian sid into {root}", flush=True)
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        include = f"--include={PACKAGES.format(version)}"
        subprocess.run(
            ["debootstrap", "--variant=minbase", include, "sid", root, mirror()], check=True
        )
    for name in (CERTIFICATES, "etc/resolv.conf", "etc/hosts", "etc/pip.conf"):
        if (Path("/") / name).exists():
            shutil.copy(Path("/") / name, root / name)
    return root


def mirror() -> str:
    """Returns where this machine's own packages come from."""
    for path in [Path("/etc/apt/sources.list"), *Path("/etc/apt").glob("sources.list.d/*")]:
        text = path.read_text() if path.is_file() else ""
        if found := re.search(
            r"^(?:deb|URIs:) .*?(https?://\S+/debian)/?(?:\s|$)", text, re.MULTILINE
        ):
            return found[1]
    return "http://deb.debian.org/debian"


if __name__ == "__main__":
    main()
