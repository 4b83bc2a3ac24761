"""MessageQueue: one writer sends objects to every reader, each once and in order."""

from __future__ import annotations

import pickle
from math import ceil, inf
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

from memlane._base.arguments import MAX_SEGMENT_BYTES, integer, integer_from
from memlane._base.deadline import seconds_of
from memlane._base.labels import checked_label
from memlane._base.lifetime import undone_by
from memlane._base.segments import new_id
from memlane._base.serialization import codec_of
from memlane._importing import fork_waits
from memlane._native import after_return
from memlane.broadcast.any_queue import AnyQueue, M
from memlane.broadcast.grouping import DEFAULT_TIMEOUT, Readers, queue_over_group
from memlane.broadcast.handle import (
    Handle,
    address_in,
    attaching_rank,
    checked_rank,
    checked_ranks,
)
from memlane.broadcast.local import (
    LocalReader,
    LocalWriter,
    LonelyWriter,
    no_such_reader,
)
from memlane.broadcast.options import RemoteOptions
from memlane.broadcast.ring import (
    MAX_READERS,
    Mode,
    ShmRingBuffer,
    checked_mode,
    chunks_for,
    ring_geometry,
)
from memlane.errors import Closed, InvalidArgument, TimedOut, Unsupported, WrongRole

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterable, Sequence
    from contextlib import AbstractContextManager

    import zmq

    from memlane._base.serialization import Codec
    from memlane._doors.door import Door
    from memlane._native import RingGeometry
    from memlane.broadcast.local import End, ReaderEnd, WriterEnd
    from memlane.broadcast.network.writer import NetworkWriter
    from memlane.broadcast.statistics import QueueStatistics

_MOST_SERVED = 4096  # readers; their handle is one packet


class _Habit:
    """A method of other queues that this one lacks; the error names the call to use. `__getattr__`
    would say it, too, but makes every attribute of the class slow: 0.2 us a message."""

    def __init__(self, instead: str) -> None:
        self._instead = instead

    def __set_name__(self, _owner: type, name: str) -> None:
        self._name = name

    def __get__(self, queue: object, owner: type) -> NoReturn:
        raise AttributeError(
            f"{owner.__name__!r} object has no attribute {self._name!r}; use {self._instead}",
            name=self._name,
            obj=queue,
        )


def _not_the_writer(call: str) -> WrongRole:
    return WrongRole(f"Only the writer can {call}")


def _not_a_reader(call: str) -> WrongRole:
    return WrongRole(f"Only readers can {call}: make one with create_from_handle()")


def _check_served(label: str, readers: int, local: int) -> None:
    if not label:
        raise InvalidArgument("serve=True needs a name")
    if local < readers:
        raise Unsupported(
            "a queue with readers on other hosts cannot be served by its name: send them "
            "export_handle(rank)"
        )
    if not 0 < readers <= _MOST_SERVED:
        raise InvalidArgument(f"a served queue has 1 to {_MOST_SERVED} readers, not {readers}")


def door_of(label: str, handle: Handle, writer: LocalWriter) -> Door:
    """Opens the door of a queue."""
    with fork_waits:
        from memlane._doors.door import Door
        from memlane.broadcast.serving import QueueHost

    return Door(label, QueueHost(handle, writer))


def _writer_end(
    handle: Handle,
    geometry: RingGeometry,
    codec: Codec,
    pool: int,
    n_remote: int,
    options: RemoteOptions,
    mode: Mode,
) -> WriterEnd:
    """Creates the writer's end of the queue with that handle, with `n_remote` readers elsewhere."""
    if n_remote:
        with fork_waits:
            from memlane.broadcast.network.writer import writer_with_remote_readers

        return writer_with_remote_readers(handle, geometry, codec, pool, n_remote, options)
    if not handle.local_reader_ranks:
        return LonelyWriter(geometry.max_chunk_bytes)
    return LocalWriter(
        geometry,
        bytes.fromhex(handle.queue_id),
        handle.local_reader_ranks,
        codec,
        pool,
        has_others=False,
        has_late_readers=options.late_readers,
        is_latest=mode == "latest",
    )


def _send_of_a_reader(_obj: object, _timeout: float | None) -> NoReturn:
    raise _not_the_writer("enqueue")


