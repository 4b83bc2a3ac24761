"""Finds segments, who holds them, and what they say."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from memlane._base import processes
from memlane._base.blame import Activity
from memlane._base.processes import Holder
from memlane._base.slots import Presence, Slot, State, own_pid_namespace, state_of, text_in
from memlane._base.tier_counters import TIER_TIMES
from memlane.errors import system_fault
from memlane.inspect import layout, locks
from memlane.inspect.layout import Header, Unreadable
from memlane.inspect.locks import RegionLocks

FOLDER = "/dev/shm"
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_PLACE = os.O_PATH | os.O_CLOEXEC
_PREFIX = "memlane-"
_REGION_PREFIX = "vllm_offload_"
_REGION_FILE = "memlane"  # in a folder of that name, with MEMLANE_VLLM=region
_is_doubting = False  # see doubt_slots
_elsewhere: Elsewhere | None = None  # see look_into
_SEARCHED_SINCE = 60.0  # seconds after which each look at a file knows who holds it

Kind = Literal["queue", "ring", "store", "region", "tier", "unknown"]


@dataclass(frozen=True)
class Deliveries:
    """The time that a reader's messages took from being published to being taken, copied: of
    the first message after each tick of the kernel's coarse clock (every 4 ms, mostly).

    Attributes:
        seconds: of all of them together.
        counts: how many took less than 1 us, at least that and less than 2 us, then 4 us, and so on
            in powers of two; the last has all that took longer.
    """

    seconds: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Participant:
    """A process in its slot of a segment. Times are on the clock of `time.monotonic()`.

    Attributes:
        role: `writer`, `reader`, or `holder` of an offload region.
        rank: a queue's reader's, as in its handle; a store's reader's number; else None.
        pid: None while absent.
        started: when its process was started, in seconds since 1970, or None.
        state: `dead` if nobody holds its lock; `closed` also after `release_reader`; `unknown` if
            it lives where /proc does not show it (another pid namespace); `lost` if it is on
            another host, and its connection is gone.
        position: messages published or taken.
        behind: published messages that it has yet to take, of the latest at most 1; of a writer 0.
        last_progress: time of its last message, or of attaching or closing; None if unknown.
        activity: `waiting` for a message or for a free chunk, `attaching` in `wait_until_ready`,
            `in_block` of `acquire_read` or `acquire_write`, `copying` a message in after encoding
            it, `decoding` one after copying it out, or `elsewhere`: not in memlane.
        activity_since: when that began, while copying or decoding when that was first seen; None
            while elsewhere, or unknown.
        views: messages or objects that it keeps for views.
        views_since: when it took the oldest of them, or None.
        bytes: of its messages, as encoded.
        waits: calls that had to wait.
        extents: messages of a writer that did not fit a chunk.
        pinned: objects of a store that it reads now, or keeps views of.
        owed: stored objects that it has not read as often as they were put.
        lent: bytes that cannot be reused because of its views: a queue's chunks, whole, and
            extents; a store's pinned objects.
        skipped: of a reader of the latest message: those that it did not get.
        deliveries: of a queue's reader, else None.
        start_ticks: as `started`, in clock ticks since boot, which /proc shows of its process.
        address: of one on another host: where it is, empty before it attaches; None: it is here.
            What is said of it is then what its peer here knows.
        doing: of one on another host: words for its state.
    """

    role: Literal["writer", "reader", "holder"]
    rank: int | None
    pid: int | None
    started: float | None
    state: State | Literal["lost"]
    position: int = 0
    behind: int = 0
    last_progress: float | None = None
    activity: Activity = "elsewhere"
    activity_since: float | None = None
    views: int = 0
    views_since: float | None = None
    bytes: int = 0
    waits: int = 0
    extents: int = 0
    pinned: int = 0
    owed: int = 0
    lent: int = 0
    skipped: int = 0
    deliveries: Deliveries | None = None
    start_ticks: int | None = None
    address: str | None = None
    doing: tuple[str, ...] = ()

    @property
    def is_remote(self) -> bool:
        """True if it is on another host; its pid is of that one."""
        return self.address is not None


@dataclass(frozen=True)
class Segment:
    """A segment: of a queue, a ring of bytes, a store, or an offload region.

    Attributes:
        name: the file's name in /dev/shm, even if it has been removed already; of a region of vLLM
            on memlane `NAME.mmap/memlane`.
        kind: `unknown` if its bytes cannot be read; `problem` then says why.
        is_named: whether the name is still in /dev/shm.
        mode: of a queue, as `MessageQueue` takes it; else None.
        has_late_readers: a queue's readers come when they like.
        is_leftover: it is named, and no process holds it: its processes have died.
        pids: processes of this user, in this pid namespace, that have it open.
        keepers: those that only have it mapped: arrays or views that outlive their queue.
        size: bytes of the file.
        used: bytes of /dev/shm that it takes.
        created: when its size was last set, in seconds since 1970.
        geometry: `n_reader`, `max_chunk_bytes`, `max_chunks` of a queue; `data_buffer_size`,
            `max_object_size`, `max_objects` of a store; `total_bytes`, `blocks`, `row_bytes`,
            `cell_bytes` of a region; `blocks`, `block_bytes` (0 of a pool) of a tier.
        counters: of a store: `objects`, `object_bytes`, `puts`, `hits`, `evictions`; of a pool or
            a disk tier those of `memlane._base.tier_counters`, which the page of the metrics lists.
        times: of a disk tier how long blocks took: `store_seconds` and `load_seconds`.
        absent_elsewhere: readers on other hosts that have not attached.
        participants: the writer first, then all readers; the holders of a region.
        problem: why the segment cannot be read, or None.
        unread: places of a queue's readers that have not read the chunk that its writer needs next.
        id: of the queue or store; of a queue the `queue_id` of its handle.
        answers_to: the id of the queue whose messages are answered in this one, or None.
        label: what people call it (`name=` of a queue, store, region, pool or tier), or empty.
    """

    name: str
    kind: Kind
    is_named: bool
    is_leftover: bool
    pids: tuple[int, ...]
    keepers: tuple[int, ...]
    size: int
    used: int
    created: float
    geometry: dict[str, int] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    times: dict[str, Deliveries] = field(default_factory=dict)
    absent_elsewhere: int = 0
    participants: tuple[Participant, ...] = ()
    problem: str | None = None
    mode: Literal["all", "latest"] | None = None
    has_late_readers: bool = False
    unread: tuple[int, ...] = ()
    id: str = ""
    answers_to: str | None = None
    label: str = ""


@dataclass
class Found:
    """A file that may be a segment: its names, a path that leads to it, and who holds it; `through`
    leads to it by a holder, once its name has been removed."""

    path: str
    names: set[str]
    is_named: bool
    pids: set[int]
    keepers: set[int]
    through: str = ""


@dataclass(frozen=True)
class Elsewhere:
    """The /dev/shm of a container, for a process that may not find out who holds what in it.

    Attributes:
        folder: a path that leads to it.
        holders: of its files, as `processes.holders_in` finds them.
        numbers: the pids that those processes have here, by pid namespace and pid there.
    """

    folder: str
    holders: list[tuple[str, Holder]]
    numbers: dict[tuple[int, int], int]


class Known:
    """Facts that looks need to find out only once: where a file's header is, and, of one look, how
    its processes fare."""

    def __init__(self) -> None:
        self.pid_namespace = own_pid_namespace()
        self._headers: dict[int, int] = {}
        self._without: dict[int, tuple[int, ...]] = {}  # what files without a header looked like
        self._statuses: dict[int, tuple[processes.State, int | None]] = {}
        self._begun: dict[tuple[int, int], tuple[int, float]] = {}

    def header_of(self, file: int) -> Header | None:
        """Raises Unreadable as `layout.header_of`."""
        facts = os.fstat(file)
        inode, header = facts.st_ino, None
        if inode in self._headers:
            header = layout.header_at(file, self._headers[inode])
        # A segment gets its name when its header is there, which changes the time of its inode.
        looks = (facts.st_size, facts.st_blocks, facts.st_ctime_ns)
        if header is None and self._without.get(inode) != looks:
            header = layout.header_of(file)
        if header is not None:
            self._headers[inode] = header.offset
        else:
            self._without[inode] = looks
        return header

    def status(self, pid: int) -> tuple[processes.State, int | None]:
        """Returns what `processes.status` does, read once for each look."""
        if pid not in self._statuses:
            self._statuses[pid] = processes.status(pid)
        return self._statuses[pid]

    def since(self, inode: int, number: int, slot: Slot) -> float | None:
        """Since when a participant does what it does; for what the slot has no time of (copying and
        decoding), since when these looks have seen it do that with the same message."""
        if slot.activity_since:
            return slot.activity_since / 1e9
        if slot.activity not in ("copying", "decoding"):
            self._begun.pop((inode, number), None)
            return None
        position, begun = self._begun.get((inode, number), (-1, 0.0))
        if position != slot.position:
            begun = time.monotonic()
            self._begun[inode, number] = (slot.position, begun)
        return begun

    def begin(self, inodes: set[int] | None = None) -> None:
        """Begins a new look, at those files, or at the same ones."""
        self._statuses.clear()
        if inodes is None:
            return
        self._begun = {key: each for key, each in self._begun.items() if key[0] in inodes}
        for known in (self._headers, self._without):
            for inode in known.keys() - inodes:
                del known[inode]


def doubt_slots() -> None:
    """From now on this process believes a slot's pid only of a process that holds the file: what it
    looks at is another user's, who may have written any number there."""
    global _is_doubting
    _is_doubting = True


