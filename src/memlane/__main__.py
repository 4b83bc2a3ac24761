"""`memlane` and `python -m memlane`: the command line, or how to install what it needs."""

from __future__ import annotations

import sys
import traceback

_NEEDS = ("rich", "typer")  # of the extra `cli`


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
            f"memlane: the command line needs {error.name}; run: pip install 'memlane[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    try:
        app(prog_name="memlane")
    except Exception:
        traceback.print_exc()
        sys.exit(4)


if __name__ == "__main__":
    main()
