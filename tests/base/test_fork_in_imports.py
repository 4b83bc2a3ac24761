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
    """Whether the classes were named before or not."""
    program = [sys.executable, "-c", named + PROGRAM, use]
    done = subprocess.run(program, capture_output=True, text=True, timeout=PATIENCE)
    # logging that is imported meanwhile may say that a lock of its own was not acquired: CPython
    # also runs the handlers that were registered while it ran those that come before a fork.
    assert done.returncode == 0, done.stderr


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