def look_into(place: Elsewhere) -> None:
    """From now on this process looks into that /dev/shm instead of its own."""
    global _elsewhere
    _elsewhere = place


def _folder() -> str:
    return FOLDER if _elsewhere is None else _elsewhere.folder


def device() -> int:
    """That of the /dev/shm that this process looks into."""
    return os.stat(_folder()).st_dev


def held_files(pid: int | None = None) -> Iterable[tuple[str, Holder]]:
    """Returns what `processes.holders_in` finds in /dev/shm, of all processes or of that one."""
    if _elsewhere is None:
        return processes.holders_in(FOLDER, None if pid is None else [pid])
    return [each for each in _elsewhere.holders if pid in (None, each[1].pid)]


def _here(slot: Slot, known: Known) -> Slot:
    """The same with the pid that the process has here, if it is known to be that one."""
    if _elsewhere is None:
        return slot
    pid = _elsewhere.numbers.get((slot.pid_namespace, slot.pid))
    if pid is None or known.status(pid)[1] != slot.start_ticks:
        return slot
    return slot._replace(pid=pid, pid_namespace=known.pid_namespace)


def segments() -> list[Segment]:
    """All of this user's segments, sorted by name.

    Where /dev/shm may not be listed (mode 1733), only those that a process has open. Reads the
    files and /proc; takes no lock and changes nothing.

    Raises:
        SystemFault: there is no /dev/shm, or no /proc, which shows who has segments open.
    """
    seen, known = [], Known()
    for found in files():
        with opened(found) as file:
            if file is not None and (segment := look(file, found, known)) is not None:
                seen.append(segment)
    return sorted(joined(seen), key=lambda segment: segment.name)


