"""Registered types, in processes that know them and in ones that do not."""

import subprocess
import sys
from pathlib import Path

from tests.support import PATIENCE

PROGRAM = """
import dataclasses, multiprocessing
from memlane.store.serde import MsgpackSerde

@MsgpackSerde.register_type
@dataclasses.dataclass
class Point:
    x: int
    y: tuple

def read(content):
    value = MsgpackSerde().deserialize(memoryview(content))
    print(type(value).__module__, value.x, value.y, flush=True)

if __name__ == "__main__":
    data, _, metadata, _ = MsgpackSerde().serialize(Point(1, (2,)))
    for method in ("fork", "spawn"):
        process = multiprocessing.get_context(method).Process(
            target=read, args=(metadata + b"".join(data),)
        )
        process.start()
        process.join()
"""


def test_a_class_of_the_main_module_keeps_its_name(tmp_path: Path) -> None:
    """A class of the main module keeps its name, though spawn renames the module."""
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert run.stdout.splitlines() == ["__main__ 1 (2,)", "__mp_main__ 1 (2,)"], run.stderr
