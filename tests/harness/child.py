"""What runs in a role's process."""

import ctypes
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any

from tests.harness.link import Link

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def play(link: Link, role: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Play the role, report its value or error over the link, and return the exit status."""
    try:
        link.report("value", role(link, *args))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            link.report("error", error, text)
        except Exception:  # the error cannot be pickled: send only its text
            link.report("error", None, text)
        return 1
    return 0


def main() -> int:
    """In a fresh interpreter: take role and arguments from the inherited link, and play."""
    die_with_parent()
    link = Link.from_descriptor(int(sys.argv[1]))
    role, args = link.hear()
    return play(link, role, args)
