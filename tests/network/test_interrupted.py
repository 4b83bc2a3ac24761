"""Errors while a message is decoded, interrupts and a lack of memory, consume nothing."""

from typing import Any

import pytest

from memlane import OutOfMemory
from tests.support import PATIENCE
from tests.support.remote_queues import remote_queue

ATTEMPTS: list[type[BaseException]] = []


class Decoded:
    """Raises what is left in ATTEMPTS, one error for each attempt to decode it."""

    def __reduce__(self) -> Any:
        return _decode, ()


def _decode() -> str:
    if ATTEMPTS:
        raise ATTEMPTS.pop(0)
    return "decoded"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_a_message_whose_decoding_is_interrupted(error: type[BaseException]) -> None:
    """The next call gets it, as often as that happens."""
    with remote_queue() as (writer, (reader,)):
        ATTEMPTS[:] = [error, error]
        writer.enqueue(Decoded())
        writer.enqueue("next")
        for _ in range(2):
            with pytest.raises(OutOfMemory if error is MemoryError else error):
                reader.dequeue(PATIENCE)
        assert [reader.dequeue(PATIENCE) for _ in range(2)] == ["decoded", "next"]