def free_space() -> dict[str, int]:
    """Bytes of /dev/shm: `total`, `used` and `free`. Raises SystemFault if there is none."""
    try:
        facts = os.statvfs(_folder())
    except OSError as error:
        raise system_fault(error.errno or 0, f"cannot look at {FOLDER}") from None
    total, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    return {"total": total, "used": total - facts.f_bfree * facts.f_frsize, "free": free}


def leftovers() -> list[Segment]:
    """The segments that dead processes left; `memlane clean` and the next creation remove them.

    Raises:
        SystemFault: as `segments`.
    """
    return [segment for segment in segments() if segment.is_leftover]


def named_files() -> dict[int, Found]:
    """The `files` that have a name, by inode, without their holders."""
    found: dict[int, Found] = {}
    for name, inode in _named():
        path = f"{FOLDER}/{name}"
        found.setdefault(inode, Found(path, set(), True, set(), set())).names.add(name)
    return found


def files(pid: int | None = None) -> list[Found]:
    """The files of /dev/shm that may be segments, one for each file, whatever its names; with
    `pid`, those that this process holds."""
    if not os.path.exists("/proc/self/fd"):
        raise system_fault(errno.ENOENT, "cannot list the processes in /proc; mount it")
    found = named_files()
    own = device()
    for path, holder in held_files(pid):
        with suppress(OSError):  # closed meanwhile
            file = _stat_of(holder)
            if not _is_ours(file) or file.st_dev != own:  # else of another container
                continue
            name = path.removesuffix(" (deleted)").removeprefix(f"{FOLDER}/")
            entry = found.setdefault(file.st_ino, Found(holder.path, set(), False, set(), set()))
            (entry.pids if holder.is_open else entry.keepers).add(holder.pid)
            entry.names.add(name)
            entry.through = holder.path
            entry.is_named |= not path.endswith(" (deleted)")
    if pid is not None:
        return [each for each in found.values() if pid in each.pids | each.keepers]
    return list(found.values())


