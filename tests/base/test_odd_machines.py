"""Machines set up unlike most: directories that may not be listed, no /proc, closed streams.

Fails without the guard: an error that names the wrong cause, or somebody else's bytes in a segment.
"""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support import PATIENCE, is_sanitized, unshare_refusal

pytestmark = pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())


def where(setup: str, code: str, *without: str) -> Any:
    """Returns what `code` puts into `said`, in namespaces that the shell's `setup` has changed."""
    program = f"import json, os, sys, memlane\nfrom memlane import testing\nsaid = None\n{code}\n"
    program += "with os.fdopen(int(sys.argv[1]), 'w') as out:\n json.dump(said, out)\n"
    read_end, write_end = os.pipe()
    command = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        f'{setup.strip()}; exec {" ".join(without)} "$@"',
        "sh",
    ]
    with os.fdopen(read_end) as reading:
        try:
            done = subprocess.run(
                [*command, sys.executable, "-W", "error", "-c", program, str(write_end)],
                pass_fds=[write_end],
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
        finally:
            os.close(write_end)
        text = reading.read()
    assert done.returncode == 0, done.stderr
    return json.loads(text)


UNLISTED = "mount -t tmpfs -o size=64m,mode=1333 tmpfs /dev/shm"  # the owner may not list it
NO_PRIVILEGES = ("setpriv", "--inh-caps=-all", "--bounding-set=-all")
USE = """
try:
    os.listdir('/dev/shm')
except PermissionError:
    with testing.no_leaks(), testing.local_queue() as (writer, (reader,)):
        writer.enqueue('through')
        said = [reader.dequeue(timeout=90)]
    with memlane.ShmRingBuffer(1, 64, 1) as ring:
        (segment,) = testing.segments()
        said += [segment.name == ring.handle()[3], segment.is_named, segment.pids == (os.getpid(),)]
    ring = memlane.SingleWriterShmRingBuffer(4096, create=True)
    region = memlane.SharedOffloadRegion('odd', 4096, 1, 0, 1, 4096)
    said.append(len(testing.segments()))
    region.cleanup()
    ring.close()
    said.append(testing.segments())
"""


def test_shm_that_may_not_be_listed() -> None:
    """Everything works, and the sweep removes what it can see: nothing."""
    assert where(UNLISTED, USE, *NO_PRIVILEGES) == ["through", True, True, True, 2, []]


def test_shm_that_may_not_be_entered() -> None:
    """The error names the folder, not the segment in it, which nobody could look at."""
    setup = "mount -t tmpfs -o mode=0000 tmpfs /dev/shm"
    code = "try:\n memlane.ShmRingBuffer(1, 1, 1, 'x')\n"
    code += "except memlane.SegmentRefused as error:\n said = str(error)"
    assert "may not enter /dev/shm" in where(setup, code, *NO_PRIVILEGES)


REFUSED = """
try:
    said = repr(testing.segments())
except memlane.MemlaneError as error:
    said = f'{type(error).__name__}: {error}'
"""


@pytest.mark.parametrize("gone", ["/proc", "/dev"])
def test_segments_where_nothing_can_be_seen(gone: str) -> None:
    """Not an empty list, which would make a leak pass: an error that says what is missing."""
    said = where(f"mount -t tmpfs tmpfs {gone}", REFUSED)
    assert said.startswith("SystemFault: ")
    assert {"/proc": "/proc", "/dev": "/dev/shm"}[gone] in said
    assert "mount" in said


STARTS = {
    "a queue": "memlane.MessageQueue(1, 1)",
    "a store": "memlane.SingleWriterShmRingBuffer(4096, create=True)",
    "a region": "memlane.SharedOffloadRegion('odd', 4096, 1, 0, 1, 4096)",
}


@pytest.mark.parametrize("code", STARTS.values(), ids=STARTS)
def test_starts_without_proc_fail_and_leave_nothing(code: str) -> None:
    """Fail by an error that says what to look for, and leave nothing."""
    said = where("mount -t tmpfs tmpfs /proc", REFUSED.replace("repr(testing.segments())", code))
    assert said.startswith("SystemFault: ")
    assert "(is /proc mounted?)" in said


FOREIGN = """
import numpy
from memlane.tiers import DiskTier, ReplicaTier
rows, said = numpy.zeros((4, 4096), numpy.uint8), []
for make in (
    lambda path: DiskTier(path, rows, 1 << 20),
    lambda path: ReplicaTier(path, rows),
    lambda path: memlane.SharedOffloadRegion('odd', 4096, 1, 0, 1, 4096, directory=path),
):
    try:
        make('/tmp/' + chr(233))
    except memlane.InvalidArgument as error:
        said.append(str(error))
"""


def test_paths_that_the_locale_does_not_have() -> None:
    """The error says what to set. Fails without the guard: a UnicodeEncodeError."""
    locale = ("env", "LC_ALL=C", "PYTHONUTF8=0", "PYTHONCOERCECLOCALE=0")
    disk, replica, region = where(":", FOREIGN, *locale)
    for said in (disk, replica, region):
        assert said.endswith(": file names are ascii here; set PYTHONUTF8=1, or LANG=C.UTF-8")


CLOSED = """
os.environ['OPENBLAS_NUM_THREADS'] = '1'
import numpy, uuid
memlane.MessageQueue, memlane.SharedOffloadRegion, memlane.SingleWriterShmObjectStorage
for number in range(3):
    os.close(number)
writer = memlane.MessageQueue(1, 1, max_chunk_bytes=64)
reader = memlane.MessageQueue.create_from_handle(writer.export_handle(), 0)
writer.enqueue(numpy.zeros(1 << 21, numpy.uint8))
array = reader.dequeue(timeout=90)
array[:] = 1
ring = memlane.SingleWriterShmRingBuffer(1 << 16, create=True)
store = memlane.SingleWriterShmObjectStorage(1 << 12, 1, ring)
other = memlane.SingleWriterShmObjectStorage.create_from_handle(store.handle())
region = memlane.SharedOffloadRegion(uuid.uuid4().hex, 4096, 1, 0, 1, 4096)
name = region.mmap_path.split('offload_')[1].removesuffix('.mmap')
joined = memlane.SharedOffloadRegion(name, 4096, 1, 0, 1, 4096)
del array
writer.enqueue('again')
open_now = {}
for number in os.listdir('/proc/self/fd'):
    try:
        open_now[int(number)] = os.readlink(f'/proc/self/fd/{number}')
    except OSError:
        pass
said = [sum('/dev/shm' in target for target in open_now.values()) > 8,
        {number: target for number, target in open_now.items() if number < 3}]
for end in (reader, writer, other, store, ring):
    end.close()
joined.cleanup(), region.cleanup()
said.append(testing.segments() and [one for one in testing.segments() if os.getpid() in one.pids])
"""


@pytest.mark.skipif(is_sanitized(), reason="a sanitizer reports on the standard streams")
def test_no_segment_takes_the_number_of_a_standard_stream() -> None:
    """As daemons have them: no segment takes their numbers, where any library may print."""
    assert where("true", CLOSED) == [True, {}, []]


CLOSED_NETWORK = """
import secrets
from memlane.groups import TcpGroup
memlane.MessageQueue
def streams():
    found = {}
    for number in range(3):
        try:
            found[number] = os.readlink(f'/proc/self/fd/{number}')
        except OSError:
            pass
    return found
def close_streams():
    for number in range(3):
        os.close(number)
close_streams()
writer = memlane.MessageQueue(1, 0, connect_ip='127.0.0.1')
reader = memlane.MessageQueue.create_from_handle(writer.export_handle(), 0)
writer.wait_until_ready(90, processes=[os.getpid()])
writer.enqueue('through')
said = [reader.dequeue(timeout=90), streams()]
reader.close(), writer.close()
close_streams()
group = TcpGroup('127.0.0.1', 0, 0, 1, secret=secrets.token_hex())
close_streams()
group.broadcast_obj('all', 0)
from memlane._base.descriptors import new_event
said.append(streams())
close_streams()
said.append([new_event() > 2, streams()])
group.close()
"""


@pytest.mark.skipif(is_sanitized(), reason="a sanitizer reports on the standard streams")
def test_closed_standard_streams_lead_to_dev_null() -> None:
    """They lead to /dev/null, before libzmq or memlane takes their numbers."""
    quiet = dict.fromkeys("012", "/dev/null")
    assert where("true", CLOSED_NETWORK) == ["through", quiet, quiet, [True, {}]]


# A cgroup of 200 MiB, whose files say what the program has taken of /dev/shm. The kernel would kill
# it at the limit; here nothing stops it from taking more.
CGROUP = """
mount -t tmpfs -o size=2g tmpfs /dev/shm; mount -t tmpfs tmpfs /sys/fs/cgroup
echo 0::/ > /sys/fs/cgroup/own; mount --bind /sys/fs/cgroup/own /proc/$$/cgroup
echo 209715200 > /sys/fs/cgroup/memory.max; echo 0 > /sys/fs/cgroup/memory.current
printf 'file 0\\nshmem 0\\n' > /sys/fs/cgroup/memory.stat
"""
IN_CGROUP = """
import numpy
MIB = 1 << 20
def taken():
    facts = os.statvfs('/dev/shm')
    return (facts.f_blocks - facts.f_bfree) * facts.f_frsize
def tried(call):
    with open('/sys/fs/cgroup/memory.current', 'w') as file:
        file.write(str(taken()))
    try:
        call()
    except memlane.MemlaneError as error:
        return f'{type(error).__name__}: {error}'
writer = memlane.MessageQueue(1, 1, max_chunk_bytes=MIB)
reader = memlane.MessageQueue.create_from_handle(writer.export_handle(), 0)
"""
TOO_LARGE = """
said = [tried(lambda: writer.enqueue(bytes(300 * MIB), 90)), writer.statistics().messages]
said.append(tried(lambda: writer.enqueue(bytes(150 * MIB), 90)))
said.append(len(reader.dequeue(90)) // MIB)
"""
KEPT = """
kept, said = [], None
while said is None and len(kept) < 60:
    said = tried(lambda: writer.enqueue(numpy.ones(6 * MIB, numpy.uint8), 90))
    if said is None:
        kept.append(reader.dequeue(90))
said = [said, len(kept), taken() // MIB, all(one.all() for one in kept)]
del kept[:]
said.append(tried(lambda: writer.enqueue(numpy.ones(6 * MIB, numpy.uint8), 90)))
"""
BEHIND = """
said = []
while not said:
    said = [one for one in [tried(lambda: writer.enqueue(bytes(40 * MIB), 0.3))] if one]
said += [writer.statistics().messages, taken() // MIB]
import threading
def read():
    reader.dequeue(90)
    with open('/sys/fs/cgroup/memory.current', 'w') as file:
        file.write('0')
threading.Timer(0.2, read).start()
said.append(tried(lambda: writer.enqueue(bytes(40 * MIB), 90)))
"""
OF_THE_CGROUP = "memory limit of cgroup"


def test_a_message_larger_than_the_cgroup_is_refused() -> None:
    """It is refused by name instead of killing its sender; what fits is sent."""
    refused, sent, fits, received = where(CGROUP, IN_CGROUP + TOO_LARGE)
    assert refused.startswith(f"ShmExhausted: need {300 << 20} bytes")
    assert OF_THE_CGROUP in refused
    assert (sent, fits, received) == (0, None, 150)


def test_kept_arrays_that_fill_the_cgroup() -> None:
    """The message that would not fit beside them is refused; dropping them makes room."""
    refused, kept, taken, are_whole, again = where(CGROUP, IN_CGROUP + KEPT)
    assert refused.startswith("ShmExhausted: ")
    assert OF_THE_CGROUP in refused
    assert kept >= 20
    assert taken < 200
    assert are_whole
    assert again is None


def test_the_writer_waits_for_a_slow_reader_in_a_full_cgroup() -> None:
    """The writer waits for what has not been read yet, as in a full /dev/shm."""
    timed_out, sent, taken, later = where(CGROUP, IN_CGROUP + BEHIND)
    assert timed_out.startswith("TimedOut: ")
    assert "reader 0" in timed_out
    assert (sent, taken < 200, later) == (4, True, None)
