"""ZeroMQ contexts, and the checks before one is made."""

from __future__ import annotations

import errno
import os
import sys

import zmq

from memlane._base.descriptors import occupy_standard_streams
from memlane._base.lifetime import need_threads
from memlane.errors import Unsupported, system_fault

# Enough for one of memlane's contexts with all its sockets, and some to spare.
_DESCRIPTORS = 24
# memlane's thread, which serves the sockets, and libzmq's two. The same again for pyzmq, which has
# a context of its own to collect messages sent without copying.
_THREADS = 6


def need_curve() -> None:
    """Raises Unsupported unless libzmq can encrypt and authenticate."""
    if not zmq.has("curve"):
        raise Unsupported(
            "this libzmq was built without CURVE, so peers cannot be authenticated and traffic "
            "cannot be encrypted; install pyzmq's own wheel (pip install --force-reinstall pyzmq)"
        )


def _need_system_threads() -> None:
    """Raises Unsupported if gevent has put greenlets in the place of threads."""
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and any(map(monkey.is_module_patched, ("select", "threading"))):
        raise Unsupported(
            "gevent has patched select or threads, which ends to other hosts and groups need; use "
            "monkey.patch_all(select=False, thread=False)"
        )


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context with one I/O thread. Checks limits first: at one, libzmq would abort the process.

    libzmq opens descriptors at any time and takes the lowest free numbers, so standard streams that
    are closed now lead to /dev/null from then on.

    Raises:
        SystemFault: the process cannot open enough descriptors or start enough threads.
        Unsupported: gevent has patched what it needs.
    """
    _need_system_threads()
    spare: list[int] = []
    try:
        occupy_standard_streams()
        while len(spare) < _DESCRIPTORS:
            spare.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        what = f"connecting to other processes needs {_DESCRIPTORS} free descriptors"
        raise system_fault(error.errno or errno.EMFILE, what) from None
    finally:
        for descriptor in spare:
            os.close(descriptor)
    need_threads(_THREADS)
    return zmq.Context()
