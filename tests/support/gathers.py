"""Gathers for tests."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from memlane import Gather, GatherHandle
from tests.support import PATIENCE, Link, serve


def writing(link: Link, handle: GatherHandle) -> None:
    """Role: a writer of that gather, which is told what to call."""
    serve(link, Gather.create_from_handle(handle, handle.rank))


@contextmanager
def gather_of(
    n_writer: int = 2, *, ready: bool = True, **options: Any
) -> Iterator[tuple[Gather, list[Gather]]]:
    """A reader and its writers, all in this process."""
    options = {"max_chunk_bytes": 4096, "max_chunks": 4, **options}
    with ExitStack() as stack:
        reader = stack.enter_context(Gather(n_writer, **options))
        writers = []
        for rank in range(n_writer):
            writers.append(Gather.create_from_handle(reader.export_handle(rank), rank))
            stack.callback(writers[-1].close)
        if ready:
            reader.wait_until_ready(PATIENCE)
        yield reader, writers
