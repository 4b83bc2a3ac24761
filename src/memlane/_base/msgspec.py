"""Imports msgspec after datetime, which msgspec's C code imports without checking for errors.

If Ctrl-C interrupted that import, msgspec would continue without datetime, and crash.
"""

import datetime  # noqa: F401

import msgspec as msgspec
