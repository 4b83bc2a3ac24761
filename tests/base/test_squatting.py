"""Names and files of another user in the place of a segment are refused, and left alone.

Fails without the guard: attaching through a link, or to a file that others may write to, exposes
the process's memory to them.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from memlane import Handle, MessageQueue, SegmentRefused, ShmRingBuffer
from tests.support import NO_FILES, PATIENCE, Link, start
from tests.support.queues import path_of, refuses, ring_in, start_reader

NOBODY = 65534

Attach = Callable[[MessageQueue], object]


@pytest.fixture
def writer() -> Iterator[MessageQueue]:
    """A queue that waits for its reader; afterwards whatever has its name is removed."""
    with MessageQueue(1, 1, None, 4096, 4) as queue:
        path = path_of(queue)
        yield queue
    with suppress(FileNotFoundError, IsADirectoryError):
        path.unlink()
    if path.is_dir():
        path.rmdir()


def by_queue(writer: MessageQueue) -> object:
    return MessageQueue.create_from_handle(writer.handle, 0)


def by_ring(writer: MessageQueue) -> object:
    return ShmRingBuffer(*ring_in(writer).handle())


attaching = pytest.mark.parametrize("attach", [by_queue, by_ring])


def seize(path: Path) -> Path:
    """Moves the genuine segment away from its name."""
    aside = path.with_name("genuine-" + path.name)
    path.rename(aside)
    return aside


@pytest.fixture
def aside(writer: MessageQueue) -> Iterator[Path]:
    """Returns where the genuine segment is while its name is free for others."""
    moved = seize(path_of(writer))
    yield moved
    moved.unlink(missing_ok=True)


@attaching
def test_a_symbolic_link_is_not_followed(writer: MessageQueue, aside: Path, attach: Attach) -> None:
    """A link is not followed, not even to the genuine segment."""
    path_of(writer).symlink_to(aside)
    with refuses(PermissionError) as caught:
        attach(writer)
    assert isinstance(caught.value, SegmentRefused)
    assert path_of(writer).name in str(caught.value)
    assert path_of(writer).is_symlink()


@attaching
def test_a_link_to_nowhere_is_refused(
    writer: MessageQueue, aside: Path, attach: Attach, tmp_path: Path
) -> None:
    """A link to nowhere is refused, and nothing is created where it points."""
    path_of(writer).symlink_to(tmp_path / "nowhere")
    with refuses(PermissionError, FileNotFoundError):
        attach(writer)
    assert list(tmp_path.iterdir()) == []


@attaching
@pytest.mark.parametrize("mode", [0o666, 0o644, 0o660, 0o700, 0o604, 0o400])
def test_a_segment_of_another_mode_is_refused(
    writer: MessageQueue, attach: Attach, mode: int
) -> None:
    """A segment of any other mode is refused, and the error states both modes."""
    path_of(writer).chmod(mode)
    with refuses(PermissionError) as caught:
        attach(writer)
    assert isinstance(caught.value, SegmentRefused)
    text = str(caught.value).replace(path_of(writer).name, "")
    assert "600" in text
    assert oct(mode)[2:] in text
    path_of(writer).chmod(0o600)


@pytest.mark.root
@attaching
def test_a_segment_of_another_user_is_refused(writer: MessageQueue, attach: Attach) -> None:
    """A segment of another user is refused, though root could open it."""
    os.chown(path_of(writer), NOBODY, NOBODY)
    with refuses(PermissionError, match=str(NOBODY)) as caught:
        attach(writer)
    assert isinstance(caught.value, SegmentRefused)


@pytest.mark.root
def test_another_user_cannot_attach(writer: MessageQueue) -> None:
    """Another user cannot attach, and is told so."""
    handle = writer.export_handle()

    def role(_link: Link) -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        with refuses(PermissionError) as caught:
            MessageQueue.create_from_handle(handle, 0)
        assert isinstance(caught.value, SegmentRefused)

    start(role).result()


@pytest.mark.root
def test_a_writer_that_has_given_up_root() -> None:
    """The error says what to do: the kernel lets nobody open what it holds, not even its own user.

    Fails without the guard: "only processes of the same user can share a segment".
    """

    def drop() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)

    def role(link: Link) -> None:
        drop()
        with MessageQueue(1, 1, None, 4096, 4) as queue:
            link.tell(queue.export_handle())
            queue.wait_until_ready(PATIENCE)
            link.hear()
            link.tell(queue.readmit(0))
            link.hear()
            assert ctypes.CDLL(None).prctl(4, 1) == 0  # PR_SET_DUMPABLE
            link.tell()
            link.hear()

    def late(_link: Link, handle: Handle) -> str:
        drop()
        try:
            MessageQueue.create_from_handle(handle, 0).close()
        except SegmentRefused as error:
            return str(error)
        return "attached"

    writer = start(role)
    assert start(late, writer.hear()).result() == "attached"
    writer.tell()
    handle = writer.hear()
    text = start(late, handle).result()
    assert f"process {writer.pid} holds, although it is of the same user" in text
    assert "prctl(PR_SET_DUMPABLE, 1)" in text
    writer.tell()
    writer.hear()
    assert start(late, handle).result() == "attached"
    writer.tell()
    writer.result()


@attaching
@pytest.mark.parametrize("make", NO_FILES)
def test_what_is_not_a_regular_file_is_refused_at_once(
    writer: MessageQueue, aside: Path, attach: Attach, make: Callable[[Path], None]
) -> None:
    """Anything but a regular file is refused at once; opening it does not hang."""
    make(path_of(writer))

    def role(_link: Link) -> None:
        with refuses(PermissionError, ValueError):
            attach(writer)

    if attach is by_ring:
        start(role).result()
    else:
        with refuses(PermissionError, ValueError):
            start_reader(writer.export_handle())


def empty(data: bytes) -> bytes:
    return b""


def half(data: bytes) -> bytes:
    return data[: len(data) // 2]


def documented_part_only(data: bytes) -> bytes:
    return data[: (4096 + 2) * 4]


def all_but_the_last_byte(data: bytes) -> bytes:
    return data[:-1]


def zeros(data: bytes) -> bytes:
    return bytes(len(data))


def garbage(data: bytes) -> bytes:
    return bytes(number * 37 % 251 for number in range(len(data)))


def documented_part_of_zeros_and_garbage(data: bytes) -> bytes:
    return data[: (4096 + 2) * 4] + b"\xff" * (len(data) - (4096 + 2) * 4)


CONTENTS = [
    empty,
    half,
    documented_part_only,
    all_but_the_last_byte,
    zeros,
    garbage,
    documented_part_of_zeros_and_garbage,
]


@attaching
@pytest.mark.parametrize("change", CONTENTS, ids=lambda change: change.__name__)
def test_foreign_contents_are_refused_and_not_changed(
    writer: MessageQueue, aside: Path, attach: Attach, change: Callable[[bytes], bytes]
) -> None:
    """Truncated, empty or foreign contents raise ValueError, and the file is not changed."""
    data = change(aside.read_bytes())
    path_of(writer).write_bytes(data)
    path_of(writer).chmod(0o600)
    with refuses(ValueError):
        attach(writer)
    assert path_of(writer).read_bytes() == data


@attaching
def test_no_damaged_byte_of_the_trailer_crashes(
    writer: MessageQueue, aside: Path, attach: Attach
) -> None:
    """Whatever byte behind the documented part is wrong: refused or usable, never a crash."""
    genuine = aside.read_bytes()

    def role(_link: Link) -> int:
        refused = 0
        for offset in range((4096 + 2) * 4, len(genuine), 3):
            data = bytearray(genuine)
            data[offset] ^= 0xFF
            path_of(writer).write_bytes(data)
            path_of(writer).chmod(0o600)
            try:
                attach(writer).close()  # type: ignore[attr-defined]
            except (ValueError, OSError):
                refused += 1
        return refused

    assert start(role).result() > 20
