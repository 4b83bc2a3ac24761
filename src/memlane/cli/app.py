"""The commands and their options; each is implemented in a module of its own.

Exit codes: 0; 1 if somebody is stuck (`stuck`) or something will cause trouble (`doctor`);
2 for bad input; 3 if `stuck` cannot decide; 4 if the command itself failed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

import typer

import memlane
from memlane.errors import InvalidArgument, MemlaneError

app = typer.Typer(
    help="Shows memlane's segments in shared memory, who holds them, and who is stuck.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
OfAll = Annotated[
    bool, typer.Option("--all", help="Of all users, and of all containers; for root.")
]


def fail(text: str, code: int = 2) -> typer.Exit:
    """Writes one line to standard error; to be raised."""
    print(f"memlane: {text}", file=sys.stderr)
    return typer.Exit(code)


@contextmanager
def _in_a_line(trouble: str = "") -> Iterator[None]:
    """Turns an error of the block into one line and an exit code: 2 if the caller can correct it,
    else 4. `trouble` is what an OSError means."""
    try:
        yield
    except InvalidArgument as error:
        raise fail(str(error)) from None
    except MemlaneError as error:
        raise fail(str(error), 4) from None
    except BrokenPipeError:  # of another file than standard output, which does the same
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.raise_signal(signal.SIGPIPE)
    except OSError as error:
        if not trouble:
            raise
        raise fail(f"{trouble}: {error.strerror}") from None


def _end_on_sigterm() -> None:
    """From now on SIGTERM unwinds the command and ends it with 143: its default neither restores a
    terminal, nor ends process 1 of a container."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, end)