def _stat_of(holder: Holder) -> os.stat_result:
    return os.stat(holder.path)


def _is_ours(file: os.stat_result) -> bool:
    return stat.S_ISREG(file.st_mode) and file.st_uid == os.geteuid()


def _named() -> Iterator[tuple[str, int]]:
    """(name, inode) of the files in /dev/shm that are this user's; of a region in a folder, of the
    one in it, or of the folder, if it has none yet, or no more."""
    try:
        with os.scandir(_folder()) as entries:
            names = [entry.name for entry in entries]
    except PermissionError:
        return
    except OSError as error:
        raise system_fault(error.errno or 0, f"cannot list {FOLDER}") from None
    for name in names:
        with suppress(OSError):  # removed meanwhile
            facts = os.lstat(f"{_folder()}/{name}")
            if _is_ours(facts):
                yield name, facts.st_ino
            elif stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid():
                inside = _inode_in(name)
                if inside is not None:
                    yield f"{name}/{_REGION_FILE}", inside
                elif name.startswith(_REGION_PREFIX):
                    yield name, facts.st_ino


def _inode_in(folder: str) -> int | None:
    with suppress(OSError):
        file = _placed(f"{folder}/{_REGION_FILE}")
        try:
            facts = os.fstat(file)
            return facts.st_ino if _is_ours(facts) else None
        finally:
            os.close(file)
    return None


def _placed(name: str) -> int:
    """A descriptor of what has that name in /dev/shm, at most one folder deep, that opens nothing:
    no link is followed. Raises OSError."""
    folder, _, last = name.rpartition("/")
    above = os.open(f"{_folder()}/", _PLACE | os.O_DIRECTORY)
    try:
        if folder:
            within = os.open(folder, _PLACE | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=above)
            os.close(above)
            above = within
        return os.open(last, _PLACE | os.O_NOFOLLOW, dir_fd=above)
    finally:
        os.close(above)


def open_to_read(path: str) -> int:
    """A descriptor of a file or folder of /dev/shm, by its name or by who holds it. Other users may
    put a link, a pipe or a device there, of which some act on being opened: those are not.

    Raises:
        OSError: it is gone, or something else.
    """
    is_held = path.startswith("/proc/")
    place = os.open(path, _PLACE) if is_held else _placed(path.removeprefix(f"{FOLDER}/"))
    try:
        facts = os.fstat(place)
        is_plain = stat.S_ISREG(facts.st_mode) or stat.S_ISDIR(facts.st_mode)
        if not is_plain or facts.st_dev != device():
            raise OSError(errno.ENOENT, f"no file of {FOLDER}", path)
        return os.open(f"/proc/self/fd/{place}", _READ)
    finally:
        os.close(place)


