"""The promises of a release: wheels, the page on PyPI, one address. `make wheel` builds it."""

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import readme_renderer.markdown
from release import contents, project_page

import memlane
from tests.support.documents import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SOURCE = PROJECT["project"]["urls"]["Source"]
README = (ROOT / "README.md").read_text()
BUILT = {".git", ".venv", "build", "dist"}

WHEELS = {
    f"cp{version}-{libc}_{machine}"
    for version in ("311", "312", "313", "314")
    for libc in ("manylinux", "musllinux")
    for machine in ("x86_64", "aarch64")
}


def test_a_release_has_exactly_these_wheels() -> None:
    """cibuildwheel builds for these and no others, so for no free-threaded interpreter."""
    cibuildwheel = Path(sys.executable).parent / "cibuildwheel"
    run = subprocess.run(
        [
            *(cibuildwheel, "--print-build-identifiers"),
            *("--platform", "linux", "--archs", "x86_64 aarch64"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert {*run.stdout.split()} == WHEELS


def test_versions_that_are_named() -> None:
    """The page on PyPI names those that wheels are built for."""
    wheels = {name.partition("-")[0].removeprefix("cp3") for name in WHEELS}
    prefix = "Programming Language :: Python :: 3."
    named = {text.removeprefix(prefix) for text in PROJECT["project"]["classifiers"]}
    assert named & {str(version) for version in range(100)} == wheels


def test_the_images_of_a_release_are_no_newer_than_promised() -> None:
    """Wheels need glibc 2.28 or musl 1.2, and no later one."""
    images = {
        name: image
        for name, image in PROJECT["tool"]["cibuildwheel"].items()
        if name.endswith("-image")
    }
    assert images == {
        "manylinux-x86_64-image": "manylinux_2_28",
        "manylinux-aarch64-image": "manylinux_2_28",
        "musllinux-x86_64-image": "musllinux_1_2",
        "musllinux-aarch64-image": "musllinux_1_2",
    }


def test_tests_of_every_wheel_exist() -> None:
    """cibuildwheel and `make wheel` look where the marked tests are."""
    command = PROJECT["tool"]["cibuildwheel"]["test-command"]
    paths = [ROOT / path for path in re.findall(r"{project}/([\w/.]+)", command)]
    assert all(path.exists() for path in paths)
    marked = [file for file in ROOT.glob("tests/**/test_*.py") if "mark.wheel" in file.read_text()]
    marked.remove(Path(__file__))
    assert len(marked) > 20
    assert all(file in paths or file.parent in paths for file in marked)


def test_a_wheel_has_the_package_only(tmp_path: Path) -> None:
    """A wheel that lacks a file of the package, or has one that is not of it, is refused."""
    wheel = tmp_path / "memlane.whl"
    files = [path for path in (ROOT / "src").rglob("*") if path.is_file()]
    package = [path for path in files if path.suffix not in (".typed", ".pyc")]
    with zipfile.ZipFile(wheel, "w") as file:
        for path in package:
            file.write(path, path.relative_to(ROOT / "src"))
        file.writestr("memlane/_native.cpython-311-x86_64-linux-gnu.so", "")
        file.writestr("tests/conftest.py", "")
        file.writestr("memlane-0.dist-info/METADATA", "Name: memlane\nVersion: 0\n\n")
    faults = contents.faults_of_wheel(wheel)
    assert "tests/conftest.py does not belong into it" in faults
    assert [fault for fault in faults if fault.endswith("is missing")] == [
        "memlane/py.typed is missing",
        "the license is missing",
    ]
    assert f"Version is 0, not {memlane.__version__}" in faults


def page() -> str:
    """The README as it is sent to PyPI."""
    return project_page.absolute(README, SOURCE, f"v{memlane.__version__}")


def test_the_page_on_pypi_renders() -> None:
    """PyPI renders it, and its links lead to the repository, whose files PyPI does not have."""
    html = readme_renderer.markdown.render(page())
    assert html
    assert "</h1>" in html
    for target in re.findall(r'(?:href|src)="([^"]*)"', html):
        assert re.match("https?://|#user-content-", target), target  # or it is a heading's own


def test_page_is_what_the_build_takes() -> None:
    """The provider gives it to scikit-build-core, with the address of the project's metadata."""
    project = {**PROJECT["project"], "version": memlane.__version__}
    given = project_page.dynamic_metadata("readme", {}, project)
    assert given == {"content-type": "text/markdown", "text": page()}


def test_links_of_the_readme_exist() -> None:
    """Every link into the repository leads to a file there."""
    for target in project_page.targets(README):
        if not re.match(r"https?:|#", target):
            assert (ROOT / target.partition("#")[0]).exists(), target


def test_links_of_a_page_are_found() -> None:
    """Links, pictures and references; code is left alone."""
    text = (
        "[a](docs/a.md#b 'title') ![p](b.svg) [`c`](#d) [![e](f.png)](g.md) [h](https://i/j.md)\n"
        '<img src="k.svg"> <a href="l/">l</a> `[m](n)`\n'
        "```\n[o](p)\n```\n"
        "[q]: r.md\n"
    )
    assert project_page.absolute(text, "S", "v1") == (
        "[a](S/blob/v1/docs/a.md#b 'title') ![p](S/raw/v1/b.svg) [`c`](S/blob/v1/README.md#d) "
        "[![e](S/raw/v1/f.png)](S/blob/v1/g.md) [h](https://i/j.md)\n"
        '<img src="S/raw/v1/k.svg"> <a href="S/blob/v1/l/">l</a> `[m](n)`\n'
        "```\n[o](p)\n```\n"
        "[q]: S/blob/v1/r.md\n"
    )


def test_address_stands_in_one_place() -> None:
    """The repository's address is in the project's metadata, and nowhere else."""
    found = set()
    for path in ROOT.rglob("*"):
        place = path.relative_to(ROOT)
        if place.parts[0] in BUILT or not path.is_file():
            continue
        if SOURCE.encode() in path.read_bytes():
            found.add(str(place))
    assert found == {"pyproject.toml"}


def test_versions_agree() -> None:
    """The version stands in the package, for whoever cites it, and in the changelog."""
    version = memlane.__version__
    assert version == contents.VERSION
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.M)


def test_release_has_its_checklist() -> None:
    """It names every check that a release needs, and says that the address is a placeholder."""
    text = (ROOT / "RELEASING.md").read_text()
    (named,) = re.findall(r"`make (test pythons [\w -]+)`", text)
    needed = [
        "test",
        "pythons",
        "fresh",
        "sanitize",
        "verify",
        "weak-memory",
        "arm",
        "musl",
        "wheels",
        "wheel",
        "docs",
    ]
    assert {*needed} <= {*named.split()}
    assert "placeholder" in text
