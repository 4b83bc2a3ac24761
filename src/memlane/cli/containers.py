"""The containers of this machine that have a /dev/shm of their own, and what root hands to a
process that looks into one as a user of it.

What is found out as root comes from the kernel alone: /proc of this machine, and no path inside of
a container, which could lead to a link, a device, or a file system that never answers. Such a path
is walked in a process that nobody waits for.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import stat
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice, zip_longest
from typing import NamedTuple

from memlane._base import processes
from memlane._base.processes import Holder
from memlane.inspect.segment import FOLDER, Elsewhere

_CAP_SYS_PTRACE = 1 << 19
_MOST_ASKED = 8  # processes of a mount namespace: one may have ended, or have another root
_MOST_MOUNTS = 20_000  # of a mount namespace, that are read
_MOST_FILES = 512  # that a user's processes hold in a container
_PLACE = os.O_PATH | os.O_CLOEXEC
_FOLDER_PLACE = _PLACE | os.O_DIRECTORY | os.O_NOFOLLOW
_USER_NAMESPACE, _PARENT, _OWNER = 0xB701, 0xB702, 0xB704  # NS_GET_USERNS, _PARENT, _OWNER_UID

# As Kubernetes and the runtimes name cgroups. The first in a path counts: below it the container's
# own processes may make others.
_POD = re.compile(
    r"pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?![0-9a-z])"
)
_ID = re.compile(r"(?<![0-9a-z])[0-9a-f]{64}(?![0-9a-z])")
_SHORT = 12  # digits of an id that are shown, as docker does

# statx(2) asks no file system that would have to wait for a program's answer.
_STATX = struct.Struct("=20xIIHxxQ96xII")  # uid, gid, mode, inode, major and minor of the device
_NO_WAIT, _BASIC = 0x4000 | 0x800, 0x7FF  # AT_STATX_DONT_SYNC, AT_NO_AUTOMOUNT; STATX_BASIC_STATS


class _Facts(NamedTuple):
    """A file's facts."""

    device: int
    inode: int
    uid: int
    mode: int


@dataclass(frozen=True)
class Container:
    """Processes that share a /dev/shm which is not this process's.

    Attributes:
        device: of that file system.
        pids: its processes, ascending.
        pod: the id of its pod, if it has one, as the path of its cgroup says.
        ids: those of its containers, of which a pod may have several on one /dev/shm.
    """

    device: int
    pids: tuple[int, ...]
    pod: str | None
    ids: tuple[str, ...]

    @property
    def name(self) -> str:
        """For people.

        >>> Container(1, (7, 9), None, ("a1" * 32,)).name, Container(1, (7, 9), None, ()).name
        ('container a1a1a1a1a1a1', 'the mount namespace of process 7')
        """
        short = [f"container {each[:_SHORT]}" for each in self.ids]
        words = [f"pod {self.pod}", *short] if self.pod else short
        return ", ".join(words) or f"the mount namespace of process {self.pids[0]}"


def containers() -> tuple[list[tuple[Container, list[int]]], int]:
    """Each with the users whose files in its /dev/shm a process has open or mapped; and the number
    of processes that this one has no right to look at.

    Whoever can make many is not before others: those of one owner of user namespaces stand behind
    the first ones of all the others.
    """
    own, by_device = os.stat(FOLDER).st_dev, dict[int, list[int]]()
    by_namespace, unseen = _by_mount_namespace()
    for members in by_namespace:
        device = next(filter(None, map(_device_of, members[:_MOST_ASKED])), own)
        if device != own:
            by_device.setdefault(device, []).extend(members)
    by_owner: dict[int, list[tuple[Container, list[int]]]] = {}
    for device, found in by_device.items():
        pids = sorted(found)
        if users := _users(device, pids):
            made = Container(device, tuple(pids), *_named(pids))
            by_owner.setdefault(_owner(pids[0]), []).append((made, users))
    turns = zip_longest(*by_owner.values())
    return [each for each in chain.from_iterable(turns) if each is not None], unseen


def _by_mount_namespace() -> tuple[list[list[int]], int]:
    """The processes of other mount namespaces than this one's, and how many may not be seen for
    want of a right. Those of a user namespace around this one are never seen, with any right."""
    found: dict[int, list[int]] = {}
    unseen = 0
    for pid in processes.pids():
        try:
            found.setdefault(os.stat(f"/proc/{pid}/ns/mnt").st_ino, []).append(pid)
        except PermissionError:
            unseen += 1
        except OSError:  # it has ended
            continue
    found.pop(os.stat("/proc/self/ns/mnt").st_ino, None)
    return list(found.values()), 0 if _may_look() else unseen


def _may_look() -> bool:
    """Returns whether this process has CAP_SYS_PTRACE."""
    with open("/proc/self/status") as lines:
        rights = next(line.split()[1] for line in lines if line.startswith("CapEff:"))
    return bool(int(rights, 16) & _CAP_SYS_PTRACE)


def _device_of(pid: int) -> int | None:
    """That of the tmpfs which a process has at /dev/shm."""
    found = None
    with suppress(OSError), open(f"/proc/{pid}/mountinfo", "rb") as lines:
        for line in islice(lines, _MOST_MOUNTS):
            fields = line.split()
            kind = fields[fields.index(b"-") + 1]
            if fields[4] == FOLDER.encode():  # the last one lies over the others
                major, minor = map(int, fields[2].split(b":"))
                found = os.makedev(major, minor) if kind == b"tmpfs" else None
    return found


