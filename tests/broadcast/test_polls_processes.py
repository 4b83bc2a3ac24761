"""A poll that finds nothing, while the peer is another process."""

import pickle

from memlane import MessageQueue, TimedOut
from memlane._base.processes import name_of
from tests.support import Remote
from tests.support.queues import failed, fill, start_reader, start_writer


def test_text_of_a_full_queue_says_what_its_reader_does_when_the_text_is_read() -> None:
    """The text does not change afterwards."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        reader = start_reader(writer.export_handle(), 7)
        fill(writer)
        error = failed(lambda timeout: writer.enqueue(0, timeout=timeout))
        check_late_text(error, reader, "reader 7 ({}, stopped, 2 behind, last ")
        reader.call("close")


def test_text_of_an_empty_queue_says_what_its_writer_does_when_the_text_is_read() -> None:
    """The text does not change afterwards."""
    writer = start_writer()
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        error = failed(reader.dequeue)
        check_late_text(error, writer, "the writer ({}, stopped, last progress ")
        writer.call("close")


def check_late_text(error: TimedOut, other: Remote, words: str) -> None:
    other.peer.stop()
    text = str(error)
    other.peer.resume()
    words = words.format(f"pid {other.pid} {name_of(other.pid)}")
    assert text.startswith(f"timed out after 0 s waiting for {words}")
    assert str(error) == text
    assert repr(error) == f"TimedOut({text!r})"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.args, copy.timeout) == ((text,), 0)
