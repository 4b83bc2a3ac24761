"""A fork while another thread imports: the child does not wait for a thread that it does not have.

Fails without the guard: the child inherits the lock of a module, and never returns from its import.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import PATIENCE

SOURCE = Path(__file__).parents[2] / "src/memlane"

# Each import in the thread lasts until the main thread waits for it in `os.fork`, or has forked.
PROGRAM = """
import importlib.abc, os, sys, threading
from pathlib import Path
import memlane

USE = sys.argv[1]
main = threading.get_native_id()
imports, forked = threading.Event(), threading.Event()

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if threading.current_thread() is not threading.main_thread() and not imports.is_set():
            imports.set()
            while not forked.wait(0.01):
                stat = Path(f"/proc/self/task/{main}/stat").read_text()
                if stat.rpartition(")")[2].split()[0] == "S":
                    break

def use():
    exec(USE, {})
    imports.set()

thread = threading.Thread(target=use)
sys.meta_path.insert(0, Slow())
thread.start()
imports.wait()
child = os.fork()
if child == 0:
    exec(USE, {})
    os._exit(0)
forked.set()
thread.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""

QUEUE = """
from memlane import MessageQueue
with MessageQueue(1, 1, serializer=%r) as writer:
    with MessageQueue.create_from_handle(writer.export_handle(0), 0) as reader:
        writer.enqueue({'step': 1})
        assert reader.dequeue(60) == {'step': 1}
"""
STORE = """
from memlane import SingleWriterShmObjectStorage, SingleWriterShmRingBuffer
with SingleWriterShmRingBuffer(1 << 16, create=True) as ring:
    with SingleWriterShmObjectStorage(1 << 12, 1, ring) as store:
        store.put("key", [1])
"""
REMOTE = """
from memlane import MessageQueue
MessageQueue(1, 0, connect_ip="127.0.0.1").close()
"""
TEXT = """
from memlane import Handle
try:
    Handle.from_json("{}")
except ValueError:
    pass
"""
NAMED = "import memlane; memlane.MessageQueue; memlane.MsgpackSerde"
USES = {
    "a name": "import memlane; memlane.Gather",
    "a queue": QUEUE % "pickle",
    "a queue of msgpack": QUEUE % "msgpack",
    "a store": STORE,
    "a remote writer": REMOTE,
    "a handle's text": TEXT,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize(
    "named", ["", "import memlane; memlane.MessageQueue; memlane.MsgpackSerde\n"]
)
def test_a_child_does_what_a_thread_was_importing_for(use: str, named: str) -> None:
    """This holds for classes that were named before, and for others."""
    program = [sys.executable, "-c", named + PROGRAM, use]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE)
    # logging that is imported meanwhile may say that a lock of its own was not acquired: CPython
    # also runs the handlers that were registered while it ran those that come before a fork.
    assert done.returncode == 0, done.stderr


# While main waits in `os.fork`, with logging's hook before memlane's, the import takes its lock.
LOGGED = """
import os, sys, threading
from pathlib import Path
import memlane
import logging
from memlane._importing import fork_waits

main = threading.get_native_id()
imports = threading.Event()

def until_main_sleeps():
    while Path(f"/proc/self/task/{main}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        pass

def use():
    with fork_waits:
        imports.set()
        until_main_sleeps()
        logging.getLogger("imported")

thread = threading.Thread(target=use)
thread.start()
imports.wait()
child = os.fork()
if child == 0:
    logging.getLogger("child")
    memlane.MessageQueue
    os._exit(0)
thread.join()
assert not logging._lock._is_owned()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_an_import_gets_the_lock_of_logging_while_a_fork_waits_for_it() -> None:
    """If logging is imported after memlane, its hook runs first."""
    done = subprocess.run(
        [sys.executable, "-c", LOGGED], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, "")


# The handler runs while main waits in `os.fork`, and the import goes on until it has run.
INTERRUPTED = """
import os, signal, sys, threading, time
import memlane
from memlane._importing import fork_waits

imports, handled = threading.Event(), threading.Event()

class Stop(Exception):
    pass

def handler(*_):
    handled.set()
    raise Stop("by a signal")

signal.signal(signal.SIGUSR1, handler)

def use():
    with fork_waits:
        imports.set()
        while not handled.wait(0.01):
            if forking:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)

forking = []
thread = threading.Thread(target=use)
thread.start()
imports.wait()
parent = os.getpid()
reads, writes = os.pipe()
os.register_at_fork(before=lambda: forking.append(True))
try:
    child = os.fork()
    if child == 0:
        memlane.MessageQueue
        assert not fork_waits.is_mine()
        if os.fork() == 0:  # raises nothing
            os.write(writes, b"a grandchild")
        else:
            os.wait()
        os._exit(0)
    [None for _ in "several instructions"]
except Stop:
    assert os.getpid() == parent
    os.wait()
    assert not fork_waits.is_mine()
    assert os.read(reads, 99) == b"a grandchild"
    sys.exit(0)
sys.exit("the fork has dropped what the handler raised")
"""


def test_what_a_handler_raises_while_a_fork_waits_is_raised_after_it() -> None:
    """The child can import, and the parent gets the error."""
    program = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_functions_import_a_fork_waits_for() -> None:
    """But for the command line, which forks nothing while it imports."""
    missing = []
    for path in SOURCE.rglob("*.py"):
        if path.parts[len(SOURCE.parts)] in ("cli", "__main__.py"):
            continue
        tree = ast.parse(path.read_text())
        guarded = {
            node
            for block in ast.walk(tree)
            if isinstance(block, ast.With) and ast.unparse(block.items[0]) == "fork_waits"
            for node in ast.walk(block)
        }
        missing += [
            f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node)}"
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
            if isinstance(node, ast.Import | ast.ImportFrom) and node not in guarded
        ]
    assert not sorted(set(missing)), "write `with fork_waits:` around these imports"
