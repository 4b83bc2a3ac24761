"""ZeroMQ contexts, made only where there is room: where libzmq finds none it ends the process."""

from __future__ import annotations

import errno
import os

import zmq

from memlane.errors import system_fault

# Of a context of memlane's with all its sockets, and some to spare.
_DESCRIPTORS = 20


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """A context with one thread.

    Raises:
        SystemFault: the process may not have that many descriptors more.
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
    return zmq.Context()