@contextmanager
def opened(found: Found) -> Iterator[int | None]:
    """A descriptor for reading; None if the file is gone."""
    file = -1
    for path in filter(None, (found.path, found.through)):
        with suppress(OSError):
            file = open_to_read(path)
            break
    if file < 0:
        yield None
        return
    try:
        yield file
    finally:
        os.close(file)


def look(file: int, found: Found, known: Known) -> Segment | None:
    """Reads a file; returns None if it is no segment. Never raises: what cannot be read is reported
    as such."""
    facts = os.fstat(file)
    if not stat.S_ISDIR(facts.st_mode) and not _is_ours(facts):
        return None
    # A name that the creator chose, else memlane's own; `#7` is of a file that never had one.
    name = min(found.names, key=lambda name: ("#" in name, name.startswith(_PREFIX), name))
    is_held = True
    try:
        region = None if stat.S_ISDIR(facts.st_mode) else locks.region_of(file)
        is_held = region is not None or (stat.S_ISREG(facts.st_mode) and locks.is_held(file))
        what = _what(file, found, name, known, region, is_held)
    except Unreadable as error:
        what = {"kind": "unknown", "problem": str(error)}
    except Exception as error:  # the bytes and locks are others': nothing they are may end a look
        what = {"kind": "unknown", "problem": f"damaged, or cut meanwhile: {error!r}"}
    if what is None:
        return None
    if _is_doubting:
        what["participants"] = tuple(
            replace(who, state="unknown")
            if who.state in ("running", "stopped")
            and not who.is_remote
            and who.pid not in found.pids | found.keepers
            else who
            for who in what.get("participants", ())
        )
    is_left = found.is_named and not is_held
    return Segment(
        name=name,
        is_named=found.is_named,
        is_leftover=is_left and (what["kind"] != "region" or _is_abandoned(found, facts)),
        pids=tuple(sorted(found.pids)),
        keepers=tuple(sorted(found.keepers)),
        size=facts.st_size,
        used=facts.st_blocks * 512,
        created=facts.st_mtime,
        **what,
    )


def _what(
    file: int, found: Found, name: str, known: Known, region: RegionLocks | None, is_held: bool
) -> dict[str, Any] | None:
    """The kind of a segment, and what else its bytes and locks say, as arguments of `Segment`."""
    if region is not None:
        holders = tuple(_holder(pid, found, known) for pid in region.holders)
        numbers = asdict(region)
        del numbers["holders"], numbers["label"]
        said = {"geometry": numbers, "participants": holders, "label": region.label}
        return {"kind": "region", **said}
    if not is_held and not any(each.startswith(_PREFIX) for each in found.names):
        return {"kind": "region"} if name.startswith(_REGION_PREFIX) else None
    if not is_held and not found.is_named:
        return {"kind": "unknown", "problem": "closed; arrays or views keep it"}
    header = known.header_of(file)
    if header is None:
        return {"kind": "unknown", "problem": "no header: it is being created, or damaged"}
    store = layout.store_of(file, header) if header.kind == "store" else None
    slots = [_here(slot, known) for slot in layout.slots_of(file, header)]
    if header.kind == "peers":
        return _of_peers(file, header, slots, known)
    unread: tuple[int, ...] = ()
    if _mode(header) == "all":  # of the latest nobody waits to be read
        is_written, has_read = layout.flags_of(file, header, slots[0].position)
        unread = tuple(place for place, read in enumerate(has_read) if is_written and not read)
    return {
        "kind": header.kind,
        "geometry": _geometry(header, store),
        "mode": _mode(header),
        "has_late_readers": bool(header.features & layout.LATE_READERS),
        "counters": layout.tier_of(file, header) if header.kind == "tier" else _counters(store),
        "times": _times(file, header),
        "participants": _participants(file, header, slots, known),
        "absent_elsewhere": slots[0].absent_elsewhere if slots else 0,
        "unread": unread,
        "id": header.id.hex(),
        "answers_to": None if header.answers_to is None else header.answers_to.hex(),
        "label": header.label,
    }


