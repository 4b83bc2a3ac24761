"""Importing memlane: the names that it provides, and where it fails."""

import ast
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import memlane
from tests.support import python_needs_no_folder

pytestmark = pytest.mark.wheel

PUBLIC = ["Handle", "MessageQueue", "ShmRingBuffer", "MemlaneError"]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_can_be_imported(name: str) -> None:
    """The documented names can be imported from the package, and are in __all__."""
    assert hasattr(memlane, name)
    assert name in memlane.__all__
    assert name in dir(memlane)


def test_all_that_is_announced_exists() -> None:
    """Every name of __all__ exists."""
    assert all(hasattr(memlane, name) for name in memlane.__all__)
    assert len(set(memlane.__all__)) == len(memlane.__all__)


def test_public_names_for_type_checkers() -> None:
    """A checker sees the imports of the package's table; those are the names of __all__."""
    tree = ast.parse(Path(memlane.__file__).read_text())
    (seen,) = [node for node in tree.body if isinstance(node, ast.If) and is_for_checkers(node)]
    names = [
        alias.name for line in seen.body if isinstance(line, ast.ImportFrom) for alias in line.names
    ]
    assert {*names} - {"Any"} == {*memlane.__all__} - {"__version__"}
    assert {"broadcast", "errors", "groups", "offload", "store", *names} - {"Any"} <= {
        *dir(memlane)
    }


def is_for_checkers(node: ast.If) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def test_an_unknown_name_is_an_attribute_error() -> None:
    """It is an AttributeError that names the module and the attribute."""
    with pytest.raises(AttributeError, match="module 'memlane' has no attribute 'MesageQueue'"):
        memlane.MesageQueue  # noqa: B018


LOADED = """
import sys
before = set(sys.modules)
{code}
print(*sorted(set(sys.modules) - before))
"""
HEAVY = {"asyncio", "logging", "msgspec", "ssl", "torch", "zmq"}


def test_import_loads_nothing() -> None:
    """`import memlane` loads the table of names, and the lock around what comes later."""
    loaded = set(said_by(LOADED.format(code="import memlane")).split())
    assert {name for name in loaded if name.startswith("memlane")} == {
        "memlane",
        "memlane._importing",
        "memlane._locks",
    }
    assert not {name.partition(".")[0] for name in loaded} & {*HEAVY, "numpy", "typing"}


@pytest.mark.parametrize(
    ("name", "systems"),
    [
        ("InvalidArgument", {"errors"}),
        ("MessageQueue", {"_base", "_native", "broadcast", "errors"}),
        ("ShmRingBuffer", {"_base", "_native", "broadcast", "errors"}),
        ("SingleWriterShmObjectStorage", {"_base", "_native", "store", "errors"}),
    ],
)
def test_a_name_loads_its_own_system(name: str, systems: set[str]) -> None:
    """Neither another system nor what only other hosts and groups need."""
    loaded = said_by(LOADED.format(code=f"import memlane; memlane.{name}")).split()
    assert {part.split(".")[1] for part in loaded if part.startswith("memlane.")} == {
        "_importing",
        "_locks",
        *systems,
    }
    assert not {part.partition(".")[0] for part in loaded} & HEAVY
    assert not [part for part in loaded if ".network" in part or ".protocol" in part]


def test_queue_on_one_host_loads_no_network() -> None:
    """A queue without remote readers needs neither ZeroMQ nor asyncio, from first to last."""
    code = "from memlane.testing import local_queue\nwith local_queue() as (writer, (reader,)):\n"
    code += " writer.enqueue([1])\n reader.dequeue()"
    loaded = {name.partition(".")[0] for name in said_by(LOADED.format(code=code)).split()}
    assert "memlane" in loaded
    assert not loaded & {"asyncio", "zmq", "torch", "ssl"}


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_are_refused_in_one_sentence(platform: str) -> None:
    """On other systems than Linux the import fails with one sentence that says so."""
    code = f"import sys; sys.platform = {platform!r}\ntry:\n import memlane\n"
    code += "except ImportError as error:\n print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Linux" in done.stdout
    assert len(done.stdout.splitlines()) == 1


def said_by(code: str) -> str:
    """The standard output of a program, which must end."""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


SECOND_INTERPRETER = r"""
import memlane
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
second = interpreters.create("legacy") if hasattr(interpreters, "new_config") else (
    interpreters.create(isolated=False))
interpreters.run_string(second, "try:\n import memlane\n"
                        "except ImportError as error:\n print(error, flush=True)")
interpreters.destroy(second)
with memlane.MessageQueue(1, 1) as writer:
    with memlane.MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
        writer.enqueue("the first one goes on")
        print(reader.dequeue(timeout=90))
"""


