"""Real processes for tests: start a role, talk to it over a pipe, stop it, kill it, measure.

Nothing in here knows what is under test. A *role* is any callable ``role(link, *args)``; it runs
in its own process, reports its progress with ``link.tell`` and waits for its cue with
``link.hear``. ``peer.result()`` returns its value, or raises its exception.
"""

from tests.harness.alarms import Alarm, alarm_after
from tests.harness.aside import Aside
from tests.harness.crash import Crash, Doomed, Hooks, NeverCame, Passage, Spot, crash_everywhere
from tests.harness.faults import (
    Failing,
    FailingCalls,
    Failure,
    Fault,
    Scenario,
    fail_everywhere,
    nothing_fails,
    preloading,
)
from tests.harness.leaks import Holdings, children_of, holdings, surplus
from tests.harness.link import Link, Silence
from tests.harness.network import Neighbour, neighbour, network_refusal
from tests.harness.no_files import NO_FILES
from tests.harness.peer import METHODS, Peer, PeerGone, dismiss, reap, start
from tests.harness.places import (
    is_sanitized,
    own_pid_namespace,
    private_shm,
    python_needs_no_folder,
    unshare_refusal,
)
from tests.harness.remote import Remote, serve
from tests.harness.waiting import PATIENCE, asleep, cpu_seconds, until, until_asleep, until_at_rest

__all__ = [
    "METHODS",
    "NO_FILES",
    "PATIENCE",
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
    "Neighbour",
    "NeverCame",
    "Passage",
    "Peer",
    "PeerGone",
    "Remote",
    "Scenario",
    "Silence",
    "Spot",
    "alarm_after",
    "asleep",
    "children_of",
    "cpu_seconds",
    "crash_everywhere",
    "dismiss",
    "fail_everywhere",
    "holdings",
    "is_sanitized",
    "neighbour",
    "network_refusal",
    "nothing_fails",
    "own_pid_namespace",
    "preloading",
    "private_shm",
    "python_needs_no_folder",
    "reap",
    "serve",
    "start",
    "surplus",
    "unshare_refusal",
    "until",
    "until_asleep",
    "until_at_rest",
]
