"""Finds who is stuck in an engine with a ring of its own: stock vLLM, SGLang, and what copied them.

Their ring lies in a file of shared memory and says little: a flag `written` and a flag for each
reader of each chunk, no pids and no times. So it is watched for a while, and two cases are told
apart:

* the ring is full: the flags say which reader has not read, and nothing changes while watched;
* it is not: the one who waits then waits for an answer, and only stacks say for whose.

Which process is which reader is an inference, from process titles or else from the order in which
the processes were started.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from memlane._base import processes
from memlane._base.processes import State
from memlane.errors import InvalidArgument
from memlane.inspect.decisions import ALL_INSIDE, UNDECIDED
from memlane.inspect.foreign.files import KINDS
from memlane.inspect.segment import FOLDER, held_files, open_to_read
from memlane.inspect.stacks import Frame, NoStack, Stack

_PREFIXES = tuple(kind.prefix for kind in KINDS if kind.is_ring)
_MIB = 1 << 20
_MOST_READERS = 4096
_CHUNKS_VARIABLE = "VLLM_MQ_MAX_CHUNK_BYTES_MB"
# (bytes of a chunk, chunks) as engines of today create their rings.
_KNOWN = ((16 * _MIB, 10), (10 * _MIB, 10), (24 * _MIB, 10), (4 * _MIB, 6))
_ANSWERS = ((10 * _MIB, 1), (24 * _MIB, 1))  # (bytes of a chunk, readers): a worker writes
_ARENA = (256 * _MIB, 8)  # vLLM 0.33's memory for tensors: the same flags, and no ring

_RING_FILES = ("shm_broadcast.py",)
_READING = ("dequeue", "acquire_read")
_LOOP = "worker_busy_loop"  # of vLLM's workers: a read in it waits for the next step
_WORKER = re.compile(r"Worker((?:_[A-Z]*\d+)+)")


@dataclass(frozen=True)
class Geometry:
    """A ring's bytes per chunk, readers, and chunks."""

    chunk_bytes: int
    n_reader: int
    max_chunks: int

    @property
    def size(self) -> int:
        return (self.chunk_bytes + 1 + self.n_reader) * self.max_chunks


def geometry_of(text: str) -> Geometry:
    """Parses a user's `CHUNK_BYTES,READERS,CHUNKS`.

    Raises:
        InvalidArgument: it is none.
    """
    match = re.fullmatch(r"(\d+),(\d+),(\d+)", text)
    if match is None or 0 in (numbers := [int(number) for number in match.groups()]):
        raise InvalidArgument(f"a geometry is CHUNK_BYTES,READERS,CHUNKS, not {text!r}")
    return Geometry(*numbers)