def _version(is_asked: bool) -> None:
    if is_asked:
        print(f"memlane {memlane.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command("ls")
def list_segments(everyone: OfAll = False, json: AsJson = False) -> None:
    """List the segments of this user: one row each."""
    from memlane.cli.rates import Rates

    def look() -> int:
        rates = Rates()
        rates.first()
        from memlane.cli import ls  # only then, see Rates

        ls.run(rates, json, shows_space=not everyone)
        return 0

    with _in_a_line():
        raise typer.Exit(_of_all(look, json) if everyone else look())


@app.command("show")
def show_one(
    what: Annotated[
        str, typer.Argument(metavar="NAME|PID", help="A segment, or a process that has some.")
    ],
    everyone: OfAll = False,
    json: AsJson = False,
) -> None:
    """Show one segment, or those of a process: a row for each participant."""
    from memlane.cli import show

    def look() -> int:
        show.run(what, json)
        return 0

    with _in_a_line():
        raise typer.Exit(_of_all(look, json) if everyone else look())


@app.command("top")
def show_live(
    interval: Annotated[
        float, typer.Option(help="Seconds between two looks.", min=0.2, max=3600)
    ] = 2.0,
) -> None:
    """Show the segments live, in a pipe one look below the other; q ends it."""
    from memlane.cli import top

    _end_on_sigterm()
    with _in_a_line(), suppress(KeyboardInterrupt):
        top.run(interval)


@app.command("clean")
def clean_up(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="With --foreign: these, even if they are new."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Remove what is shown.")] = False,
    foreign: Annotated[
        bool, typer.Option("--foreign", help="Also what engines left that is not memlane's.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Show what dead processes left in /dev/shm; with --yes, remove it."""
    from memlane.cli import clean

    with _in_a_line():
        clean.run(names or [], yes, foreign, json)


@app.command("open")
def read_queue(
    name: Annotated[str, typer.Argument(help="As the program that serves the queue calls it.")],
    rank: Annotated[
        int | None, typer.Option(help="Of the reader; else the next that is free.", min=0)
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds to wait for the name and a place.", min=0.0)
    ] = None,
    count: Annotated[int | None, typer.Option(help="End after so many messages.", min=1)] = None,
) -> None:
    """Read a queue that is served by name, as one of its readers: a line for each message."""
    from memlane.cli import open

    _end_on_sigterm()
    with _in_a_line(), suppress(KeyboardInterrupt):
        open.run(name, rank, timeout, count)


@app.command("stuck")
def who_is_stuck(
    pid: Annotated[int | None, typer.Argument(help="Only waits of or for this process.")] = None,
    after: Annotated[
        float, typer.Option(help="Seconds that a wait must have lasted.", min=0.0)
    ] = 1.0,
    dump: Annotated[
        Literal["none", "suspects", "all"], typer.Option(help="Whose Python stacks to take.")
    ] = "suspects",
    no_stacks: Annotated[bool, typer.Option("--no-stacks", help="As --dump none.")] = False,
    native: Annotated[
        bool, typer.Option("--native", help="Stacks have the frames of C and C++, too.")
    ] = False,
    watch: Annotated[
        float | None, typer.Option(help="Look again every so many seconds.", min=0.1)
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(help="With --watch: a command for each new finding, JSON on its input."),
    ] = None,
    geometry: Annotated[
        str | None,
        typer.Option(
            help="CHUNK_BYTES,READERS,CHUNKS of an engine's own rings, if the guess fails."
        ),
    ] = None,
    everyone: OfAll = False,
    json: AsJson = False,
) -> None:
    """Name who waits, for whom, and what that process does. Exit code 1 if somebody is stuck."""
    from memlane.cli import stuck
    from memlane.inspect.foreign.rings import geometry_of

    if run is not None and watch is None:
        raise fail("--run needs --watch")
    if everyone and (watch is not None or pid is not None):
        raise fail("--all looks once, at all processes")
    if pid is not None:
        _check_pid(pid)
    if watch is not None:
        _end_on_sigterm()
    with _in_a_line(), suppress(KeyboardInterrupt):
        asked = stuck.Asked(
            pid,
            after,
            "none" if no_stacks else dump,
            None if geometry is None else geometry_of(geometry),
            json,
            native,
        )
        if everyone:
            raise typer.Exit(_of_all(lambda: stuck.look(asked), json, 4 * after))
        if watch is None:
            raise typer.Exit(stuck.look(asked))
        stuck.watch(asked, watch, run)


def _of_all(look: Callable[[], int], as_json: bool, more_seconds: float = 0.0) -> int:
    from memlane.cli import users

    _check_is_root()
    return users.print_all(look, as_json, more_seconds)


def _check_is_root() -> None:
    if os.geteuid() != 0:
        raise fail("--all is for root: another user's segments cannot be read")


def _check_pid(pid: int) -> None:
    try:
        owner = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        raise fail(f"there is no process {pid}") from None
    if owner != os.geteuid():  # also for root, which would be told that nobody is stuck
        raise fail(
            f"process {pid} is of user {owner}: run this as that user, or `stuck --all` as root"
        )


@app.command("tier")
def show_tier(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="The folder of a disk tier, or of each disk."),
    ],
    purge: Annotated[
        str | None,
        typer.Option(metavar="NAMESPACE", help="Remove its blocks; text, or an id that is shown."),
    ] = None,
    clear: Annotated[bool, typer.Option("--clear", help="Remove all blocks.")] = False,
    json: AsJson = False,
) -> None:
    """Show what a disk tier has, by namespace, and remove blocks, also of a running engine."""
    from memlane.cli import tier

    if clear and purge is not None:
        raise fail("give --purge or --clear")
    with _in_a_line():
        tier.run(paths, purge, clear, json)


@app.command("doctor")
def look_at_machine(json: AsJson = False) -> None:
    """Say what on this machine will cause trouble, and how to fix it; exit code 1 if so."""
    from memlane.cli import doctor

    raise typer.Exit(doctor.run(["--json"] if json else []))


@app.command("bench")
def measure_queues(
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Also draw the table into this SVG file.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Measure a queue beside pipes, ZeroMQ and what else is installed: a quarter of a minute."""
    from memlane.cli.bench import command

    with _in_a_line():
        command.run(output, json)


@app.command("export")
def serve_metrics(
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 lets the system choose.", min=0, max=65535)] = 9469,
    pid: Annotated[
        int | None, typer.Option(help="Only the segments that this process holds.")
    ] = None,
    ends_with: Annotated[int | None, typer.Option(help="End when this process has ended.")] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Also answer under this name; may be given repeatedly."),
    ] = None,
    everyone: OfAll = False,
    once: Annotated[
        bool, typer.Option("--once", help="With --all: print the metrics, and serve nothing.")
    ] = False,
) -> None:
    """Serve metrics for Prometheus, JSON, and a live page for browsers."""
    from memlane.cli import export

    if once and not everyone:
        raise fail("--once needs --all")
    if everyone:
        _check_is_root()
        if pid is not None:
            raise fail("--all has the metrics of all processes")
    if once:
        from memlane.cli import metrics_of_all

        with _in_a_line():
            print(metrics_of_all.once(), end="")
        return
    for process in (pid, ends_with):
        if process is not None:
            _check_pid(process)
    _end_on_sigterm()
    with _in_a_line(f"cannot listen on {host} port {port}"), suppress(KeyboardInterrupt):
        export.run(host, port, pid, ends_with, allow_host or [], everyone)


@app.command("trace")
def record(
    pid: Annotated[int, typer.Argument(help="A process that takes part.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path(
        "trace.json"
    ),
    seconds: Annotated[float, typer.Option(help="For how long.", min=0.01, max=3600)] = 10.0,
) -> None:
    """Record what every participant of a process's queues and stores does, for Perfetto."""
    from memlane.cli import trace

    _check_pid(pid)
    try:
        with _in_a_line(f"cannot write {output}"):
            problem = trace.run(pid, seconds, output)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if problem is not None:
        raise fail(problem)