def _users(device: int, pids: Iterable[int]) -> list[int]:
    found = set()
    for _, holder in processes.holders_in(FOLDER, pids):
        with suppress(OSError):  # closed meanwhile
            facts = _facts(holder.path)
            if facts.device == device and stat.S_ISREG(facts.mode):
                found.add(facts.uid)
    return sorted(found)


def owners(device: int) -> set[int]:
    """The users whose files on that device a process has open or mapped under the name of
    /dev/shm."""
    return set(_users(device, processes.pids()))


def _named(pids: Iterable[int]) -> tuple[str | None, tuple[str, ...]]:
    """The pod, and the containers."""
    pods, ids = dict[str, None](), dict[str, None]()
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/cgroup", errors="replace") as file:
            pod, container = _labels(file.read())
            pods |= {pod: None} if pod else {}
            ids |= {container: None} if container else {}
    return next(iter(pods), None), tuple(ids)


def _labels(cgroups: str) -> tuple[str | None, str | None]:
    """The ids of the pod and of the container.

    >>> number = "0" * 60 + "cafe"
    >>> _labels(f"0::/system.slice/docker-{number}.scope/docker-{'f' * 64}.scope")[1] == number
    True
    >>> _labels("4:cpu:/kubepods/besteffort/pod3a4b5c6d-0000-4000-8000-00000000cafe/x")
    ('3a4b5c6d-0000-4000-8000-00000000cafe', None)
    >>> _labels("0::/../kubepods-burstable-pod3a4b5c6d_0000_4000_8000_00000000cafe.slice/")
    ('3a4b5c6d-0000-4000-8000-00000000cafe', None)
    >>> _labels("0::/user.slice/user-1000.slice/session-1.scope")
    (None, None)
    """
    pod, container = _POD.search(cgroups), _ID.search(cgroups)
    return pod and pod[1].replace("_", "-"), container and container[0]


def _owner(pid: int) -> int:
    """The user who has made the outermost user namespace around its mounts: whatever is made in
    there is that user's. Root if there is none."""
    opened = []
    owner = 0
    try:
        opened.append(os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC))
        opened.append(fcntl.ioctl(opened[0], _USER_NAMESPACE))
        while True:
            opened.append(fcntl.ioctl(opened[-1], _PARENT))  # refused where this process's own is
            owner = int.from_bytes(fcntl.ioctl(opened[-2], _OWNER, bytes(4)), sys.byteorder)
    except OSError:
        return owner
    finally:
        for each in opened:
            os.close(each)


def entered(container: Container, uid: int) -> Elsewhere:
    """Returns what a process needs that looks at the user's files in there with no right but that
    user's: descriptors of them that open nothing. Called as root, in that process.

    Raises:
        OSError: it has ended, or there is something else at its /dev/shm, or the user has too many
            files.
    """
    folder = _first(container.pids, lambda pid: _folder_of(pid, container.device))
    places: dict[int, str] = {}
    holders: list[tuple[str, Holder]] = []
    for path, holder in processes.holders_in(FOLDER, container.pids):
        with suppress(FileNotFoundError, PermissionError):  # closed meanwhile
            place = os.open(holder.path, _PLACE)
            facts = _facts(f"/proc/self/fd/{place}")
            is_theirs = (facts.device, facts.uid) == (container.device, uid)
            if not is_theirs or not stat.S_ISREG(facts.mode) or facts.inode in places:
                os.close(place)
            else:
                places[facts.inode] = f"/proc/self/fd/{place}"
            if is_theirs and facts.inode in places:
                holders.append((path, replace(holder, path=places[facts.inode])))
        if len(places) > _MOST_FILES:
            raise OSError(f"the user holds more than {_MOST_FILES} files")
    pids = {holder.pid for _, holder in holders}
    return Elsewhere(f"/proc/self/fd/{folder}", holders, dict(_numbers(pids)))


def _first(pids: Sequence[int], make: Callable[[int], int]) -> int:
    for pid in pids[:-1]:
        with suppress(OSError):  # it has ended
            return make(pid)
    return make(pids[-1])


def _folder_of(pid: int, device: int) -> int:
    """A descriptor of the process's /dev/shm, behind no link."""
    place = os.open(f"/proc/{pid}/root", _PLACE | os.O_DIRECTORY)
    for name in FOLDER.split("/")[1:]:
        above = place
        try:
            place = os.open(name, _FOLDER_PLACE, dir_fd=above)
        finally:
            os.close(above)
    if os.fstat(place).st_dev != device:
        os.close(place)
        raise OSError(f"something else is mounted at its {FOLDER}")
    return place


def _numbers(pids: Iterable[int]) -> Iterator[tuple[tuple[int, int], int]]:
    """((pid namespace, pid in it), pid here) of each process."""
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/status", "rb") as lines:
            for line in lines:
                if line.startswith(b"NStgid:"):
                    namespace = os.stat(f"/proc/{pid}/ns/pid").st_ino
                    yield (namespace, int(line.split()[-1])), pid


def _facts(path: str) -> _Facts:
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statx"):
        seen = os.stat(path)
        return _Facts(seen.st_dev, seen.st_ino, seen.st_uid, seen.st_mode)
    made = ctypes.create_string_buffer(256)
    if libc.statx(-100, path.encode(), _NO_WAIT, _BASIC, made) != 0:  # AT_FDCWD
        raise OSError(code := ctypes.get_errno(), os.strerror(code), path)
    uid, _, mode, inode, major, minor = _STATX.unpack_from(made)
    return _Facts(os.makedev(major, minor), inode, uid, mode)
