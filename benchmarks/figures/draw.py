"""Draws the figures: what each shows, and in which colours.

One look for all: memlane is the blue line, drawn last and thickest; peers that sleep are solid,
peers that poll are dashed. The colours are Okabe and Ito's, which colour-blind readers can tell
apart. Under each figure stand the machine, the date and the command.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure

from benchmarks.figures.scalable import for_both_schemes

mpl.use("svg")

BLUE, PALE = "#0072B2", "#56B4E9"
MEMLANE = {
    "memlane": BLUE,
    "memlane queue": BLUE,
    "memlane view": PALE,
    "memlane over TCP": PALE,
    "memlane object store": PALE,
}
GRAY = "#555555"
INK, FAINT, PAPER = "#1F2328", "#D8DEE4", "#FFFFFF"
# What each colour of a light page is on a dark one.
ON_DARK = {
    BLUE: "#56B4E9",
    PALE: "#9AD3F5",
    INK: "#E6EDF3",
    FAINT: "#30363D",
    PAPER: "#0D1117",
    "#D55E00": "#FF8A3D",
    "#009E73": "#2FD3A5",
    "#CC79A7": "#E8A4CA",
    "#8A6D00": "#F0E442",
    GRAY: "#BBBBBB",
    "#7A3E9D": "#C08BE0",
    "#B8860B": "#E69F00",
    "#5B7F00": "#B5E655",
    "#C2185B": "#FF6FA5",
}
OTHERS = [*ON_DARK][5:]


def _color(name: str, names: list[str]) -> str:
    others = [other for other in names if other not in MEMLANE]
    return MEMLANE.get(name) or OTHERS[others.index(name) % len(OTHERS)]


def _lines(sleeps: Mapping[str, bool]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and how their lines look; memlane last, so that its line is on top."""
    names = list(sleeps)
    for name in sorted(names, key=lambda name: name.startswith("memlane")):
        yield (
            name,
            {
                "color": _color(name, names),
                "linewidth": 2.6 if name in MEMLANE else 1.5,
                "linestyle": "-" if sleeps[name] else (0, (4, 2)),
            },
        )


def _sleeps(peers: Mapping[str, Any]) -> dict[str, bool]:
    return {name: peer["sleeps"] for name, peer in peers.items()}


# The figures --------------------------------------------------------------------------------------


def idle(raw: dict[str, Any], figure: Figure) -> None:
    axes = figure.subplots()
    for name, line in _lines(_sleeps(raw["peers"])):
        at, cores = zip(*raw["peers"][name]["samples"], strict=True)
        axes.plot(at, cores, label=name, **line)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, None)
    every = f"seconds; one message every {raw['every']:g} s"
    _label(axes, every, f"cores in use by {raw['readers']} waiting readers")
    _title(figure, f"What waiting costs: CPU of {raw['readers']} readers of a nearly idle queue")
    _legend(axes, "outside right upper")


def deaths(raw: dict[str, Any], figure: Figure) -> None:
    axes = figure.subplots()
    silent = []
    for name, line in _lines(_sleeps(raw["peers"])):
        peer = raw["peers"][name]
        if not peer["seconds"]:
            silent.append(name)
            continue
        found = np.sort(peer["seconds"])
        share = 100 * np.arange(1, len(found) + 1) / raw["kills"]
        says = "names the pid" if peer["names_the_pid"] else "does not say who died"
        label = f"{name} ({says})"
        axes.step(found, share, label=label, **line)
    axes.set_xscale("log")
    axes.set_xlim(1e-4, raw["limit"])
    ticks = (1e-4, 1e-3, 1e-2, 0.1, 1, 10)
    axes.set_xticks(ticks, ["0.1 ms", "1 ms", "10 ms", "100 ms", "1 s", "10 s"])
    axes.set_ylim(0, 102)
    if silent:
        axes.text(
            0.98,
            0.06,
            f"no error within {raw['limit']:.0f} s:\n" + "\n".join(sorted(silent)),
            transform=axes.transAxes,
            ha="right",
            color=INK,
            fontsize=9,
        )
    _label(axes, "time since kill -9 of the writer", "% of the readers that have an error")
    _title(figure, f"How soon a reader learns that its writer is dead ({raw['kills']} kills)")
    _legend(axes, "upper left")


