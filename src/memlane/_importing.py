"""The lock around imports that come late: a fork waits for them.

A child that is forked while another thread imports a module inherits the lock of that module, held
by a thread that it does not have: its own import would never return. What functions
import, they import with `fork_waits`, the lock that `os.fork` takes. Forks by C code do not wait.
"""

import os

from memlane._locks import Lock

fork_waits = Lock()
os.register_at_fork(
    before=fork_waits.acquire,
    after_in_parent=fork_waits.release,
    after_in_child=fork_waits.release,
)