def test_a_second_interpreter_is_refused() -> None:
    """The import is refused there, and memlane still works in the first."""
    refused, rest = said_by(SECOND_INTERPRETER).splitlines()
    assert refused == "memlane runs in the main interpreter of a process only"
    assert rest == "the first one goes on"


def test_an_interpreter_without_a_gil_is_refused() -> None:
    """Refused until memlane has locks of its own, if the native module may not enable it."""
    code = "import os, sys; sys._is_gil_enabled = lambda: False; os.environ['PYTHON_GIL'] = '0'\n"
    code += "try:\n import memlane\n"
    code += "except ImportError as error:\n print(error)"
    assert said_by(code) == "memlane needs the GIL: unset PYTHON_GIL, or set it to 1\n"


INTERRUPTED_AT_EVERY_NTH_MODULE = """
import itertools, os, signal, sys

class Interrupting:
    def __init__(self, number):
        self.left = number

    def find_spec(self, name, path=None, target=None):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
ends = []
for number in itertools.count(1, int(sys.argv[1])):
    child = os.fork()
    if child == 0:
        sys.meta_path.insert(0, Interrupting(number))
        try:
            from memlane import *
        except KeyboardInterrupt:
            os._exit(10)
        except ImportError as error:
            print(number, repr(error), flush=True)
            os._exit(11)
        os._exit(0)
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if ends[-1] == 0:
        break
print(*ends)
"""


@pytest.mark.slow
def test_interrupted_while_it_finds_a_module() -> None:
    """Ctrl-C during any import that the names need is a KeyboardInterrupt."""
    command = [sys.executable, "-c", INTERRUPTED_AT_EVERY_NTH_MODULE, "7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    *interrupted, last = done.stdout.split()
    assert len(interrupted) > 10
    assert set(interrupted) == {"10"}, done.stdout + done.stderr
    assert last == "0"


INTERRUPTED_IN_EVERY_CALL = """
import itertools, os, sys

class Interrupting:
    def __init__(self, number):
        self.left, self.inside = number, 0

    def __call__(self, frame, event, function):
        if event == "call":
            self.left -= self.inside > 0
            if self.left == 0:
                raise KeyboardInterrupt
        elif getattr(function, "__name__", "") in ("create_dynamic", "exec_dynamic"):
            self.inside += 1 if event == "c_call" else -1

ends = []
for number in itertools.count(1):
    child = os.fork()
    if child == 0:
        interrupting = Interrupting(number)
        sys.setprofile(interrupting)
        try:
            import memlane._native
        except KeyboardInterrupt:
            os._exit(10)
        os._exit(0 if interrupting.left > 0 else 10)  # nanobind loses one while it begins
    ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if ends[-1] == 0:
        break
print(*ends)
"""


def test_interrupted_while_a_native_module_begins() -> None:
    """The Python code that it calls may raise."""
    command = [sys.executable, "-c", INTERRUPTED_IN_EVERY_CALL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    *interrupted, last = done.stdout.split()
    assert len(interrupted) > 1
    assert set(interrupted) == {"10"}, done.stdout + done.stderr
    assert last == "0"


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
print("begin", flush=True)
try:
    from memlane import *
except ImportError:
    sys.exit(11)
except RuntimeError as error:  # so Python 3.11 wraps what is raised in __set_name__
    raise error.__cause__ or error
print("end", flush=True)
"""


def test_an_interrupted_import_is_no_import_error() -> None:
    """It ends with KeyboardInterrupt, or the interrupt came too late; never ImportError.

    The moments are a sixteenth of an import apart; on a busy machine they are others, also good.
    """
    spans: list[float] = []
    ends: list[int] = []
    for part in range(16):
        child = subprocess.Popen(
            [sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"begin\n"
        began = time.monotonic()
        if part == 0:  # how long it takes
            child.stdout.readline()
            spans.append(time.monotonic() - began)
        else:
            time.sleep(spans[0] * part / 16)
            child.send_signal(signal.SIGINT)
        child.communicate()
        ends.append(child.returncode)
    assert set(ends) <= {0, -signal.SIGINT}


@python_needs_no_folder
def test_in_a_directory_that_was_removed(tmp_path: Path) -> None:
    """Neither the import nor a creation needs the working directory."""
    code = "import os, sys; os.chdir(sys.argv[1]); os.rmdir(sys.argv[1]); import memlane; "
    code += "memlane.ShmRingBuffer(1, 64, 2).close(); memlane.MessageQueue(1, 1).close()"
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run([sys.executable, "-c", code, gone], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