def candidates(size: int, environment: Mapping[str, str] = os.environ) -> list[Geometry]:
    """The rings that a file of this size can be, those that engines of today create first."""
    chunk, chunks = _ARENA
    if _fits(size, chunk, chunks) is not None:
        return []
    known = list(_KNOWN)
    with suppress(ValueError):
        known.insert(0, (int(environment.get(_CHUNKS_VARIABLE, "")) * _MIB, 10))
    for chunks in (10, 6):  # chunks of whole MiB
        known.append((size // chunks // _MIB * _MIB, chunks))
    found = [_fits(size, chunk, chunks) for chunk, chunks in known if chunk > 0]
    return list(dict.fromkeys(geometry for geometry in found if geometry is not None))


def _fits(size: int, chunk: int, chunks: int) -> Geometry | None:
    n_reader = size // chunks - chunk - 1
    if size % chunks or not 1 <= n_reader <= _MOST_READERS:
        return None
    return Geometry(chunk, n_reader, chunks)


@dataclass(frozen=True)
class Flags:
    """All flags of a ring at one moment: for each chunk `written` and who has read it."""

    written: tuple[bool, ...]
    read: tuple[tuple[bool, ...], ...]

    @property
    def is_full(self) -> bool:
        """Every chunk has a message that somebody has not read."""
        return all(self.written) and not any(all(readers) for readers in self.read)


def flags_in(data: bytes, geometry: Geometry) -> Flags | None:
    """Returns the flags; None if a byte is neither 0 nor 1, so these are no flags."""
    if len(data) != (1 + geometry.n_reader) * geometry.max_chunks or data.strip(b"\0\1"):
        return None
    rows = [
        data[at : at + 1 + geometry.n_reader] for at in range(0, len(data), 1 + geometry.n_reader)
    ]
    read = tuple(tuple(flag == 1 for flag in row[1:]) for row in rows)
    return Flags(tuple(row[0] == 1 for row in rows), read)


@dataclass(frozen=True)
class Ring:
    """A ring that processes have mapped, as it was watched.

    Attributes:
        name: of its file in /dev/shm.
        geometry: as guessed from its size and flags, or given.
        pids: the processes that map it.
        flags: as they are.
    """

    name: str
    geometry: Geometry
    pids: tuple[int, ...]
    flags: Flags


@dataclass(frozen=True)
class Process:
    """A process that maps a ring, and what it does."""

    pid: int
    title: str
    state: State
    started: int  # clock ticks
    stack: Stack | NoStack


@dataclass(frozen=True)
class Suspect:
    """A process that is waited for.

    Attributes:
        reader: its index, or None if it is waited for as a writer.
        pid: None if nobody maps the ring for that reader any more.
        title: of the process.
        state: of the process.
        unread: chunks that it has not read.
        frames: of its main thread, the innermost first.
        no_stack: why there are none.
    """

    reader: int | None
    pid: int | None
    title: str
    state: State
    unread: int
    frames: tuple[str, ...] = ()
    no_stack: str | None = None


@dataclass(frozen=True)
class ForeignWait:
    """Somebody waits in an engine's own ring.

    Attributes:
        segment: the file's name.
        reason: `no free chunk`, or `no answer`.
        waiter: pid and title of who waits, as far as it can be told.
        watched: seconds for which nothing changed.
        awaited: for whom.
        advice: what to do, in one sentence.
        is_decided: the first of the awaited is the cause; else it is one of them.
    """

    segment: str
    reason: str
    waiter: tuple[int, str] | None
    watched: float
    awaited: tuple[Suspect, ...]
    advice: str
    is_decided: bool = True


@dataclass(frozen=True)
class Quiet:
    """Rings of an engine that did not change while watched, though nobody is seen to wait in one.

    Attributes:
        rings: the names of their files.
        processes: those that map them.
    """

    rings: tuple[str, ...]
    processes: tuple[Process, ...]


# Looking ----------------------------------------------------------------------------------------


def stuck(
    watched: float,
    stacks: Callable[[Mapping[int, int]], Mapping[int, Stack | NoStack]],
    geometry: Geometry | None = None,
) -> tuple[list[ForeignWait], list[Quiet], set[int]]:
    """Watches the rings of this user's engines; the waits, the engines in which nothing moves, and
    the processes of those in which something does.

    Args:
        watched: seconds between the two looks.
        stacks: of processes, by pid, from the clock ticks at which they were started; called once,
            for all whose rings have not changed while watched.
        geometry: of all rings of that size, instead of a guess.
    """
    before = _rings(geometry)
    if not before:
        return [], [], set()
    time.sleep(watched)
    after = {ring.name: ring for ring in _rings(geometry)}
    rings = [
        Ring(ring.name, ring.geometry, after[ring.name].pids, ring.flags)
        for ring in before
        if ring.name in after and after[ring.name].flags == ring.flags
    ]
    pids = sorted({pid for ring in rings for pid in ring.pids})
    found = {pid: processes.status(pid) for pid in pids}
    started = {pid: ticks for pid, (_, ticks) in found.items() if ticks is not None}
    seen = stacks(started)
    by_pid = {
        pid: Process(pid, processes.name_of(pid), found[pid][0], ticks, seen[pid])
        for pid, ticks in started.items()
    }
    same = {ring.name for ring in rings}
    moving = {pid for name, ring in after.items() if name not in same for pid in ring.pids}
    return *decide(rings, by_pid, watched), moving


def _rings(geometry: Geometry | None) -> list[Ring]:
    """The rings of this user, with their flags of now. Other users' files may have the same names:
    in a mount of their own."""
    found: dict[tuple[int, int], tuple[str, list[processes.Holder]]] = {}
    for path, holder in held_files():
        name = path.removesuffix(" (deleted)").removeprefix(f"{FOLDER}/")
        if name.startswith(_PREFIXES) and holder.mapped is not None:
            found.setdefault(holder.mapped, (name, []))[1].append(holder)
    rings = []
    for mapped, (name, holders) in sorted(found.items(), key=lambda each: each[1][0]):
        pids = sorted({holder.pid for holder in holders})
        holders.sort(key=lambda holder: not holder.is_open)
        for path in (holders[0].path, f"{FOLDER}/{name}"):  # only root may follow a mapping
            with suppress(OSError):  # gone, or of another /dev/shm
                if (ring := _ring(name, path, mapped, pids, geometry)) is not None:
                    rings.append(ring)
                    break
    return rings


def _ring(
    name: str, path: str, mapped: tuple[int, int], pids: Sequence[int], given: Geometry | None
) -> Ring | None:
    """Returns the ring; None if the file at `path` is not the mapped one, not this user's or no
    ring."""
    file = open_to_read(path)
    try:
        facts = os.fstat(file)
        if (facts.st_dev, facts.st_ino) != mapped or facts.st_uid != os.geteuid():
            return None
        choices = candidates(facts.st_size)
        if given is not None and given.size == facts.st_size:
            choices = [given]
        # As many readers as there are processes beside the writer is the likeliest.
        choices.sort(key=lambda choice: choice.n_reader != len(pids) - 1)
        for choice in choices:
            start = choice.chunk_bytes * choice.max_chunks
            flags = flags_in(os.pread(file, facts.st_size - start, start), choice)
            if flags is not None:
                return Ring(name, choice, tuple(pids), flags)
    finally:
        os.close(file)
    return None


# Deciding ---------------------------------------------------------------------------------------


def decide(
    rings: Iterable[Ring], by_pid: Mapping[int, Process], watched: float
) -> tuple[list[ForeignWait], list[Quiet]]:
    """The waits in rings that did not change while watched, and the rings without a wait."""
    waits: list[ForeignWait] = []
    without: list[Quiet] = []
    quiet: list[Ring] = []
    for ring in rings:
        if ring.flags.is_full:
            waits.append(_full(ring, by_pid, watched))
        else:
            quiet.append(ring)
    blamed = {who.pid for wait in waits for who in wait.awaited}
    for group in _groups(quiet):
        members = [by_pid[pid] for pid in _pids(group) if pid in by_pid]
        if blamed & {who.pid for who in members}:
            continue
        wait = _answer(group, by_pid, members, watched)
        if wait is not None:
            waits.append(wait)
        else:
            without.append(Quiet(tuple(ring.name for ring in group), tuple(members)))
    return waits, without


def _pids(rings: Iterable[Ring]) -> list[int]:
    return sorted({pid for ring in rings for pid in ring.pids})


def _groups(rings: Iterable[Ring]) -> list[list[Ring]]:
    """Rings that belong together because a process maps both."""
    groups: list[list[Ring]] = []
    for ring in rings:
        joined = [group for group in groups if any(set(ring.pids) & set(o.pids) for o in group)]
        groups = [group for group in groups if group not in joined]
        groups.append([*(other for group in joined for other in group), ring])
    return groups


def _counts(ring: Ring) -> list[int]:
    """Returns for each reader the chunks with a message that it has not read."""
    flags = ring.flags
    return [
        sum(
            written and not read[reader]
            for written, read in zip(flags.written, flags.read, strict=True)
        )
        for reader in range(ring.geometry.n_reader)
    ]


def _full(ring: Ring, by_pid: Mapping[int, Process], watched: float) -> ForeignWait:
    """The writer waits for the reader that has read least."""
    counts = _counts(ring)
    behind = [reader for reader, count in enumerate(counts) if count == max(counts)]
    writer, readers = _places(ring, by_pid, behind)
    awaited = tuple(_suspect(readers.get(reader), reader, counts[reader]) for reader in behind)
    waiter = None if writer is None else (writer.pid, writer.title)
    gone = next((who for who in awaited if who.pid is None), awaited[0])
    return ForeignWait(ring.name, "no free chunk", waiter, watched, awaited, _advice(gone))


def _places(
    ring: Ring, by_pid: Mapping[int, Process], behind: Sequence[int]
) -> tuple[Process | None, dict[int, Process]]:
    """The writer's pid, and the readers' by place: by the titles of workers, else by the order of
    start."""
    group = [by_pid[pid] for pid in ring.pids if pid in by_pid]
    workers = sorted((who for who in group if _ranks_in(who.title)), key=_order)
    others = sorted((who for who in group if not _ranks_in(who.title)), key=_order)
    if workers and others and (ring.geometry.chunk_bytes, ring.geometry.n_reader) in _ANSWERS:
        return workers[0], {0: others[0]}
    by_rank = {_ranks_in(who.title)[-1]: who for who in workers}
    if len(by_rank) == len(workers) > 0:
        if others:
            return others[0], by_rank
        return by_rank.get(0), {rank - 1: who for rank, who in by_rank.items() if rank}
    ordered = [*others[:1], *workers, *others[1:]]
    first, rest = next(iter(ordered), None), ordered[1:]
    lost = ring.geometry.n_reader - len(rest)
    # The dead cannot have read: if that explains who is behind, the others are the rest.
    readers = range(ring.geometry.n_reader)
    places = [reader for reader in readers if lost != len(behind) or reader not in behind]
    return first, dict(zip(places, rest, strict=False))


def _order(who: Process) -> tuple[tuple[int, ...], int, int]:
    return _ranks_in(who.title), who.started, who.pid


def _ranks_in(title: str) -> tuple[int, ...]:
    """
    >>> _ranks_in("VLLM::Worker_PP1_TP0"), _ranks_in("VLLM::Worker_TP1"), _ranks_in("EngineCore")
    ((1, 0), (1,), ())
    """
    match = _WORKER.search(title)
    return () if match is None else tuple(int(rank) for rank in re.findall(r"\d+", match[1]))


def _suspect(who: Process | None, reader: int | None, unread: int) -> Suspect:
    if who is None:
        return Suspect(reader, None, "", "dead", unread)
    if isinstance(who.stack, NoStack):
        return Suspect(reader, who.pid, who.title, who.state, unread, (), who.stack.reason)
    frames = tuple(str(frame) for frame in who.stack.main)
    return Suspect(reader, who.pid, who.title, who.state, unread, frames)


def _answer(
    rings: Sequence[Ring], by_pid: Mapping[int, Process], members: Sequence[Process], watched: float
) -> ForeignWait | None:
    """Somebody reads, not as a worker between two steps, and others do not: those are to answer."""
    asking = [who for who in members if _reads(who) and not _is_idle_worker(who)]
    busy = [who for who in members if who.state == "stopped" or _is_elsewhere(who)]
    busy.sort(key=lambda who: (who.state != "stopped", _is_inside(who), who.pid))
    broadcast = max(rings, key=lambda ring: (len(ring.pids), ring.geometry.n_reader))
    counts = dict[int | None, int](enumerate(_counts(broadcast)))
    behind = [reader for reader, count in counts.items() if count and reader is not None]
    _, readers = _places(broadcast, by_pid, behind)
    reader_of = {who.pid: reader for reader, who in readers.items()}
    awaited = []
    for who in busy:
        reader = reader_of.get(who.pid)
        awaited.append(_suspect(who, reader, counts.get(reader, 0)))
    awaited += [
        _suspect(None, reader, counts[reader]) for reader in behind if reader not in readers
    ]
    if not asking or not awaited:
        return None
    waiter = (asking[0].pid, asking[0].title)
    told = _advice(awaited[0])
    suspects = [who for who in busy if not _is_inside(who)]
    is_decided = len(suspects) == 1 or len(awaited) == 1 or awaited[0].state in ("stopped", "dead")
    if not is_decided:
        told = UNDECIDED if suspects else ALL_INSIDE
    return ForeignWait(
        rings[0].name, "no answer", waiter, watched, tuple(awaited), told, is_decided
    )


def _is_inside(who: Process) -> bool:
    """Returns whether it waits for other workers, in a collective."""
    return isinstance(who.stack, Stack) and who.stack.waits_for_peers


def _reads(who: Process) -> bool:
    """Returns whether it runs, and a thread is in a read of a ring."""
    return who.state != "stopped" and any(_is_read(thread) for thread in _stacks(who))


def _is_elsewhere(who: Process) -> bool:
    return bool(_stacks(who)) and not _reads(who)


def _is_idle_worker(who: Process) -> bool:
    """Returns whether its only reads are those that wait for the next step."""
    return all(
        any(frame.name.rpartition(".")[2] == _LOOP for frame in thread)
        for thread in _stacks(who)
        if _is_read(thread)
    )


def _stacks(who: Process) -> list[tuple[Frame, ...]]:
    if isinstance(who.stack, NoStack):
        return []
    return [thread.frames for thread in who.stack.threads]


def _is_read(frames: Sequence[Frame]) -> bool:
    return any(
        frame.name.rpartition(".")[2] in _READING and os.path.basename(frame.file) in _RING_FILES
        for frame in frames
    )


def _advice(who: Suspect) -> str:
    if who.pid is None:
        return f"Nobody maps this ring for reader {who.reader} any more: restart the engine."
    if who.state == "stopped":
        return f"Process {who.pid} is stopped: `kill -CONT {who.pid}` resumes it."
    return f"Process {who.pid} is the likely culprit: its stack says where it is."
