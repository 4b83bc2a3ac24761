"""The structure of the code: layers, exports, and no checks that `python -O` removes."""

import ast
import re
from pathlib import Path

import pytest

import memlane
from memlane._base import diagnosis

ROOT = Path(__file__).parents[2]
PYTHON = sorted((ROOT / "src").rglob("*.py"))
NATIVE = sorted(p for p in (ROOT / "native").rglob("*.[ch]pp"))

# A file may include its own layer and those below it; systems never include each other.
MAY_INCLUDE = {
    "os": {"os"},
    "core": {"core", "os"},
    "broadcast": {"broadcast", "core", "os"},
    "store": {"store", "core", "os"},
    "offload": {"offload", "core", "os"},
    "tiers": {"tiers", "core", "os"},
    "bindings/python": {"bindings/python", "core", "os"},
    "bindings/messages": {"bindings/messages", "bindings/python", "broadcast", "core", "os"},
    "bindings/ends": {"bindings/ends", "bindings/python", "core", "os"},
    "bindings/broadcast": {
        *("bindings/broadcast", "bindings/messages", "bindings/ends", "bindings/python"),
        *("broadcast", "core", "os"),
    },
    "bindings/store": {
        *("bindings/store", "bindings/ends", "bindings/python"),
        *("store", "core", "os"),
    },
    "bindings/offload": {"bindings/offload", "bindings/python", "offload", "core", "os"},
    "bindings/tiers": {"bindings/tiers", "bindings/python", "tiers", "core", "os"},
}


@pytest.mark.parametrize("layer", MAY_INCLUDE)
def test_includes_go_down_only(layer: str) -> None:
    """A layer of the native code knows nothing of the layers above it."""
    for file in (ROOT / "native" / layer).iterdir():
        paths = re.findall(r'#include "(.*)"', file.read_text())
        included = {path.rpartition("/")[0] for path in paths}
        assert included <= MAY_INCLUDE[layer], f"{file} includes {included - MAY_INCLUDE[layer]}"


def test_every_file_is_in_a_layer() -> None:
    """No native code outside of the layers but the tests."""
    layers = {ROOT / "native" / layer for layer in MAY_INCLUDE}
    for file in NATIVE:
        assert file.parent in layers or ROOT / "native/tests" in file.parents


def test_only_the_bottom_layer_makes_system_calls() -> None:
    """Files, mappings, futexes and locks are used in native/os only."""
    call = re.compile(
        r"(?<!os)::(open|mmap|munmap|fcntl|f?truncate|fallocate|linkat|syscall|madvise|lseek|pread"
        r"|pwrite|opendir|readdir|[fl]?stat|f?statv?fs|unlink|f?chmod|fopen|getrlimit|eventfd"
        r"|timerfd_\w+|epoll_\w+)\("
    )
    for file in NATIVE:
        if file.parent.name not in ("os", "tests"):
            assert not call.search(file.read_text()), f"{file} makes a system call of its own"


def test_native_code_names_nothing_of_python() -> None:
    """It neither imports modules nor names error classes: Python installs what native code uses."""
    errors = {name for name in vars(memlane.errors) if name in memlane.__all__}
    for file in NATIVE:
        code = re.sub(r"//.*", "", file.read_text())
        assert not re.search(r"\bimport_\(|\bPyImport_", code), f"{file} imports by name"
        named = set(re.findall(r'"(\w+)"', code)) & errors
        assert not named, f"{file} names {named} as text"


def test_failures_have_their_texts() -> None:
    """Python knows every failure of an end that native code names."""
    known = {*diagnosis._TEXTS, *re.findall(r'case "(\w+)"', Path(diagnosis.__file__).read_text())}
    calls = re.compile(r'(?:raise|set)_failure\((?:\w|::|\(\)|\.)+, "(\w+)"')
    named = {name for file in NATIVE for name in calls.findall(file.read_text())}
    assert "timed_out" in named
    assert named <= known


@pytest.mark.parametrize("file", PYTHON, ids=lambda p: p.name)
def test_the_library_has_no_assert(file: Path) -> None:
    """`python -O` removes asserts; checks must stay."""
    tree = ast.parse(file.read_text())
    assert not [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]


def test_package_is_a_table_of_names() -> None:
    """memlane/__init__.py imports and lists names; every error class is among them."""
    assert sorted(memlane.__all__) == memlane.__all__
    for name in memlane.__all__:
        assert hasattr(memlane, name)
    defined = {name for name, value in vars(memlane.errors).items() if isinstance(value, type)}
    assert {n for n in defined if issubclass(getattr(memlane.errors, n), Exception)} <= set(
        memlane.__all__
    )


def test_groups_of_workers_use_the_public_api() -> None:
    """And `_base` and the locks, as every system; and stacks, for errors, as `memlane stuck`."""
    allowed = (
        *("memlane._base.", "memlane._locks", "memlane._importing", "memlane.workers."),
        "memlane.inspect.stacks",
    )
    for file in (ROOT / "src" / "memlane" / "workers").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module is not None and module.startswith("memlane."):
                is_open = module == "memlane.errors" or module.startswith(allowed)
                assert is_open, f"{file}, line {node.lineno}: {module}"
                continue
            if module == "memlane":
                names = {name.name for name in node.names}  # type: ignore[union-attr]
                assert names <= {*memlane.__all__}, file


# What engines import beside the public API; ARCHITECTURE.md says why.
DOORS = {
    *("memlane._base", "memlane._importing", "memlane.errors"),
    *("memlane.tiers.tier", "memlane.tiers.pool", "memlane.tiers.inventory"),
    *("memlane.offload._start", "memlane.offload._holding", "memlane.offload._pages"),
}
PUBLIC = {f"memlane.{name}" for name in ("tiers", "inspect", "metrics", "testing", "engines")}


def test_engines_use_the_public_api_and_few_doors() -> None:
    """A name of another module's inside is not an engine's business."""
    for file in (ROOT / "src" / "memlane" / "engines").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            if module is None or not module.startswith("memlane."):
                continue
            is_open = module in PUBLIC or module.startswith("memlane.engines.")
            is_door = any(module == door or module.startswith(f"{door}.") for door in DOORS)
            assert is_open or is_door, f"{file}, line {node.lineno}: {module}"
        assert "import _native" not in file.read_text(), file
