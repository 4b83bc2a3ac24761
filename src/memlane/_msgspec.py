"""msgspec, imported after datetime, which its C code imports without checking for an error.

If Ctrl-C interrupted that import, msgspec would continue without datetime, and crash.
"""

import datetime  # noqa: F401

import msgspec as msgspec
