"""Lent arrays in processes that fork, close, exit and are killed.

Fails without the guard: a child whose array changes because its parent has dropped its own, a
closed reader that sees later messages, or an extent that a dead reader keeps for ever.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from memlane import MessageQueue, ReaderDied, WriterDied
from tests.support import PATIENCE, Aside, Link, assert_in_time, start
from tests.support.missing import needs
from tests.support.queues import BOUND, file_of, refuses, start_reader, sweep

MIB = 1 << 20
SIZE = 4 * MIB


def numbered(number: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.full(SIZE, number, np.uint8)


def new_writer(readers: int = 1, places: int = 3) -> MessageQueue:
    """A writer with room for that many lent messages."""
    pool = places * (SIZE + 8192)
    return MessageQueue(readers, readers, None, 4096, 3, max_extent_bytes=pool)


def keep(queue: MessageQueue, count: int) -> None:
    """Takes messages and keeps them as long as the process lives."""
    queue.__dict__["kept"] = [queue.dequeue(PATIENCE) for _ in range(count)]


def kept(queue: MessageQueue) -> list[tuple[int, int]]:
    return [(int(one.min()), int(one.max())) for one in queue.__dict__["kept"]]


def drop(queue: MessageQueue, index: int) -> None:
    queue.__dict__["kept"].pop(index)


def kept_after_close(queue: MessageQueue) -> list[tuple[int, int]]:
    queue.close()
    return kept(queue)


def fork_and_drop(queue: MessageQueue) -> None:
    """Forks a child that will read what its parent has kept and drops now."""
    asked, answered = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(asked[0], 1)
        seen = kept(queue)
        queue.__dict__["kept"][0][:] = 99
        queue.__dict__.pop("kept")
        queue.close()
        os.write(answered[1], repr(seen).encode())
        os._exit(0)
    queue.__dict__["child"] = (child, asked, answered)
    queue.__dict__["kept"].clear()


def ask_child(queue: MessageQueue) -> str:
    child, asked, answered = queue.__dict__.pop("child")
    os.write(asked[1], b"x")
    os.waitpid(child, 0)
    text = os.read(answered[0], 1000).decode()
    for end in (*asked, *answered):
        os.close(end)
    return text


def test_a_childs_lent_arrays_do_not_change() -> None:
    """The child's arrays do not change, though the parent drops its own and takes others."""
    with new_writer() as writer:
        reader = start_reader(writer.export_handle())
        for number in (1, 2):
            writer.enqueue(numbered(number))
        reader.call(keep, 2)
        reader.call(fork_and_drop)
        for number in range(3, 9):
            writer.enqueue(numbered(number))
            reader.call(keep, 1)
        assert reader.call(ask_child) == "[(1, 1), (2, 2)]"
        assert reader.call(kept) == [(8, 8)]
        reader.call("close")


def lent_memory_of(pids: list[int]) -> int:
    """Private memory mapped from segments, in bytes; each page counts once for all of them."""
    found = 0
    for pid in pids:
        is_lent = False
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            name, *rest = line.split()
            if not name.endswith(":"):  # a mapping begins
                is_lent = rest[0] == "rw-p" and "/dev/shm/" in line
            elif is_lent and name == "Pss:":
                found += 1024 * int(rest[0])
    return found


def copies_of_forks(_queue: MessageQueue, forks: int) -> list[int]:
    """Lent memory of this process and its idle children, after each fork."""
    children, seen = [], []
    until_over, over = os.pipe()
    for _ in range(forks):
        child = os.fork()
        if child == 0:
            os.close(over)
            os.read(until_over, 1)
            os._exit(0)
        children.append(child)
        seen.append(lent_memory_of([os.getpid(), *children]))
    os.close(over)
    os.close(until_over)
    for child in children:
        os.waitpid(child, 0)
    return seen


def test_children_of_many_forks_share_one_copy() -> None:
    """Each lease is copied at the first fork, and all children share that copy."""
    with new_writer() as writer:
        reader = start_reader(writer.export_handle())
        writer.enqueue(numbered(1))
        reader.call(keep, 1)
        first, *_, last = reader.call(copies_of_forks, 4)
        assert first == pytest.approx(SIZE, rel=0.1)
        assert last == pytest.approx(SIZE, rel=0.1)
        assert reader.call(kept) == [(1, 1)]
        reader.call("close")


def test_a_killed_reader_frees_its_leases_when_released() -> None:
    """Once it is released its leases are void, and their extents are reused."""
    with new_writer(2) as writer:
        doomed = start_reader(writer.export_handle(), 0)
        other = start_reader(writer.export_handle(), 1)
        writer.wait_until_ready(PATIENCE)
        for number in range(3):
            writer.enqueue(numbered(number))
        doomed.call(keep, 3)
        other.call(keep, 3)
        for index in (2, 1, 0):
            other.call(drop, index)
        full = file_of(writer).st_blocks
        killed = doomed.peer.kill()
        blocked = Aside(send_until_refused, writer)
        with refuses(ReaderDied):
            blocked.result()
        assert_in_time(BOUND, killed, blocked.ended)
        writer.release_reader(0)
        other.call(keep, writer.statistics().messages - 3)
        for index in range(writer.statistics().messages - 3):
            del index
            other.call(drop, 0)
        for number in range(10, 14):
            writer.enqueue(numbered(number))
            other.call(keep, 1)
            assert other.call(kept) == [(number, number)]
            assert file_of(writer).st_blocks <= full + 64
        other.call("close")


