"""A GPU for tests on machines without one: memory of the host, the stand-in for CUDA's runtime
(`cudart.cpp`), and in the place of torch's streams and events those below.

Copies of page-locked memory are performed when somebody waits for an event or a stream.
"""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from benchmarks.gpu.compiled import THREADS
from benchmarks.gpu.device import Device, Launch, signed

from memlane.offload._arrays import Side
from tests.support import Link, Peer, start
from tests.support.built import built
from tests.support.cuda import STREAM
from tests.support.missing import package

torch = package("torch")

GPU = torch.device("cuda:1")


class Current:
    """This process's current GPU."""

    device = torch.device("cuda:0")


class Event:
    """Done once anybody has waited for the GPU since it was recorded."""

    fake: Any = None
    fails = False

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing or Current.device == GPU
        self._recorded = 0
        self._moment = 0.0

    def record(self, stream: "Stream") -> None:
        assert isinstance(stream, Stream)
        if Event.fails:
            raise RuntimeError("the GPU is gone")
        self._recorded, self._moment = Event.fake.times_finished(), time.perf_counter()

    def query(self) -> bool:
        return bool(Event.fake.times_finished() > self._recorded)

    def synchronize(self) -> None:
        Event.fake.finish()

    def elapsed_time(self, later: "Event") -> float:
        return (later._moment - self._moment) * 1e3


class Stream:
    """Waits are recorded, in their order."""

    order: ClassVar[list[Any]] = []

    def __init__(self, device: Any = GPU, handle: int = STREAM) -> None:
        self.device = device
        self.cuda_stream = handle
        self.waits = 0

    def synchronize(self) -> None:
        Event.fake.finish()
        self.waits += 1

    def record_event(self) -> Event:
        with torch.cuda.device(self.device):
            event = Event()
        event.record(self)
        return event

    def wait_stream(self, other: "Stream") -> None:
        Stream.order.append((self.cuda_stream, other.cuda_stream))

    def wait_event(self, event: Event) -> None:
        Stream.order.append((self.cuda_stream, event))


def play(put: Callable[..., None] = setattr) -> Stream:
    """torch's side of CUDA, with a current device other than the tensor's; `put` as `setattr`.

    Returns the legacy default stream, which is current.
    """
    default = Stream(handle=0)

    @contextmanager
    def device(wanted: Any) -> Iterator[None]:
        before, Current.device = Current.device, wanted
        yield
        Current.device = before

    def current_stream(asked: Any) -> Stream:
        assert asked == GPU
        return default

    put(Current, "device", torch.device("cuda:0"))
    put(torch.cuda, "device", device)
    put(torch.cuda, "current_stream", current_stream)
    put(torch.cuda, "Stream", Stream)
    put(torch.cuda, "Event", Event)
    return default


class OnGpu(np.ndarray[Any, Any]):
    """Memory that counts as the GPU's."""


class StandIn:
    """`benchmarks.gpu.device.Device`, in a process of its own: what it replaces stays replaced."""

    name = "a stand-in for a GPU, whose figures mean nothing"
    processors = 2

    def __init__(self, library: Path) -> None:
        self.runtime = signed(str(library))
        self.runtime.be_gpu.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._library = library
        self._memory: list[Any] = []  # what was the GPU's memory must not become the host's
        Event.fake = self.runtime
        play()
        torch.cuda.is_available = lambda: True
        prepare = Side.__init__

        def with_device(side: Side, name: str, array: Any) -> None:
            prepare(side, name, array)
            if isinstance(array, OnGpu):
                side.device = GPU

        Side.__init__ = with_device  # type: ignore[method-assign,assignment]

    def zeros(self, *shape: int) -> Any:
        made = np.zeros(shape, np.int8).view(OnGpu)
        self.runtime.be_gpu(made.ctypes.data, made.nbytes)
        self._memory.append(made)
        return made

    def tensor(self, blocks: Any) -> Any:
        self.finish()
        return torch.from_numpy(blocks.view(np.ndarray))

    def ids(self, array: np.ndarray[Any, Any]) -> Any:
        return torch.from_numpy(array)

    def stream(self) -> Any:
        return Stream()

    def current(self, stream: Any) -> AbstractContextManager[object]:
        return nullcontext()

    def timer(self) -> Any:
        return Event(enable_timing=True)

    def delay(self, stream: Any) -> None:
        """Copies of page-locked memory are under way until somebody waits, anyway."""

    def finish(self) -> None:
        self.runtime.finish()

    def kernel(self) -> Launch:
        library = ctypes.CDLL(str(built("native/native/tests/kernel.so", "native-build")))
        library.launch.argtypes = [ctypes.c_uint] * 2 + [ctypes.c_ulonglong] * 3

        def launch(grid: int, places: int, blocks: int, nbytes: int, _stream: int) -> None:
            self.finish()  # what was queued before it
            library.launch(grid, THREADS, places, blocks, nbytes)

        return launch

    def product(self, side: int) -> Callable[[], object]:
        left, right = (torch.randn(side, side).bfloat16() for _ in range(2))
        return lambda: torch.mm(left, right)


def start_with(device: Device, role: Callable[..., Any], *args: Any) -> Peer:
    """`role(link, device, *args)` in a process of its own, with the same kind of GPU.

    A child forked by a process that uses CUDA cannot use it.
    """
    if isinstance(device, StandIn):
        return start(role, device, *args)
    return start(_with_device, type(device), role, args, method="spawn")


def _with_device(link: Link, kind: type, role: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return role(link, kind(), *args)