_CONDITIONS: dict[int, State | Literal["lost"]] = {1: "lost", 2: "dead"}


def _of_peers(file: int, header: Header, slots: list[Slot], known: Known) -> dict[str, Any] | None:
    """The queue as an end with a network knows it; None if that end's process has ended, and a
    child of it keeps the table."""
    own = header.geometry[3]
    facts = layout.peers_of(file, header)
    state = state_of(slots[own], slots[own].presence, known.pid_namespace, known.status)
    if state == "unknown" and slots[own].pid_namespace in (0, known.pid_namespace):
        return None
    people = []
    for number, (slot, more) in enumerate(zip(slots, facts, strict=True)):
        since = slot.activity_since / 1e9 if slot.activity_since else None
        who = _participant(header, number, slot, slots[0], [], state, since, None)
        if number != own:
            presence: State = "running" if slot.presence == "attached" else slot.presence
            who = replace(
                who,
                state=_CONDITIONS.get(more.condition, presence),
                start_ticks=None,
                address=text_in(more.address),
                doing=tuple(filter(None, (text_in(more.doing), text_in(more.more)))),
            )
        people.append(who)
    unread = tuple(place for place, each in enumerate(facts[1:]) if each.is_in_the_way)
    return {
        "kind": "queue",
        "geometry": _geometry(header, None),
        "mode": "all",
        "has_late_readers": bool(header.features & layout.LATE_READERS),
        "participants": tuple(people),
        "absent_elsewhere": slots[0].absent_elsewhere if own == 0 else slots[1].absent_elsewhere,
        "unread": unread,
        "id": header.id.hex(),
        "label": header.label,
    }


def joined(seen: list[Segment]) -> list[Segment]:
    """The same, where a queue with readers here and on other hosts is one: its ring, and what its
    writer knows of those."""
    tables = {
        (each.id, each.participants[0].pid): each
        for each in seen
        if each.kind == "queue"
        and each.participants
        and any(who.is_remote for who in each.participants[1:])
    }
    made, used = [], set[int]()
    for each in seen:
        key = each.id, each.participants[0].pid if each.participants else None
        table = tables.get(key)
        if table is None or table is each or each.kind != "queue" or each.participants[0].is_remote:
            made.append(each)
            continue
        used.add(id(table))
        writer, *here = each.participants
        other = table.participants[0]
        if other.activity != "elsewhere":
            writer = replace(writer, activity=other.activity, activity_since=other.activity_since)
        made.append(
            replace(
                each,
                participants=(writer, *here, *table.participants[1:]),
                unread=(*each.unread, *(len(here) + place for place in table.unread)),
            )
        )
    return [each for each in made if id(each) not in used]


def _is_abandoned(found: Found, facts: os.stat_result) -> bool:
    """Returns whether nobody uses a region without locks: an engine's own has none, and who holds
    it may not have been searched for since it was made."""
    return not (found.pids or found.keepers) and time.time() - facts.st_mtime > _SEARCHED_SINCE


def _mode(header: Header) -> Literal["all", "latest"] | None:
    if header.kind not in ("queue", "peers"):
        return None
    return "latest" if header.features & layout.LATEST_ONLY else "all"


def _geometry(header: Header, store: layout.StoreFacts | None) -> dict[str, int]:
    if header.kind in ("queue", "peers"):
        names = ("n_reader", "max_chunk_bytes", "max_chunks")
        return dict(zip(names, header.geometry[:3], strict=True))
    if header.kind == "tier":
        return {"blocks": header.geometry[0], "block_bytes": header.geometry[1]}
    if store is None:
        return {"data_buffer_size": header.geometry[0]}
    return {
        "data_buffer_size": header.geometry[0],
        "max_object_size": store.max_object_size,
        "max_objects": store.max_objects,
    }