def send_until_refused(writer: MessageQueue) -> None:
    for _ in range(10):
        writer.enqueue("small", PATIENCE)


def test_a_reader_that_closes() -> None:
    """An array that it kept is its own, whatever is sent to others afterwards."""
    with new_writer(2) as writer:
        closing = start_reader(writer.export_handle(), 0)
        other = start_reader(writer.export_handle(), 1)
        writer.wait_until_ready(PATIENCE)
        for number in (1, 2):
            writer.enqueue(numbered(number))
        closing.call(keep, 2)
        other.call(keep, 2)
        assert closing.call(kept_after_close) == [(1, 1), (2, 2)]
        other.call(drop, 1)
        other.call(drop, 0)
        for number in range(3, 9):
            writer.enqueue(numbered(number))
            other.call(keep, 1)
        assert closing.call(kept) == [(1, 1), (2, 2)]
        assert other.call(kept) == [(8, 8)]
        other.call("close")


MSEAL = 462  # the number of the system call
PROT_READ = 1


def protect_page(queue: MessageQueue, call: str) -> None:
    """Makes a page in the middle of the array that is kept read-only, or seals it as well."""
    (array,) = queue.__dict__["kept"]
    libc = ctypes.CDLL(None, use_errno=True)
    page = ctypes.c_void_p((array.ctypes.data + SIZE // 2) // 4096 * 4096)
    assert libc.mprotect(page, ctypes.c_size_t(4096), PROT_READ) == 0
    if call == "seal" and libc.syscall(MSEAL, page, ctypes.c_size_t(4096), 0) != 0:
        raise OSError(ctypes.get_errno(), "mseal")
    queue.__dict__["page"] = array[SIZE // 2 : SIZE // 2 + 1]


def kept_beside_a_fork(queue: MessageQueue) -> list[tuple[int, int]]:
    """Returns what a child sees of the array that was kept when it was forked, after later
    messages."""
    asked, answered = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.read(asked[0], 1)
        os.write(answered[1], repr(kept(queue)).encode())
        os._exit(0)
    queue.__dict__["child"] = (child, asked, answered)
    queue.__dict__.pop("page")
    queue.__dict__["kept"].clear()
    return []


@pytest.mark.parametrize("how", ["fork", "close"])
@pytest.mark.parametrize("call", ["protect", "seal"])
def test_a_read_only_page(how: str, call: str) -> None:
    """It is copied like the others; one that is sealed keeps its extent, and is logged."""
    with new_writer(2) as writer:
        reader = start_reader(writer.export_handle(), 0)
        other = start_reader(writer.export_handle(), 1)
        writer.enqueue(numbered(1))
        reader.call(keep, 1)
        other.call(keep, 1)
        other.call(drop, 0)
        try:
            reader.call(protect_page, call)
        except OSError:
            pytest.skip(needs("a kernel that seals memory"))
        reader.call(kept_beside_a_fork if how == "fork" else kept_after_close)
        for number in range(2, 6):
            writer.enqueue(numbered(number))
            other.call(keep, 1)
            other.call(drop, 0)
            if how == "fork":
                reader.call(keep, 1)
                reader.call(drop, 0)
        seen = reader.call(ask_child) if how == "fork" else repr(reader.call(kept))
        assert seen == "[(1, 1)]"
        if how == "fork":
            reader.call("close")
        other.call("close")


def writing(link: Link) -> None:
    queue = new_writer()
    link.tell(queue.export_handle())
    for number in range(1, 1000):
        queue.enqueue(numbered(number % 200), PATIENCE)


def test_lent_arrays_outlive_a_killed_writer() -> None:
    """Lent arrays stay, even after the last process of the queue has left it."""
    writer = start(writing)
    with MessageQueue.create_from_handle(writer.hear(), 0) as reader:
        arrays = [reader.dequeue(PATIENCE) for _ in range(5)]
        writer.kill()
        with refuses(WriterDied):
            while True:
                reader.dequeue(PATIENCE)
    for number, array in enumerate(arrays, start=1):
        assert (array == number).all()
        array += 1
    sweep()


SCRIPT = """
import sys
from pathlib import Path
import numpy as np
from memlane import Handle, MessageQueue
queue = MessageQueue.create_from_handle(Handle.from_json(sys.argv[1]), 0)
print(flush=True)
kept = [queue.dequeue(90) for _ in range(2)]
assert all((array == number).all() for number, array in enumerate(kept))
kept[0][:] = 7
np.kept = kept
{end}
"""


@pytest.mark.parametrize("end", ["pass", "import os; os._exit(0)", "queue.close()", "del queue"])
def test_an_interpreter_with_leases_exits_cleanly(end: str) -> None:
    """An interpreter with leases exits cleanly; the writer continues."""
    with new_writer() as writer:
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT.format(end=end), writer.export_handle().to_json()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        for number in range(2):
            writer.enqueue(numbered(number))
        _, error = process.communicate(timeout=PATIENCE)
        assert (process.returncode, error) == (0, b"")
        if end != "queue.close()":
            with refuses(ReaderDied):
                send_until_refused(writer)
                writer.wait_until_ready(PATIENCE)
            writer.release_reader(0)
        before = file_of(writer).st_blocks
        for number in range(9):
            writer.enqueue(numbered(number))
        assert file_of(writer).st_blocks <= before + SIZE // 512 + 64
