"""What is asked of libzmq before it is used."""

from __future__ import annotations

import errno
import os

import zmq

from memlane import _threads
from memlane.errors import Unsupported, system_fault

# Of a context of memlane's with all its sockets, and some to spare.
_DESCRIPTORS = 20
# The one that serves the sockets, and libzmq's two; and as many again, because pyzmq collects the
# messages that were not copied in a context of its own.
_THREADS = 6


def need_curve() -> None:
    """Raises Unsupported unless it can encrypt, and tell who is who."""
    if not zmq.has("curve"):
        raise Unsupported(
            "this libzmq was built without CURVE, so nobody could be kept from reading along or "
            "from sending; install pyzmq's own wheel (pip install --force-reinstall pyzmq)"
        )


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context with one thread. Where libzmq finds no room for one it would end the process.

    Raises:
        SystemFault: the process may not have that many descriptors or threads more.
    """
    spare: list[int] = []
    try:
        while len(spare) < _DESCRIPTORS:
            spare.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        what = f"a connection to other processes needs {_DESCRIPTORS} descriptors"
        raise system_fault(error.errno or errno.EMFILE, what) from None
    finally:
        for descriptor in spare:
            os.close(descriptor)
    _threads.need(_THREADS)
    return zmq.Context()
