"""The ends of a queue with readers on other hosts, with or without local ones."""

from __future__ import annotations

import os
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from memlane._base.deadline import deadline_of, remaining
from memlane._base.lifetime import undone_by
from memlane._base.serialization import Codec
from memlane._native import Encoder
from memlane._net.contexts import need_curve
from memlane.broadcast.local import LocalWriter
from memlane.broadcast.remote.driver import logger
from memlane.broadcast.remote.frames import SMALL, Kind
from memlane.broadcast.remote.outbox import pieces_of, raw_piece
from memlane.broadcast.remote.writer import RemoteWriter
from memlane.broadcast.statistics import QueueStatistics

if TYPE_CHECKING:
    from collections.abc import Iterator

    import zmq

    from memlane._native import RingGeometry, RingSegment
    from memlane.broadcast.handle import Handle
    from memlane.broadcast.options import RemoteOptions


class NetworkWriter:
    """Sends to remote readers and, through a ring, to any local ones; encodes each message once.

    It finds room everywhere before it sends anything. Room in the windows stays free, because
    nobody else sends, so it can wait for the ring last.
    """

    def __init__(
        self,
        local: LocalWriter | None,
        n_remote: int,
        local_ranks: list[int],
        options: RemoteOptions,
        queue_id: str,
        geometry: RingGeometry,
        codec: Codec,
    ) -> None:
        self._local = local
        self._max_chunk_bytes = geometry.max_chunk_bytes
        self._encoder = Encoder(codec)
        self.segment: RingSegment | None = None if local is None else local.segment
        self.remote = RemoteWriter(n_remote, local_ranks, options, queue_id, geometry, local)

    def close(self, timeout: float | None = None) -> None:
        """Closes both, even if one of them raises."""
        try:
            if self._local is not None:
                self.remote.end_here(self._local.absent())
                self._local.close()
        finally:
            self.remote.close(timeout)

    def abandon(self) -> None:
        try:
            if self._local is not None:
                self._local.abandon()
        finally:
            self.remote.abandon()

    @property
    def position(self) -> int:
        return 0 if self._local is None else self._local.position

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self.remote.transport.socket

    def check(self) -> None:
        self.remote.check()

    def send(self, obj: Any, timeout: float | None) -> None:
        deadline = None if timeout is None else deadline_of(timeout)
        remote, encoder = self.remote, self._encoder
        with remote.turn:
            remote.begin()
            try:
                size = encoder.encode(obj)
                if encoder.kind != Kind.PLAIN:
                    remote.check()  # pickling may have forked
                if size <= SMALL and size <= remote.room and self._local is None:
                    remote.publish_small(encoder, size)
                    return
                has_waited = size > remote.room and remote.reserve(size, deadline, timeout)
                # Whatever may fail happens before the ring publishes.
                remote.stage(
                    pieces_of(encoder, remote.session.epoch, remote.outbox.next, size), size
                )
                if self._local is not None:
                    left = remaining(deadline) if has_waited else timeout
                    self._local.native.send_encoded(encoder, left, remote)
                remote.publish()
            finally:
                encoder.clear()

    @contextmanager
    def block(self, owner: object, timeout: float | None) -> Iterator[memoryview]:
        """Remote readers do not get the raw bytes; they raise `CorruptMessage` instead."""
        deadline = deadline_of(timeout)
        remote = self.remote
        with remote.turn:
            remote.begin()
            remote.reserve(0, deadline, timeout)
            remote.stage(raw_piece(remote.session.epoch, remote.outbox.next), 0)
            if self._local is None:
                yield memoryview(bytearray(self._max_chunk_bytes))
            else:
                with self._local.native.write_block(owner, remaining(deadline)) as view:
                    yield view
            remote.publish()

    def wait_until_ready(self, timeout: float | None) -> None:
        deadline = deadline_of(timeout)
        self.remote.wait_until_ready(timeout)
        if self._local is not None:
            self._local.wait_until_ready(remaining(deadline))
        self.remote.announce_ready()

    def release_reader(self, rank: int) -> None:
        if self._local is not None and rank in self._local.native.ranks:
            self._local.release_reader(rank)
        else:
            self.remote.release_reader(rank)

    def expect_alone(self, rank: int) -> None:
        self.remote.expect_alone(rank)

    def secrets_for(self, rank: int | None) -> list[str]:
        if self._local is not None and rank in self._local.native.ranks:
            return []
        return self.remote.secrets_for(rank)

    def statistics(self) -> QueueStatistics:
        remote = self.remote
        rows = remote.statistics()
        waits, spills = remote.waits, 0
        if self._local is not None:
            here = self._local.statistics()
            rows = here.readers + rows
            waits, spills = waits + here.waits, here.spills
        sent = remote.outbox
        return QueueStatistics(
            "writer", None, os.getpid(), sent.next, sent.bytes, waits, spills, rows
        )


def writer_with_remote_readers(
    handle: Handle,
    geometry: RingGeometry,
    codec: Codec,
    keep_bytes: int,
    n_remote: int,
    options: RemoteOptions,
) -> NetworkWriter:
    """Creates the writer's end and completes its handle; leaves nothing open if it raises."""
    if not options.insecure:
        need_curve()
    ranks = handle.local_reader_ranks
    with ExitStack() as undo:
        local = None
        if ranks:
            queue_id = bytes.fromhex(handle.queue_id)
            local = LocalWriter(geometry, queue_id, ranks, codec, keep_bytes)
            undo.enter_context(undone_by(local.abandon))
        writer = NetworkWriter(local, n_remote, ranks, options, handle.queue_id, geometry, codec)
    endpoint = writer.remote.transport.endpoint
    if options.insecure:
        logger.warning(
            "the queue at %s neither encrypts nor authenticates "
            "(insecure_network=True): anyone on the network can read and send messages",
            endpoint.text,
        )
    handle.remote_subscribe_addr = endpoint.text
    handle.remote_addr_ipv6 = endpoint.is_ipv6
    handle.n_remote_reader = n_remote
    handle.remote_liveness = options.liveness
    handle.remote_server_key = writer.remote.keys.server_key
    return writer