def _receive_of_a_writer(
    _timeout: float | None, _cancel: threading.Event | None, _lends: bool
) -> NoReturn:
    raise _not_a_reader("dequeue")


class MessageQueue(AnyQueue[M]):
    """The writer's end of a queue, or a reader's (`create_from_handle`).

    For type checkers `MessageQueue[Step]` is a queue of messages of type `Step`. Nothing checks
    them when the program runs.

    Args:
        n_reader: number of readers. With 0, `enqueue` returns at once and discards the object.
        n_local_reader: number of readers on this host; all if None.
        local_reader_ranks: their ranks; `range(n_local_reader)` if None.
        max_chunk_bytes: larger messages are stored in an extent behind the ring, in the same order.
        max_chunks: number of messages that the writer may be ahead of the slowest reader.
        connect_ip: this host's address for remote readers; None: the source address of its packets,
            in a group of those to rank 0.
        port: for remote readers: a port, or the first free one of a range, "29500-29599"; None:
            that of the environment's `MEMLANE_PORTS`, or else one that the system chooses.
        max_extent_bytes: size of the pool, the extents that are kept for large messages (at most
            half of /dev/shm); released when /dev/shm runs low, or after 10 s without a large
            message. 0 disables the pool.
        serializer: "pickle", or "msgpack", which executes no code when decoding: tuples become
            lists, and `enqueue` refuses types that msgpack lacks.
        keep_readonly: with pickle, read-only arrays arrive read-only.
        remote_window: most unacknowledged messages per remote reader.
        remote_window_bytes: most unacknowledged bytes per reader; a larger message is sent only
            when nothing else is in flight.
        remote_liveness: seconds after which an unreachable remote peer counts as dead.
        listen_on_all: listen on all interfaces, not on `connect_ip` only.
        insecure_network: neither encrypt nor authenticate; needs serializer="msgpack".
        relay: the first reader of each remote host relays messages to the others there.
        late_readers: readers may attach at any time, and get messages from the next one on; nobody
            waits for a reader that has not attached.
        name: what people call the queue; shown by every command, in errors, log lines and metrics.
            At most 40 ASCII letters, digits and `. _ - [ ] /`.
        serve: other programs of this user and host join by `MessageQueue.open(name)`, and take the
            places of readers that have closed or were released. Needs a `name`.
        mode: "all", or "latest": the writer never waits, whatever its calls say of waiting, and
            each reader gets the latest message that it has not seen, not those before. There are
            then at least `n_reader + 2` chunks.

    Attributes:
        handle: of this queue; on the writer equal to `export_handle()`, with every reader's key.
        local_socket: None; engines read it.
        n_local_reader, n_remote_reader: number of readers on the writer's host, and elsewhere.

    Raises:
        InvalidArgument: negative counts, more local readers than readers, ranks that do not match,
            an address that is not this host's, or a port that is none.
        SystemFault: the ports are in use, or of privileged users.
        ShmExhausted: /dev/shm has no space for it.
        Unsupported: there are remote readers, and libzmq was built without CURVE, or `mode` is
            "latest", or it is to be served.
        NameTaken: a living process serves under that name.
        SegmentRefused: the folder of names is not this user's alone.

    One thread at a time may use a queue in a process; `close()` may be called from any thread. Only
    `close()`, or leaving a `with` block without an exception, tells the peers: a queue that is
    garbage-collected without it is reported as dead. For SIGTERM, see `help(memlane)`.

    Example::

        with MessageQueue(n_reader=1) as queue:
            reader = MessageQueue.create_from_handle(queue.export_handle(), rank=0)  # elsewhere
            queue.enqueue({"step": 1})
            print(reader.dequeue())  # {'step': 1}
            reader.close()
    """

    _reader: ReaderEnd | None
    _writer: WriterEnd | None
    _door: Door | None = None  # by which others join, if it is served
    _instead_of_pickling = (
        "send export_handle(rank), and call create_from_handle(handle) in the receiver"
    )

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int | None = None,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = 10 * 1024 * 1024,
        max_chunks: int = 10,
        connect_ip: str | None = None,
        *,
        port: int | str | None = None,
        max_extent_bytes: int = 1024 * 1024 * 1024,
        serializer: str = "pickle",
        keep_readonly: bool = False,
        remote_window: int = 1024,
        remote_window_bytes: int = 64 * 1024 * 1024,
        remote_liveness: float = 3.0,
        listen_on_all: bool = False,
        insecure_network: bool = False,
        relay: bool = False,
        late_readers: bool = False,
        mode: Mode = "all",
        name: str | None = None,
        serve: bool = False,
    ) -> None:
        readers = integer_from("n_reader", n_reader, 0, MAX_READERS)
        local = (
            readers if n_local_reader is None else integer_from("n_local_reader", n_local_reader, 0)
        )
        if local > readers:
            raise InvalidArgument(f"n_local_reader must be at most n_reader {readers}, not {local}")
        mode = checked_mode(mode, readers - local)
        chunks = chunks_for(mode, local, max_chunks)
        geometry = ring_geometry(max(local, 1), max_chunk_bytes, chunks)
        ranks = checked_ranks(local_reader_ranks, local)
        pool = min(integer_from("max_extent_bytes", max_extent_bytes, 0), MAX_SEGMENT_BYTES)
        codec = codec_of(serializer, keep_readonly=keep_readonly)
        options = RemoteOptions(
            connect_ip=connect_ip,
            port=port,
            listen_on_all=listen_on_all,
            window=remote_window,
            window_bytes=remote_window_bytes,
            liveness=remote_liveness,
            insecure=insecure_network,
            serializer=serializer,
            relay=relay,
            late_readers=late_readers,
        )
        label = checked_label(name)
        if serve:
            _check_served(label, readers, local)
        handle = Handle(local_reader_ranks=ranks, queue_id=new_id().hex(), serializer=serializer)
        end = _writer_end(handle, geometry, codec, pool, readers - local, options, mode)
        with undone_by(end.abandon):  # a signal handler may raise before it is owned
            self._setup(handle, geometry, end, None, late_readers)
        if label:
            self.name = label
        if serve:
            with undone_by(self._abandon):
                self._door = door_of(label, handle, cast("LocalWriter", end))

    @classmethod
    def open(cls, name: str, rank: int | None = None, *, timeout: float | None = None) -> Self:
        """Attaches to the queue that a program of this user serves under `name`, once one does.

        If no reader has had that place, it gets every message from the first, else from the next
        one on.

        Args:
            name: as that of the queue that was made with `serve=True`.
            rank: the place; None: the next free one. That of a reader that has died is waited for:
                its writer must call `release_reader`.
            timeout: in seconds.

        Raises:
            TimedOut: after `timeout` seconds; it says what was missing.
            RankTaken: a living process has the place, or all of them.
            InvalidArgument: there is no such rank, or what is served there is no MessageQueue.
            SegmentRefused: the folder of names, or the socket, is not this user's alone.
            LayoutMismatch: its writer has another version of memlane.
            MemlaneError: as `create_from_handle`.
        """
        with fork_waits:
            from memlane._doors.search import opened

        rank = None if rank is None else checked_rank(rank)
        return opened(name, "MessageQueue", rank, timeout, cls._of_door)

    @classmethod
    async def aopen(
        cls, name: str, rank: int | None = None, *, timeout: float | None = None
    ) -> Self:
        """Is `open` for asyncio; `timeout` is in seconds. If it is cancelled, its place is free.
        Raises as `open`.
        """
        with fork_waits:
            from memlane._doors.search import aopened

        rank = None if rank is None else checked_rank(rank)
        return await aopened(name, "MessageQueue", rank, timeout, cls._of_door)

    @classmethod
    def _of_door(cls, text: str, rank: int) -> Self:
        return cls.create_from_handle(Handle.from_json(text), rank)

    @classmethod
    def create_from_handle(
        cls, handle: Handle, rank: int | None = None, *, timeout: float | None = None
    ) -> Self:
        """Attaches reader `rank` to the queue; it gets every message from the first. None: the
        reader that the handle was exported for.

        A rank in `local_reader_ranks` reads from shared memory, any other over the network.
        `timeout` applies to the latter; None waits as long as the writer can be reached.

        Raises:
            TimedOut: a writer on another host did not answer within `timeout` seconds.
            SegmentMissing: the queue is gone or on another host, or all readers have attached.
            RankTaken: the rank is or was attached, or all remote readers are.
            SegmentRefused, LayoutMismatch: the file of that name is not the queue's memory; or the
                writer on another host speaks another version of the protocol.
            WriterUnreachable: nobody answers at the handle's address (any more).
            AccessRefused: the peer there is not the queue's writer, or does not accept this key.
            InvalidArgument: a negative rank, one that the queue or the handle does not have, or
                None for a handle that was exported for all readers.
        """
        address = address_in(handle)
        rank = attaching_rank(rank, handle.rank, "reader")
        seconds_of(timeout)
        end: ReaderEnd
        if address.ring is not None and rank in address.ranks:
            end = LocalReader(address.ring, address.ranks.index(rank))
        elif address.network is not None:
            with fork_waits:
                from memlane.broadcast.network.shared_reader import remote_reader

            end = remote_reader(address.network, rank, timeout)
        else:
            raise no_such_reader(rank, address.ranks)
        with undone_by(end.abandon):  # a signal handler may raise before it is owned
            queue = cls.__new__(cls)
            queue._setup(handle, end.geometry, None, end)
        return queue

    @classmethod
    def create_from_process_group(
        cls,
        pg: Any,
        max_chunk_bytes: int,
        max_chunks: int,
        writer_rank: int = 0,
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
        relay: bool = True,
        **options: Any,
    ) -> Self:
        """Builds a queue over a group: the writer's end on `writer_rank`, a reader's on all others.

        All ranks must call it with the same arguments; it returns when the queue is ready on all of
        them. Readers that see the writer's /dev/shm attach to its memory, the others over TCP. With
        `relay`, only the first reader on each remote host gets a stream, and relays it through
        shared memory.

        Args:
            pg: as for `memlane.in_the_same_node_as`.
            max_chunk_bytes, max_chunks: bytes of a chunk and number of chunks, as for
                `MessageQueue`, like all `options`.
            writer_rank: a position in the group; readers' ranks are positions, too.
            timeout: seconds for the whole call; by default that of a `TcpGroup`, 300 for others.
            relay: as for `MessageQueue`, but True by default.

        Raises:
            RankMissing: the ranks that it names did not call in time.
            GroupFailed: another rank failed, or the group itself. This rank's own error is raised
                unchanged. Nothing is left behind on any rank.
            InvalidArgument: there is no such rank.
        """
        return queue_over_group(
            pg,
            writer_rank,
            timeout,
            relays=relay,
            make=lambda readers: cls._for_readers(
                readers, max_chunk_bytes, max_chunks, relay=relay, **options
            ),
            attach=lambda handle, rank, left: cls.create_from_handle(handle, rank, timeout=left),
        )

    @classmethod
    def _for_readers(
        cls, readers: Readers, max_chunk_bytes: int, max_chunks: int, **options: Any
    ) -> Self:
        """The writer's end of a queue with these readers."""
        local = readers.local
        if readers.address is not None and options.get("connect_ip") is None:
            options["connect_ip"] = readers.address
        counts = readers.number, len(local), local or None
        queue = cls(*counts, max_chunk_bytes, max_chunks, **options)
        if readers.unshared:
            with undone_by(queue.close):
                cast("NetworkWriter", queue._writer).expect_unshared(readers.unshared)
        return queue

    def _setup(
        self,
        handle: Handle,
        geometry: RingGeometry | None,
        writer: WriterEnd | None,
        reader: ReaderEnd | None,
        has_late_readers: bool = False,
    ) -> None:
        self.handle = handle
        self.n_local_reader = len(handle.local_reader_ranks)
        self.n_remote_reader = handle.n_remote_reader
        self.local_socket = None
        self._geometry = geometry
        self._writer = writer
        self._reader = reader
        self._send = _send_of_a_reader if writer is None else writer.send
        self._sending = None if writer is None else writer.sending
        self._receive = _receive_of_a_writer if reader is None else reader.receive
        self._ring: Any = reader.native if type(reader) is LocalReader else None
        end = writer or reader
        if writer is not None:
            if (ring := writer.segment) is not None and geometry is not None:
                handle._note_ring(geometry, ring.name)
            keys = writer.secrets_for(None)
            handle._note_places(keys, ring, by_file=has_late_readers)
        self._is_writer = writer is not None
        self._is_local_reader = reader is not None and reader.segment is not None
        self._is_remote_reader = reader is not None and reader.segment is None
        if end is not None:
            self._own(end.abandon)

    def _abandon(self) -> None:
        if self._door is not None:
            self._door.close()
        super()._abandon()

    # Both ends ------------------------------------------------------------------------------

    @property
    def _end(self) -> End:
        end = self._reader if self._writer is None else self._writer
        if end is None:
            raise Closed("this queue was never opened")
        return end

    @property
    def name(self) -> str:
        """The queue's name. Either end may set it; kept in the ring, and in the handles that are
        exported from then on, which tell readers on other hosts."""
        return self._end.label

    @name.setter
    def name(self, name: str) -> None:
        self._end.label = self.handle.name = checked_label(name)

    @property
    def buffer(self) -> ShmRingBuffer | None:
        """The ring, to inspect its bytes; None without one. Closing it closes the queue."""
        segment = self._end.segment
        if segment is None or self._geometry is None:
            return None
        return ShmRingBuffer._of_queue(self._geometry, segment, self.close)

    @property
    def remote_socket(self) -> zmq.Socket[bytes] | None:
        """The socket to other hosts, or None. memlane uses it: do not send, receive or close."""
        return self._end.socket

    @property
    def current_idx(self) -> int:
        """Index of the next message's chunk; -1 without a ring, or with `mode="latest"`, where it
        is not known before."""
        segment = self._end.segment
        if self._geometry is None or segment is None or segment.is_latest:
            return -1
        return self._end.position % self._geometry.max_chunks

    @property
    def local_reader_rank(self) -> int:
        """This reader's position in `local_reader_ranks`; -1 on the writer and remote readers."""
        ranks, reader = self.handle.local_reader_ranks, self._reader
        return -1 if reader is None or reader.rank not in ranks else ranks.index(reader.rank)

    def wait_until_ready(
        self, timeout: float | None = None, *, processes: Iterable[object] | None = None
    ) -> None:
        """Returns when the writer and all readers have attached.

        On the writer it also removes the segment's name; after that, nothing can be left behind.

        Args:
            processes: those that you have started for it on this host, as objects with `pid`, or
                pids: one that ends before it attaches is then reported, and not waited for.

        Raises:
            TimedOut: after `timeout` seconds; it names the missing readers.
            PeerDied: the writer or a reader has died. ReaderDied, with `rank` None and an
                `exitcode`: one of `processes` ended before it attached.
            LayoutMismatch: a reader on another host speaks another version of the protocol.
            Unsupported: `processes` on a reader, and there are readers on other hosts: only the
                writer knows which processes those are.
        """
        end = self._end
        if processes is None:
            end.wait_until_ready(timeout)
        elif self._writer is not None:
            self._writer.wait_for_processes(timeout, processes)
        elif not self.n_remote_reader and isinstance(end, LocalReader):
            end.wait_for_processes(timeout, processes)
        else:
            raise Unsupported(
                "processes= on a reader is for queues whose readers are all on one host: only the "
                "writer knows which processes have attached elsewhere"
            )

    def broadcast_object(self, obj: M | None = None) -> M:
        """Writer: enqueues `obj` and returns it. Reader: returns the next object.

        Raises as `enqueue` and `dequeue`.
        """
        if self._is_writer:
            message = cast(M, obj)  # it may be None, of a queue of Nones
            self.enqueue(message)
            return message
        return self.dequeue()

    def statistics(self) -> QueueStatistics:
        """Counters of this process and the state of every reader (a remote reader: its own only).

        Raises:
            Closed: this queue was closed.
        """
        return self._end.statistics()

    def close(self, timeout: float | None = None) -> None:
        """Closes the queue in this process and tells the peers. Idempotent, from any thread.

        A writer waits until remote readers have everything, at most `timeout` seconds, and at most
        `remote_liveness` without progress. Then it raises `TimedOut`, which names the live readers
        that may not have received everything. It does not wait for local readers: attached ones
        get what is still queued, then `WriterClosed`; others can no longer attach.

        The writer no longer waits for a closed reader. A call blocked in another thread raises
        `Closed`. Everything is freed, but a reader's views stay mapped, and may change.
        """
        seconds_of(timeout)  # an invalid timeout closes nothing
        self._is_closed = True
        if self._door is not None:
            self._door.close()
        try:
            self._end.close(timeout)
        except TimedOut:  # it is closed all the same
            self._disown()
            raise
        self._disown()

    def __repr__(self) -> str:
        role = "writer" if self._reader is None else f"reader {self._reader.rank}"
        closed = " closed" if self._is_closed else ""
        return (
            f"<MessageQueue {self.handle.queue_id[:8]} {role}{closed}, "
            f"readers {self.handle.local_reader_ranks}>"
        )

    # The writer -----------------------------------------------------------------------------

    def _must_be_writer(self, call: str) -> WriterEnd:
        if self._writer is None:
            raise _not_the_writer(call)
        return self._writer

    def export_handle(self, rank: int | None = None) -> Handle:
        """The handle that readers attach with; with `rank`, only that reader can.

        Raises:
            WrongRole: this is a reader.
            InvalidArgument: the queue has no such reader, or its place is free: use `readmit`.
            Closed: this queue was closed.
        """
        writer = self._must_be_writer("export_handle")
        writer.check()
        rank = None if rank is None else checked_rank(rank)
        return self.handle._exported(rank, writer.secrets_for(rank), writer.segment)

    def enqueue(self, obj: M, timeout: float | None = None) -> None:
        """Sends `obj` to all readers; blocks while the ring or a remote window is full, and while
        /dev/shm is full and a reader has messages left to read. Never with `mode="latest"`.

        Raises:
            TimedOut: after `timeout` seconds; it names the readers that are behind.
            ReaderDied: a reader died, until `release_reader` is called for it.
            LayoutMismatch: as `wait_until_ready`, until `release_reader` is called for it.
            ShmExhausted: /dev/shm has no space for it, and every reader has read everything. It
                names the readers that keep arrays or views.
            InvalidType: msgpack lacks its type, or it cannot be pickled; then the error is also of
                the type that pickle raised, such as `pickle.PicklingError`.
            Closed: this queue was closed.

        If it raises, nothing was sent: what a signal handler raises after that is raised in your
        code, once the call has returned. A message that is sent a second or more after every reader
        has closed logs a warning, once.
        """
        send = self._send  # a local variable is called faster than an attribute
        try:
            send(obj, timeout)
        except BaseException as error:
            if self._sending is None or not self._sending.has_sent:
                raise
            after_return.error = error  # no call, after which another handler could run

    _enqueue = enqueue

    def acquire_write(self, timeout: float | None = None) -> AbstractContextManager[memoryview]:
        """A `with` block on the whole next chunk; leaving it publishes the chunk.

        Read it by `acquire_read`; `dequeue` and remote readers raise `CorruptMessage`. Each block
        takes `max_chunk_bytes` of /dev/shm. `timeout` is in seconds. Raises as `enqueue`, and
        `Unsupported` if all readers are on other hosts. Nothing is published if the block raises,
        or if a slice outlives it (`ViewInUse`). With `mode="latest"` it raises `ViewInUse` if
        views keep every chunk that is free.
        """
        return self._must_be_writer("acquire_write").block(self, timeout)

    def release_reader(self, rank: int) -> None:
        """Stops waiting for a reader that died or never attached; its place is closed until
        `readmit` opens it again. A process that has begun to end is waited for, a second at most.

        Raises:
            InvalidArgument: there is no such reader, or it is alive, even if stopped or slow.
        """
        self._must_be_writer("release_reader").release_reader(integer("rank", rank))

    def readmit(self, rank: int) -> Handle:
        """Opens the place of a reader that has closed or was released: one new process takes it by
        the returned handle and the same rank, and gets every message from the next one on (of the
        latest: the latest of those).

        It attaches also if `wait_until_ready` has removed the segment's name; it must then be of
        the same user and pid namespace. To wait for it, call `wait_until_ready` again, here: that
        of other readers may return at once. What a former reader keeps lent stays as it is.

        Raises:
            WrongRole: this is a reader.
            InvalidArgument: there is no such reader, or it has not ended: call `release_reader`
                first for one that has died.
            Closed: this queue was closed.
        """
        writer, rank = self._must_be_writer("readmit"), checked_rank(rank)
        writer.readmit(rank)
        keys = writer.secrets_for(None)
        self.handle._note_places(keys, writer.segment, by_file=True)
        return self.export_handle(rank)

    # A reader -------------------------------------------------------------------------------

    def _must_be_reader(self, call: str) -> ReaderEnd:
        if self._reader is None:
            raise _not_a_reader(call)
        return self._reader

    def dequeue(
        self,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        *,
        lend: bool = True,
    ) -> M:
        """Returns the next object, which then belongs to you.

        With `lend`, arrays and tensors of 1 MiB and more are not copied: they are private, writable
        memory, which the writer reuses once you drop all of them. A fork or `close()` copies them.
        A waiting message takes precedence over `cancel`, and `cancel` over the timeout.
        `timeout=0` polls.

        Raises:
            TimedOut: after `timeout` seconds; nothing is consumed.
            Cancelled: `cancel` was set (noticed within 100 ms).
            WriterDied: after all its messages. ReaderGivenUp: it goes on without this reader.
            WriterClosed: the writer has closed, and everything has been read.
            Closed: this queue was closed.
            ViewInUse: a view of an older message still holds the next message's chunk.
            OutOfMemory: there is no memory for the message; the next call gets it again, as after
                a KeyboardInterrupt or SystemExit (of the latest: perhaps a later one).
            CorruptMessage, or whatever else decoding raises: the message has been consumed.
        """
        if (ring := self._ring) is not None:
            message: M = ring[timeout, cancel, lend]  # as `LocalReader.receive`, one call less
        else:
            message = self._receive(timeout, cancel, lend)
        return message

    def dequeue_view(
        self, timeout: float | None = None, cancel: threading.Event | None = None
    ) -> AbstractContextManager[M]:
        """A `with` block on the next object; arrays of 4 KiB and more are read-only shared memory.

        The chunk stays in use until the last array, slice or buffer of it is dropped. If anything
        but the name of `with ... as name` refers to one when the block ends, leaving it raises
        `ViewInUse`, which names the object's type. You may keep everything else, which is private:
        smaller arrays, tensors, and all that a remote reader gets over its own connection.

        Views do not keep the chunk once their reader has closed, or in a forked child: they stay
        mapped, but may change, or cause SIGBUS where /dev/shm is full. `timeout` is in seconds.
        Raises as `dequeue`.
        """
        return self._must_be_reader("dequeue_view").view(self, timeout, cancel)

    def acquire_read(
        self, timeout: float | None = None, cancel: threading.Event | None = None
    ) -> AbstractContextManager[memoryview]:
        """A `with` block on the raw next chunk (`max_chunk_bytes`); leaving it releases the chunk.

        `timeout` is in seconds. Raises as `dequeue`, and `WrongRole` for a reader on another host.
        Leaving the block raises `ViewInUse` while a slice is still referenced; the chunk is freed
        with that slice.
        """
        return self._must_be_reader("acquire_read").block(self, timeout, cancel)

    @property
    def skipped(self) -> int:
        """Number of messages that this reader did not get, because it took a later one: 0 unless
        the queue has `mode="latest"`.

        Raises:
            WrongRole: this is the writer; its `statistics()` have those of all readers.
            Closed: this queue was closed.
        """
        reader = self._must_be_reader("skip messages")
        reader.check()
        return reader.native.skipped if isinstance(reader, LocalReader) else 0

    if not TYPE_CHECKING:  # which say by themselves that there is no such attribute
        get = _Habit("dequeue()")
        get_nowait = _Habit("dequeue(timeout=0), which raises TimedOut if there is no message")
        put = _Habit("enqueue()")
        put_nowait = _Habit("enqueue(obj, timeout=0), which raises TimedOut if the queue is full")
        qsize = _Habit("statistics(), whose `readers` say how many messages each is `behind`")
        empty = _Habit("dequeue(timeout=0), which raises TimedOut if there is no message")

    @staticmethod
    def recv(socket: zmq.Socket[bytes], timeout: float | None = None) -> Any:
        """Returns one pickled object from a ZeroMQ socket that the caller trusts; leaves the
        socket's options as they are.

        Unpickling runs any code the sender wants: never use it on a socket that others can reach.

        Raises:
            TimedOut: nothing came within `timeout` seconds.
            Exception: whatever unpickling raises.
        """
        seconds = seconds_of(timeout)
        # ZeroMQ takes milliseconds as a 32-bit int, so 24 days at most.
        if not socket.poll(None if seconds == inf else ceil(min(seconds * 1000, 0x7FFFFFFF))):
            raise TimedOut(f"no message on the socket within {timeout} s", timeout)
        return pickle.loads(socket.recv())
