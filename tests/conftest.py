"""For every test: a deadline, and a check that it left nothing behind."""

import ctypes
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

# numpy's BLAS ends its threads at a fork and restarts them at any time: not our leak. Must be set
# before anything imports numpy.
from tests.support.missing import needs

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# torch's helper threads, once started, never end.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# On a slow machine innocent waits take longer than the default of 5 s, and are logged to stderr.
os.environ["MEMLANE_RINGBUFFER_WARNING_INTERVAL"] = "600"

import pytest

from tests.support import (
    METHODS,
    children_of,
    dismiss,
    holdings,
    late_since,
    network_refusal,
    reap,
    start_control,
    start_fork_server,
    surplus,
)
from tests.support.built import hooked, preloaded
from tests.support.punctual import Control, stacks

_PR_SET_CHILD_SUBREAPER = 36
_PREFIX = ("memlane-", "vllm_offload_")
_SECONDS = 600  # ten times what the longest test takes on a quiet machine
_failed = pytest.StashKey[bool]()
_control = pytest.StashKey[Control]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "soak(seconds): rounds as many as the environment says")
    config.addinivalue_line("markers", "unit: one promise, in one process and without sockets")
    config.addinivalue_line("markers", "property: random sequences of calls against a simple model")
    config.addinivalue_line("markers", "slow: takes more than five seconds by its nature")
    config.addinivalue_line("markers", "wheel: runs on every wheel of a release, too")
    config.addinivalue_line("markers", "root: gives files away, or becomes another user")
    config.addinivalue_line("markers", "hosts: makes hosts and cables (examples/lab)")
    # Children of killed peers are reparented to this process, which finds and reaps them.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # Children would inherit the signals that nohup, or a shell for its background jobs, ignores.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for ignored in (signal.SIGQUIT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_DFL)
    # With the first thread, ThreadSanitizer starts one of its own, which never ends.
    first = threading.Thread(target=int)
    first.start()
    first.join()
    config.stash[_control] = start_control()
    start_fork_server("roles")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Only files that use hypothesis import it: that takes half a second of a processor."""
    if isinstance(collector, pytest.Module) and "hypothesis" in collector.path.read_text():
        from hypothesis import HealthCheck, settings

        slow = [HealthCheck.too_slow]
        settings.register_profile(
            "memlane", database=None, deadline=None, suppress_health_check=slow
        )
        settings.load_profile("memlane")


def pytest_collection_finish() -> None:
    # Objects created by imports stay: the collection after each test need not traverse them.
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[_control].close()
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("root") and os.geteuid() != 0:
        pytest.skip(needs("root"))
    if item.get_closest_marker("hosts") and (refusal := network_refusal()):
        pytest.skip(needs("hosts and cables", refusal))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if call.when == "call":
        item.stash[_failed] = call.excinfo is not None
    return report


@pytest.fixture(scope="session")
def commands() -> None:
    """For tests that run `run_memlane`."""
    start_fork_server("commands")


@pytest.fixture(scope="session")
def hooks() -> None:
    """For tests of the build with hooks: a new interpreter takes a second until it plays a role."""
    start_fork_server("roles", hooked())
    start_fork_server("roles", preloaded())


@pytest.fixture(autouse=True)
def _deadline(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that hangs for minutes (a soak test: for its own time); the others continue.

    A test that waits for what never comes gives up by itself long before, after `PATIENCE`. What
    the machine kept the control waiting is not the test's time.
    """
    soak = request.node.get_closest_marker("soak")
    seconds = max(_SECONDS, soak.kwargs["seconds"] if soak else 0)
    began = time.monotonic()

    def expire(_signal: int, _frame: FrameType | None) -> None:
        left = began + seconds + late_since(began) - time.monotonic()
        if left > 0:
            signal.setitimer(signal.ITIMER_REAL, left + 1.0)
        else:
            pytest.fail(f"the test hangs, for {seconds} s by now\n{stacks()}")

    previous = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture(autouse=True)
def _leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that passed leaves no segment, descriptor, mapping, thread or process."""
    before = holdings(_PREFIX)
    yield
    dismiss()
    gc.collect()
    passed = not request.node.stash.get(_failed, True)
    left = surplus(before, holdings(_PREFIX))
    settled = time.monotonic() + (20.0 if passed else 0.0)
    while left and time.monotonic() < settled:  # a dead peer's child may be about to end
        time.sleep(0.01)
        reap(children_of(os.getpid()))
        left = surplus(before, holdings(_PREFIX))
    reap(children_of(os.getpid()), kill=True)
    if passed:
        assert not left, "left behind:\n" + "\n".join(left)


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    """The way to start the test's processes: once by fork, once by spawn."""
    return str(request.param)