def _times(file: int, header: Header) -> dict[str, Deliveries]:
    if header.kind != "tier" or not header.geometry[1]:
        return {}
    found = layout.deliveries_of(file, header)
    return {
        name: Deliveries(total / 1e9, tuple(counts))
        for name, (total, *counts) in zip(TIER_TIMES, found, strict=False)
    }


def _counters(store: layout.StoreFacts | None) -> dict[str, int]:
    if store is None:
        return {}
    return {
        "objects": store.objects,
        "object_bytes": store.bytes,
        "puts": store.puts,
        "hits": store.hits,
        "evictions": store.evictions,
    }


def _participants(
    file: int, header: Header, slots: list[Slot], known: Known
) -> tuple[Participant, ...]:
    blockers = layout.blockers_of(file, header)
    deliveries = layout.deliveries_of(file, header)
    made = []
    inode = os.fstat(file).st_ino
    for number, slot in enumerate(slots):
        state = _state(file, number, slot, known)
        since = known.since(inode, number, slot)
        delivered = None
        if 0 < number <= len(deliveries):
            total, *counts = deliveries[number - 1]
            delivered = Deliveries(total / 1e9, tuple(counts))
        made.append(_participant(header, number, slot, slots[0], blockers, state, since, delivered))
    return tuple(made)


def _participant(
    header: Header,
    number: int,
    slot: Slot,
    writer: Slot,
    blockers: list[tuple[int, int, int]],
    state: State,
    since: float | None,
    delivered: Deliveries | None,
) -> Participant:
    rank = slot.rank
    if number and rank is None:
        rank = number - 1
    pinned, pinned_bytes, owed = blockers[number] if blockers else (0, 0, 0)
    kept = pinned_bytes
    if header.kind == "queue":  # of the latest, all that is kept is in `leased_bytes`
        kept = slot.views * header.geometry[1] if _mode(header) == "all" else 0
    is_absent = slot.presence == "absent"
    is_of_queue = header.kind in ("queue", "peers") and number > 0 and slot.presence == "attached"
    return Participant(
        "reader" if number else "writer",
        rank if number else None,
        None if is_absent else slot.pid,
        None if is_absent else _started(slot),
        state,
        slot.taken(bool(header.features & layout.LATE_READERS)) if number else slot.position,
        layout.behind(header, writer.position, slot.position) if is_of_queue else 0,
        None if is_absent else slot.last_progress / 1e9,
        slot.activity,
        since,
        slot.views,
        slot.views_since / 1e9 if slot.views and slot.views_since else None,
        slot.bytes,
        slot.waits,
        slot.extents,
        pinned,
        owed,
        slot.leased_bytes + kept,
        slot.skipped,
        delivered,
        None if is_absent else slot.start_ticks,
    )


def _state(file: int, number: int, slot: Slot, known: Known) -> State:
    presence: Presence = slot.presence
    if presence == "attached" and not locks.is_slot_held(file, number):
        presence = "dead"
    return state_of(slot, presence, known.pid_namespace, known.status)


def _started(slot: Slot) -> float | None:
    if not slot.start_ticks:
        return None
    return processes.boot_time() + slot.start_ticks / os.sysconf("SC_CLK_TCK")


def _holder(pid: int, found: Found, known: Known) -> Participant:
    """A lock has its pid, but not the namespace; who holds the file is known, if that was looked
    for."""
    seen_holding = found.pids | found.keepers
    if _elsewhere is not None:
        here = [each for (_, there), each in _elsewhere.numbers.items() if there == pid]
        pid = here[0] if len(here) == 1 and here[0] in seen_holding else pid
    if seen_holding and pid not in seen_holding:
        return Participant("holder", None, pid, None, "unknown")
    state, ticks = known.status(pid)
    started = None
    if ticks is not None:
        started = processes.boot_time() + ticks / os.sysconf("SC_CLK_TCK")
    # The lock is held, so a pid that is not seen is of another namespace.
    seen: State = "unknown" if state == "dead" else state
    return Participant("holder", None, pid, started, seen, start_ticks=ticks)
