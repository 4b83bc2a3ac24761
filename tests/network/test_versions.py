"""Peers of another version of the protocol: both sides say so at once, and nobody waits."""

from typing import Any

import pytest

from memlane import Handle, LayoutMismatch, MessageQueue
from memlane.broadcast.protocol import frames
from tests.support import PATIENCE, Aside, Link, start
from tests.support.remote_queues import remote_writer, start_remote_reader

NEXT = b"mlq" + bytes([frames.VERSION + 1])


def attaching(_link: Link, handle: Handle, rank: int, begin: bytes) -> str:
    """Role: a reader whose frames begin so; returns why it could not attach."""
    frames._MAGIC, frames.VERSION, frames._BEGIN = begin[:3], begin[3], begin
    with pytest.raises(LayoutMismatch) as refused:
        MessageQueue.create_from_handle(handle, rank)
    return str(refused.value)


@pytest.mark.parametrize(
    ("begin", "theirs", "ours"),
    [
        (NEXT, f"version {frames.VERSION + 1} of the", f"version {frames.VERSION} of the"),
        (b"new!", "another protocol (its frames begin with b'new!')", "another protocol (its"),
    ],
)
def test_both_ends_say_it_at_once(begin: bytes, theirs: str, ours: str) -> None:
    with remote_writer(2, remote_liveness=PATIENCE) as writer:
        attached = start_remote_reader(writer, 0)
        waits = Aside(writer.wait_until_ready)
        told = start(attaching, writer.export_handle(1), 1, begin).result()
        assert told.startswith("the writer at tcp://127.0.0.1:")
        assert f" speaks {ours} " in told
        with pytest.raises(LayoutMismatch) as refused:
            waits.result()
        said = str(refused.value)
        assert said.startswith("reader 1 at 127.0.0.1:")
        assert f" speaks {theirs}" in said
        for call in (writer.wait_until_ready, lambda: writer.enqueue("step")):
            with pytest.raises(LayoutMismatch):
                call()
        writer.release_reader(1)
        writer.enqueue("without it")
        assert attached.call("dequeue", PATIENCE) == "without it"
        writer.close()
        attached.leave()


def test_a_reader_of_the_same_version_takes_the_place() -> None:
    with remote_writer() as writer:
        start(attaching, writer.export_handle(0), 0, NEXT).result()
        with pytest.raises(LayoutMismatch):
            writer.wait_until_ready()
        reader = start_remote_reader(writer)
        writer.wait_until_ready(PATIENCE)
        writer.enqueue("step")
        assert reader.call("dequeue", PATIENCE) == "step"
        writer.close()
        reader.leave()


def test_without_keys_the_writer_logs_it_and_waits_for_another(caplog: Any) -> None:
    """Anyone on that network could send such a frame."""
    with remote_writer(insecure_network=True, serializer="msgpack") as writer:
        start(attaching, writer.export_handle(0), 0, NEXT).result()
        assert "a reader at 127.0.0.1:" in caplog.text
        assert f" speaks version {frames.VERSION + 1} of the protocol" in caplog.text
        reader = start_remote_reader(writer)
        writer.wait_until_ready(PATIENCE)
        writer.close()
        reader.leave()
