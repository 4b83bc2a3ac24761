"""statistics(): the readers are processes."""

from memlane import MessageQueue
from tests.support import until
from tests.support.queues import reader_of, start_reader


def test_a_readers_state_follows_its_process(method: str) -> None:
    """absent, running, stopped, running, dead: as the process is at the time."""
    with MessageQueue(1, 1, None, 64, 8) as writer:
        entry = reader_of(writer, 0)
        assert (entry.state, entry.behind) == ("absent", 0)
        reader = start_reader(writer.export_handle(), 0, method)
        entry = reader_of(writer, 0)
        assert (entry.state, entry.pid) == ("running", reader.pid)
        reader.peer.stop()
        until(lambda: reader_of(writer, 0).state == "stopped")
        reader.peer.resume()
        until(lambda: reader_of(writer, 0).state == "running")
        reader.peer.kill()
        until(lambda: reader_of(writer, 0).state == "dead")
        assert reader_of(writer, 0).pid == reader.pid
