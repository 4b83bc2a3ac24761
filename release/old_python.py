"""Refuses a Python that is too old for memlane. Any Python can run this."""
# ruff: noqa: UP031, UP036

import sys

if sys.version_info < (3, 11):
    here = (sys.executable, sys.version.split()[0])
    sys.exit(
        "memlane needs Python 3.11 or later; %s is %s. Name another (and remove .venv, if there "
        "is one): make PYTHON=python3.11 demo" % here
    )