def leftovers(raw: dict[str, Any], figure: Figure) -> None:
    axes = figure.subplots()
    for name, line in _lines(dict.fromkeys(raw["subjects"], True)):
        files = raw["subjects"][name]["files"]
        taken = raw["subjects"][name]["bytes"][-1]
        text = f"{name}: {files[-1]} file{'s' * (files[-1] != 1)}, {taken / 2**20:,.1f} MiB"
        axes.plot(range(1, len(files) + 1), files, label=text, **line)
    axes.set_yscale("symlog", linthresh=1)
    _plain(axes.xaxis)
    _plain(axes.yaxis)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, raw["kills"])
    _label(axes, "kill -9 of all processes at a random moment, so many times", "files in /dev/shm")
    _title(figure, f"What {raw['kills']:,} kills leave in /dev/shm")
    _legend(axes, "center right")


def tail(raw: dict[str, Any], figure: Figure) -> None:
    axes = figure.subplots()
    places = [-np.log10(1 - percent / 100) for percent in raw["percentiles"]]
    for name, line in _lines(_sleeps(raw["peers"])):
        axes.plot(places, raw["peers"][name]["samples"], label=name, **line)
    shown = (50, 90, 99, 99.9, 99.99)
    axes.set_xticks([-np.log10(1 - p / 100) for p in shown], [f"p{p:g}" for p in shown])
    axes.set_xlim(0, 4)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f} us")
    _label(axes, f"percentile of {raw['messages']:,} messages", "one way, 225-byte dict")
    _title(figure, "How soon a reader has a message (dashed: readers that poll)")
    _legend(axes, "outside right upper")


def sizes(raw: dict[str, Any], figure: Figure) -> None:
    both = figure.subplots(1, len(raw["messages_s"]), sharey=True)
    for axes, (readers, peers) in zip(both, raw["messages_s"].items(), strict=True):
        sleeps = {name: raw["sleeps"][name] for name in peers}
        for name, line in _lines(sleeps):
            nbytes = np.array([int(size) for size in peers[name]])
            rates = np.array(list(peers[name].values()))
            spread = np.percentile(rates, (0, 50, 100), axis=1) * nbytes / 1e9
            around = {"color": line["color"], "alpha": 0.15, "linewidth": 0}
            axes.fill_between(nbytes, spread[0], spread[2], **around)
            axes.plot(nbytes, spread[1], label=name, **line)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([2**10, 2**15, 2**20, 2**26], ["1 KiB", "32 KiB", "1 MiB", "64 MiB"])
        _plain(axes.yaxis)
        _label(axes, f"size of a message, {readers} reader" + "s" * (readers != "1"), "")
    both[0].set_ylabel("GB/s")
    _title(figure, "Throughput of numpy arrays (dashed: readers that poll; shaded: all rounds)")
    _legend(both[0], "outside right upper")


def growth(raw: dict[str, Any], figure: Figure) -> None:
    of_readers, of_queues, of_sizes = figure.subplots(1, 3)
    for axes, name, lines in (
        (of_readers, "readers", {"call": "the writer's call", "last": "until the last has it"}),
        (of_sizes, "sizes", {"call": "the writer's call", "last": "until the reader has it"}),
    ):
        at = np.array([int(each) for each in raw[name]])
        for (measure, label), style in zip(lines.items(), (":", "-"), strict=True):
            values = [row[measure] for row in raw[name].values()]
            axes.plot(at, values, style, color=BLUE, label=label, linewidth=2.2)
        axes.set_yscale("log")
    at = np.array([int(each) for each in raw["readers"]])
    waking = [row["wake"] for row in raw["readers"].values()]
    of_readers.plot(at, waking, "--", color=GRAY, label="one futex wake")
    at = np.array([int(each) for each in raw["queues"]])
    for (measure, label), style in zip(
        {"memory": "MiB", "descriptors": "descriptors", "cpu": "% of a core"}.items(),
        ("-", "--", ":"),
        strict=True,
    ):
        of_queues.plot(
            at, [row[measure] for row in raw["queues"].values()], style, color=BLUE, label=label
        )
    of_queues.set_xscale("log")
    of_queues.set_yscale("log")
    for axis in (of_readers.yaxis, of_queues.xaxis, of_queues.yaxis, of_sizes.yaxis):
        _plain(axis)
    of_readers.set_xscale("log", base=2)
    of_readers.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
    of_sizes.set_xscale("log", base=2)
    of_sizes.set_xticks([1, 2**10, 2**20, 2**30], ["1 B", "1 KiB", "1 MiB", "1 GiB"])
    _label(of_readers, "readers", "us, a 225-byte dict")
    _label(of_queues, "idle queues in one process", "")
    _label(of_sizes, "size of a message", "us")
    for axes in (of_readers, of_queues, of_sizes):
        axes.legend(fontsize=8, framealpha=0.8, facecolor=PAPER)
    _title(figure, "How cost grows")


