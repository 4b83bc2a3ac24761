"""msgspec, imported behind what its C code imports without looking for an error.

If Ctrl-C interrupted that import of datetime, msgspec would go on without it, into a SIGSEGV.
"""

import datetime  # noqa: F401

import msgspec as msgspec
