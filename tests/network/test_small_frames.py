"""Frames of several messages: taken apart natively, and by the protocol's own code for the rest."""

import random

import pytest

from memlane import CorruptMessage
from memlane._native import messages_in
from memlane.broadcast.protocol.frames import Kind, messages_of, whole_header
from memlane.broadcast.protocol.message import Message

pytestmark = pytest.mark.unit

EPOCH = 0x1122334455667788
HEADER = whole_header(EPOCH, 0, 0, 0)


def frame_of(first: int, contents: list[bytes], epoch: int = EPOCH) -> bytes:
    return b"".join(
        whole_header(epoch, first + at, Kind.BYTES, len(content)) + content
        for at, content in enumerate(contents)
    )


def both(frame: bytes, first: int) -> list[Message] | None:
    """Returns what the native code decides; the Python code agrees where it can."""
    found = messages_in(frame, HEADER, first, Message)
    try:
        same = [
            Message(header.sequence, header.kind, bytes(content))
            for header, content in messages_of(frame)
        ]
    except CorruptMessage:
        assert found is None
        return None
    if found is not None:
        assert found == same
        assert all(type(message) is Message for message in found)
    return found


@pytest.mark.parametrize("sizes", [[0], [5], [0, 0, 0], [1, 8192, 3], [7] * 500])
def test_messages_come_out_as_they_went_in(sizes: list[int]) -> None:
    contents = [bytes([at % 251]) * size for at, size in enumerate(sizes)]
    found = both(frame_of(40, contents), 40)
    assert found is not None
    assert [message.memory for message in found] == contents
    assert [message.sequence for message in found] == list(range(40, 40 + len(sizes)))


def test_frames_of_others_are_left_alone() -> None:
    """They are for the slow path, which knows why."""
    contents = [b"one", b"two"]
    assert messages_in(frame_of(40, contents), HEADER, 41, Message) is None
    assert messages_in(frame_of(40, contents, EPOCH + 1), HEADER, 40, Message) is None
    assert messages_in(frame_of(40, contents[:1]) * 2, HEADER, 40, Message) is None
    assert messages_in(b"", HEADER, 40, Message) is None
    with pytest.raises(CorruptMessage, match="shorter than its header"):
        messages_of(frame_of(40, contents) + b"rest")
    with pytest.raises(CorruptMessage, match="bytes of no message after 1 messages"):
        messages_of(frame_of(40, contents)[:-1])


def test_a_writer_that_lies() -> None:
    """Any bytes changed, cut or inserted: a message is whole, or there is none."""
    dice, refused = random.Random(1), 0
    for _ in range(20_000):
        frame = bytearray(
            frame_of(9, [dice.randbytes(dice.randrange(40)) for _ in range(dice.randint(1, 5))])
        )
        for _ in range(dice.randint(1, 3)):
            at = dice.randrange(len(frame) + 1)
            match dice.randrange(4):
                case 0:
                    del frame[at : at + dice.randint(1, 60)]
                case 1:
                    frame[at:at] = dice.randbytes(dice.randint(1, 60))
                case 2 if at < len(frame):
                    frame[at] = dice.choice((0, 1, 127, 128, 255))
                case _:  # the bytes of the first message
                    frame[40:48] = dice.choice((0, 2**63, 2**64 - 1, 2**64 - 48)).to_bytes(
                        8, "little"
                    )
        refused += both(bytes(frame), 9) is None
    assert refused > 10_000