_OF_ENGINE = {
    "tokens_per_s": "tokens/s, 20 prompts",
    "steps_per_s": "steps/s, one sequence",
    "trickle_cpu_s": "CPU seconds in 20 s, two small requests/s",
}


def engine(raw: dict[str, Any], figure: Figure) -> None:
    sides = raw["sides"]
    measures = list(next(iter(sides.values())))
    both = figure.subplots(1, len(measures))
    for axes, measure in zip(both, measures, strict=True):
        for place, (side, found) in enumerate(sides.items()):
            values = found[measure]
            middle = float(np.median(values))
            color = BLUE if side == "memlane" else FAINT
            axes.bar(place, middle, color=color, width=0.6)
            axes.plot([place] * len(values), values, "o", color=INK, markersize=3, alpha=0.6)
            text = f"{middle:,.1f}" if middle < 100 else f"{middle:,.0f}"
            on_bar = PAPER if side == "memlane" else INK
            axes.text(place, middle / 2, text, ha="center", va="center", color=on_bar)
        axes.set_xticks(range(len(sides)), list(sides))
        axes.set_title(_OF_ENGINE[measure], fontsize=10, color=INK)
        axes.margins(y=0.15)
    _title(figure, f"A real vLLM {raw['release']} on its own queues and on memlane (dots: rounds)")


def policies(raw: dict[str, Any], figure: Figure) -> None:
    both = figure.subplots(1, len(raw["percent"]), sharey=True)
    for axes, (trace, found) in zip(both, raw["percent"].items(), strict=True):
        others = [name for name in found if name not in ("tuned", "optimum")]
        axes.plot(raw["capacities"], found["optimum"], ":", color=INK, label="optimum")
        for place, name in enumerate(others):
            color = OTHERS[place]
            axes.plot(raw["capacities"], found[name], color=color, linewidth=1.4, label=name)
        axes.plot(raw["capacities"], found["tuned"], color=BLUE, linewidth=2.4, label="tuned")
        axes.set_xscale("log")
        axes.set_xticks([1000, 3000, 10_000, 30_000], ["1,000", "3,000", "10,000", "30,000"])
        axes.minorticks_off()
        _label(axes, f"blocks, {trace} trace", "")
    both[0].set_ylabel("prefix hits, % of accesses")
    _title(
        figure, "What eviction policies hit (dotted: hits of an algorithm that knows the future)"
    )
    _legend(both[0], "outside right upper")


FIGURES: dict[str, Callable[[dict[str, Any], Figure], None]] = {
    "idle": idle,
    "deaths": deaths,
    "leftovers": leftovers,
    "tail": tail,
    "sizes": sizes,
    "growth": growth,
    "engine": engine,
    "policies": policies,
}
# What all of them share ---------------------------------------------------------------------------

WIDE = ("sizes", "growth", "engine", "policies")


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _plain(axis: Axis) -> None:
    """Numbers as digits, not as powers of ten."""
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")


def _title(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", fontsize=12, fontweight="bold")


def _legend(axes: Axes, place: str) -> None:
    handles, labels = axes.get_legend_handles_labels()
    where = axes.figure if place.startswith("outside") else axes
    where.legend(
        handles[::-1], labels[::-1], loc=place, fontsize=9, framealpha=0.8, facecolor=PAPER
    )


def draw(name: str, raw: dict[str, Any], folder: Path) -> Path:
    """Writes NAME.svg to the folder, for light and for dark pages; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    settings: dict[str, Any] = {
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": name,
        "font.family": "DejaVu Sans",  # the widest of those that a page may show it in
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": FAINT,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": FAINT,
        "grid.linewidth": 0.6,
        "legend.edgecolor": FAINT,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.facecolor": PAPER,
        "figure.facecolor": PAPER,
    }
    for axis in ("xtick", "ytick"):
        settings |= {f"{axis}.color": INK, f"{axis}.major.size": 0, f"{axis}.minor.size": 0}
    with mpl.rc_context(settings):
        figure = Figure(figsize=(10 if name in WIDE else 8, 4.6), layout="constrained")
        FIGURES[name](raw, figure)
        where = f"{raw['machine']}; {raw['date']}; {raw['command']}"
        figure.supxlabel(where, fontsize=7, x=0.01, ha="left", color=INK)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    path = folder / f"{name}.svg"
    path.write_text(for_both_schemes(drawn.getvalue(), figure.get_suptitle(), ON_DARK))
    return path
