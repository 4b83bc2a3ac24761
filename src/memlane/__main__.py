"""`memlane` and `python -m memlane`: the command line, or how to install what it needs."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from typing import Any

_NEEDS = ("rich", "typer")  # of the extra `cli`


class _Output(io.FileIO):
    """Standard output. Once nobody reads it, the process ends by SIGPIPE, as other programs do:
    Python's exit code 1 would say that somebody is stuck. Other pipes and sockets raise errors."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.raise_signal(signal.SIGPIPE)
            raise
        except OSError as error:
            print(f"memlane: cannot write the output: {error.strerror}", file=sys.stderr)
            os._exit(4)  # not by an exception, after which Python would flush it again


def _guard_output() -> None:
    before = sys.stdout
    if before is None:  # closed, as by `>&-`
        sys.stdout = io.TextIOWrapper(io.FileIO(os.open(os.devnull, os.O_WRONLY), "w"))
        return
    raw = io.BufferedWriter(_Output(before.fileno(), "w", closefd=False))
    sys.stdout = io.TextIOWrapper(
        raw, before.encoding, before.errors, line_buffering=before.isatty()
    )


def main() -> None:
    """Runs the command line.

    Without the extra only `doctor` runs, plain; everything else names the extra and exits with 2.
    A fault of the command itself is exit code 4: Python's own 1 would say that somebody is stuck.
    """
    try:
        from memlane.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in _NEEDS:
            raise
        if sys.argv[1:2] == ["doctor"]:
            from memlane.cli import doctor

            sys.exit(doctor.run(sys.argv[2:]))
        print(
            f"memlane: the command line needs {error.name}; "
            f"run: pip install '.[cli]' in memlane's checkout",
            file=sys.stderr,
        )
        sys.exit(2)
    _guard_output()
    try:
        app(prog_name="memlane")
    except Exception:
        traceback.print_exc()
        sys.exit(4)


if __name__ == "__main__":
    main()
