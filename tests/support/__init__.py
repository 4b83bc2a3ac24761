"""Tools that the tests share. The names below are real processes for tests: start a role, talk to
it over a pipe, stop it, kill it, measure.

A *role* is any callable ``role(link, *args)``; it runs in its own process, reports its progress
with ``link.tell`` and waits for its cue with ``link.hear``. ``peer.result()`` returns its value, or
raises its exception. None of this knows what is under test. What does has the name of what it makes
(``queues``, ``stores``, ``regions``, ``groups``, ...), and is imported by that name.
"""

from tests.support.alarms import Alarm, alarm_after, alarms
from tests.support.aside import Aside
from tests.support.crash import Crash, Doomed, Hooks, NeverCame, Passage, Spot, crash_everywhere
from tests.support.failing_calls import (
    Failing,
    FailingCalls,
    Failure,
    Fault,
    Scenario,
    fail_everywhere,
    nothing_fails,
    preloading,
)
from tests.support.fresh import run_memlane, start_fork_server
from tests.support.leaks import Holdings, children_of, holdings, surplus
from tests.support.link import Link, Silence
from tests.support.no_files import NO_FILES
from tests.support.places import (
    is_sanitized,
    network_refusal,
    own_pid_namespace,
    pass_time,
    private_shm,
    python_needs_no_folder,
    unshare_refusal,
)
from tests.support.processes import METHODS, Peer, PeerGone, Remote, dismiss, reap, serve, start
from tests.support.punctual import assert_in_time, given_time, late_since, start_control
from tests.support.waiting import (
    PATIENCE,
    UNHURRIED,
    asleep,
    cpu_seconds,
    eventually,
    idle_share,
    until,
    until_asleep,
    until_at_rest,
)

__all__ = [
    "METHODS",
    "NO_FILES",
    "PATIENCE",
    "UNHURRIED",
    "Alarm",
    "Aside",
    "Crash",
    "Doomed",
    "Failing",
    "FailingCalls",
    "Failure",
    "Fault",
    "Holdings",
    "Hooks",
    "Link",
    "NeverCame",
    "Passage",
    "Peer",
    "PeerGone",
    "Remote",
    "Scenario",
    "Silence",
    "Spot",
    "alarm_after",
    "alarms",
    "asleep",
    "assert_in_time",
    "children_of",
    "cpu_seconds",
    "crash_everywhere",
    "dismiss",
    "eventually",
    "fail_everywhere",
    "given_time",
    "holdings",
    "idle_share",
    "is_sanitized",
    "late_since",
    "network_refusal",
    "nothing_fails",
    "own_pid_namespace",
    "pass_time",
    "preloading",
    "private_shm",
    "python_needs_no_folder",
    "reap",
    "run_memlane",
    "serve",
    "start",
    "start_control",
    "start_fork_server",
    "surplus",
    "unshare_refusal",
    "until",
    "until_asleep",
    "until_at_rest",
]
