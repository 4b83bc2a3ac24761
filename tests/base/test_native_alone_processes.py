"""The native module without the Python modules that install errors and functions in it."""

import subprocess
import sys

import pytest

PRELUDE = """
import os, sys
import memlane._native as native

def failing(call, *args):
    try:
        call(*args)
    except Exception as error:
        print(type(error).__name__, error, sep=": ")
    else:
        print("no error")

class Codec:
    encode = encode_plain = decode = decode_parts = decode_plain = None
    outgoing = native.Outgoing()

class Index:
    def __index__(self):
        return 0

shape = native.RingGeometry(1, 64, 2)

def new_ring():
    native.install(check_memory=id)
    return native.RingSegment.create(shape, bytes(16), "memlane-alone", 64, 0)

def new_ends():
    writer = native.RingWriter(new_ring(), [0], Codec, 0, False)
    ring = native.RingSegment.attach(shape, "memlane-alone", None, 1)
    return writer, native.RingReader(ring, [0], Codec, 0, 0, None)

def new_store():
    native.install(check_memory=id)
    ring = native.ByteRingSegment.create(1 << 20, bytes(16), "memlane-alone")
    return native.StoreWriter.create(ring, 1, 8, 1024, bytes(32), False)

def in_child(call, *args):
    child = os.fork()
    if child == 0:
        failing(call, *args)
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


def said_by(code: str) -> str:
    """Returns what a program prints that imports the native module only, and ends without a
    complaint."""
    command = [sys.executable, "-W", "ignore", "-c", PRELUDE + code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("code", "lacking"),
    [
        ("guard = native.CallGuard()\nwith guard: failing(guard.__enter__)", "ConcurrentUse"),
        ("failing(native.copy_parts, bytearray(3), 0, [b'ab'], 3)", "InvalidArgument"),
        ("failing(native.copy_parts, b'abc', 0, [b'ab'], 2)", "InvalidArgument"),
        ("failing(native.RingSegment.attach, shape, 'memlane-none')", "SegmentMissing"),
        ("failing(native.close_in_children, 1 << 20)", "`system_fault`"),
        ("failing(native.RingSegment.create, shape, bytes(16), 'x', 64)", "`check_memory`"),
        ("ring = new_ring(); failing(new_ring)", "`system_fault`"),
        (
            "_ = new_ends(); failing(native.RingSegment.attach, shape, 'memlane-alone', None, 1)",
            "RankTaken",
        ),
        (
            "ring = new_ring()\n"
            "other = native.RingGeometry(1, 64, 3)\n"
            "failing(native.RingSegment.attach, other, 'memlane-alone')",
            "LayoutMismatch",
        ),
        ("ring = new_ring(); ring.close(); failing(ring.view, 0, 1)", "Closed"),
        ("writer, reader = new_ends(); failing(writer.participant, 9)", "InvalidArgument"),
        (
            "writer, reader = new_ends(); failing(reader.__getitem__, ('soon', None, True))",
            "`seconds_of`",
        ),
        ("writer, reader = new_ends(); failing(reader.__getitem__, (0, None, True))", "`failure`"),
        (
            "writer, reader = new_ends(); failing(reader.__getitem__, (60, None, True))",
            "`warning_interval`",
        ),
        ("writer, reader = new_ends(); writer.close(); failing(writer.check)", "`failure`"),
        ("writer, reader = new_ends(); in_child(writer.check)", "`failure`"),
        ("failing(new_store().pin, Index(), 0)", "`integer`"),
        ("store = new_store(); store.close(); failing(store.check)", "Closed"),
        (
            "import array\n"
            "blocks = native.BlockArray.of_buffer(bytearray(8))\n"
            "pairs = memoryview(array.array('q', [0, 9])).cast('B').cast('q', (1, 2))\n"
            "failing(native.copy_blocks, blocks, blocks, pairs, 1)",
            "`move_refusal`",
        ),
    ],
)
def test_the_native_module_alone_names_what_it_lacks(code: str, lacking: str) -> None:
    """It is a RuntimeError that names the class or function that is lacking; nothing crashes."""
    said = said_by(code)
    assert said.startswith("RuntimeError: ")
    assert lacking in said
    assert "not memlane._native alone" in said


def test_a_function_that_is_lacking_beside_the_errors() -> None:
    """It is a MemlaneError."""
    code = "import memlane.errors; native.install_errors(vars(memlane.errors))\n"
    code += "writer, reader = new_ends(); failing(reader.__getitem__, (0, None, True))"
    said = said_by(code)
    assert said.startswith("MemlaneError: ")
    assert "`failure`" in said
