"""Draws the figures, each for light and for dark pages.

One look for all: memlane is the blue line, drawn last and thickest; peers that sleep are solid,
peers that poll are dashed. The colours are Okabe and Ito's, which colour-blind readers can tell
apart. Under each figure stand the machine, the date and the command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

mpl.use("svg")

MEMLANE = {
    "memlane": ("#0072B2", "#56B4E9"),
    "memlane queue": ("#0072B2", "#56B4E9"),
    "memlane view": ("#56B4E9", "#9AD3F5"),
    "memlane over TCP": ("#56B4E9", "#9AD3F5"),
    "memlane object store": ("#56B4E9", "#9AD3F5"),
}
OTHERS = (
    ("#D55E00", "#FF8A3D"),
    ("#009E73", "#2FD3A5"),
    ("#CC79A7", "#E8A4CA"),
    ("#8A6D00", "#F0E442"),
    ("#555555", "#BBBBBB"),
    ("#7A3E9D", "#C08BE0"),
    ("#B8860B", "#E69F00"),
    ("#A0522D", "#D9966B"),
)


@dataclass(frozen=True)
class Look:
    """Colours of one kind of page."""

    name: str
    index: int
    ink: str
    faint: str
    paper: str


LOOKS = (
    Look("light", 0, "#1f2328", "#d8dee4", "#ffffff"),
    Look("dark", 1, "#e6edf3", "#30363d", "#0d1117"),
)


def _color(name: str, names: list[str], look: Look) -> str:
    if name in MEMLANE:
        return MEMLANE[name][look.index]
    others = [other for other in names if other not in MEMLANE]
    return OTHERS[others.index(name) % len(OTHERS)][look.index]


def _lines(sleeps: Mapping[str, bool], look: Look) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and how their lines look; memlane last, so that its line is on top."""
    names = list(sleeps)
    for name in sorted(names, key=lambda name: name.startswith("memlane")):
        yield (
            name,
            {
                "color": _color(name, names, look),
                "linewidth": 2.6 if name in MEMLANE else 1.5,
                "linestyle": "-" if sleeps[name] else (0, (4, 2)),
            },
        )


def _sleeps(peers: Mapping[str, Any]) -> dict[str, bool]:
    return {name: peer["sleeps"] for name, peer in peers.items()}


# The figures --------------------------------------------------------------------------------------


def idle(raw: dict[str, Any], figure: Figure, look: Look) -> None:
    axes = figure.subplots()
    for name, line in _lines(_sleeps(raw["peers"]), look):
        at, cores = zip(*raw["peers"][name]["samples"], strict=True)
        axes.plot(at, cores, label=name, **line)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, None)
    every = f"seconds; one message every {raw['every']:g} s"
    _label(axes, every, f"cores in use by {raw['readers']} waiting readers")
    _title(figure, f"What waiting costs: CPU of {raw['readers']} readers of a nearly idle queue")
    _legend(axes, look, "outside right upper")


def deaths(raw: dict[str, Any], figure: Figure, look: Look) -> None:
    axes = figure.subplots()
    silent = []
    for name, line in _lines(_sleeps(raw["peers"]), look):
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
            color=look.ink,
            fontsize=9,
        )
    _label(axes, "time since kill -9 of the writer", "% of the readers that have an error")
    _title(figure, f"How soon a reader learns that its writer is dead ({raw['kills']} kills)")
    _legend(axes, look, "upper left")


def leftovers(raw: dict[str, Any], figure: Figure, look: Look) -> None:
    axes = figure.subplots()
    for name, line in _lines(dict.fromkeys(raw["subjects"], True), look):
        files = raw["subjects"][name]["files"]
        taken = raw["subjects"][name]["bytes"][-1]
        text = f"{name}: {files[-1]} file{'s' * (files[-1] != 1)}, {taken / 2**20:,.1f} MiB"
        axes.plot(range(1, len(files) + 1), files, label=text, **line)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.set_xlim(0, raw["kills"])
    _label(axes, "kill -9 of all processes at a random moment, so many times", "files in /dev/shm")
    _title(figure, f"What {raw['kills']:,} kills leave in /dev/shm")
    _legend(axes, look, "center right")


def tail(raw: dict[str, Any], figure: Figure, look: Look) -> None:
    axes = figure.subplots()
    places = [-np.log10(1 - percent / 100) for percent in raw["percentiles"]]
    for name, line in _lines(_sleeps(raw["peers"]), look):
        axes.plot(places, raw["peers"][name]["samples"], label=name, **line)
    shown = (50, 90, 99, 99.9, 99.99)
    axes.set_xticks([-np.log10(1 - p / 100) for p in shown], [f"p{p:g}" for p in shown])
    axes.set_xlim(0, 4)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f} us")
    _label(axes, f"percentile of {raw['messages']:,} messages", "one way, 225-byte dict")
    _title(figure, "How soon a reader has a message (dashed: readers that poll)")
    _legend(axes, look, "outside right upper")


def sizes(raw: dict[str, Any], figure: Figure, look: Look) -> None:
    both = figure.subplots(1, len(raw["messages_s"]), sharey=True)
    for axes, (readers, peers) in zip(both, raw["messages_s"].items(), strict=True):
        sleeps = {name: raw["sleeps"][name] for name in peers}
        for name, line in _lines(sleeps, look):
            nbytes = np.array([int(size) for size in peers[name]])
            rates = np.array(list(peers[name].values()))
            spread = np.percentile(rates, (0, 50, 100), axis=1) * nbytes / 1e9
            around = {"color": line["color"], "alpha": 0.15, "linewidth": 0}
            axes.fill_between(nbytes, spread[0], spread[2], **around)
            axes.plot(nbytes, spread[1], label=name, **line)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks([2**10, 2**15, 2**20, 2**26], ["1 KiB", "32 KiB", "1 MiB", "64 MiB"])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        _label(axes, f"size of a message, {readers} reader" + "s" * (readers != "1"), "")
    both[0].set_ylabel("GB/s")
    _title(figure, "Throughput of numpy arrays (dashed: readers that poll; shaded: all rounds)")
    _legend(both[0], look, "outside right upper")


def growth(raw: dict[str, Any], figure: Figure, look: Look) -> None:
    ours, wake = MEMLANE["memlane"][look.index], OTHERS[4][look.index]
    of_readers, of_queues, of_sizes = figure.subplots(1, 3)
    for axes, name, lines in (
        (of_readers, "readers", {"call": "the writer's call", "last": "until the last has it"}),
        (of_sizes, "sizes", {"call": "the writer's call", "last": "until the reader has it"}),
    ):
        at = np.array([int(each) for each in raw[name]])
        for (measure, label), style in zip(lines.items(), (":", "-"), strict=True):
            values = [row[measure] for row in raw[name].values()]
            axes.plot(at, values, style, color=ours, label=label, linewidth=2.2)
        axes.set_yscale("log")
    at = np.array([int(each) for each in raw["readers"]])
    waking = [row["wake"] for row in raw["readers"].values()]
    of_readers.plot(at, waking, "--", color=wake, label="one futex wake")
    at = np.array([int(each) for each in raw["queues"]])
    for (measure, label), style in zip(
        {"memory": "MiB", "descriptors": "descriptors", "cpu": "% of a core"}.items(),
        ("-", "--", ":"),
        strict=True,
    ):
        of_queues.plot(
            at, [row[measure] for row in raw["queues"].values()], style, color=ours, label=label
        )
    of_queues.set_xscale("log")
    of_queues.set_yscale("log")
    of_readers.set_xscale("log", base=2)
    of_readers.set_xticks([1, 4, 16, 64], ["1", "4", "16", "64"])
    of_sizes.set_xscale("log", base=2)
    of_sizes.set_xticks([1, 2**10, 2**20, 2**30], ["1 B", "1 KiB", "1 MiB", "1 GiB"])
    _label(of_readers, "readers", "us, a 225-byte dict")
    _label(of_queues, "idle queues in one process", "")
    _label(of_sizes, "size of a message", "us")
    for axes in (of_readers, of_queues, of_sizes):
        axes.legend(fontsize=8, framealpha=0.8, facecolor=look.paper)
    _title(figure, "How cost grows")


_OF_ENGINE = {
    "tokens_per_s": "tokens/s, 20 prompts",
    "steps_per_s": "steps/s, one sequence",
    "trickle_cpu_s": "CPU seconds in 20 s, two small requests/s",
}


def engine(raw: dict[str, Any], figure: Figure, look: Look) -> None:
    sides = raw["sides"]
    measures = list(next(iter(sides.values())))
    both = figure.subplots(1, len(measures))
    for axes, measure in zip(both, measures, strict=True):
        for place, (side, found) in enumerate(sides.items()):
            values = found[measure]
            middle = float(np.median(values))
            color = MEMLANE["memlane"][look.index] if side == "memlane" else look.faint
            axes.bar(place, middle, color=color, width=0.6)
            axes.plot([place] * len(values), values, "o", color=look.ink, markersize=3, alpha=0.6)
            text = f"{middle:,.1f}" if middle < 100 else f"{middle:,.0f}"
            axes.text(place, middle / 2, text, ha="center", va="center", color=look.ink)
        axes.set_xticks(range(len(sides)), list(sides))
        axes.set_title(_OF_ENGINE[measure], fontsize=10, color=look.ink)
        axes.margins(y=0.15)
    _title(figure, f"A real vLLM {raw['release']} on its own queues and on memlane (dots: rounds)")


# What all of them share ---------------------------------------------------------------------------


def policies(raw: dict[str, Any], figure: Figure, look: Look) -> None:
    both = figure.subplots(1, len(raw["percent"]), sharey=True)
    for axes, (trace, found) in zip(both, raw["percent"].items(), strict=True):
        others = [name for name in found if name not in ("tuned", "optimum")]
        axes.plot(raw["capacities"], found["optimum"], ":", color=look.ink, label="optimum")
        for place, name in enumerate(others):
            color = OTHERS[place][look.index]
            axes.plot(raw["capacities"], found[name], color=color, linewidth=1.4, label=name)
        color = MEMLANE["memlane"][look.index]
        axes.plot(raw["capacities"], found["tuned"], color=color, linewidth=2.4, label="tuned")
        axes.set_xscale("log")
        axes.set_xticks([1000, 3000, 10_000, 30_000], ["1,000", "3,000", "10,000", "30,000"])
        axes.minorticks_off()
        _label(axes, f"blocks, {trace} trace", "")
    both[0].set_ylabel("prefix hits, % of accesses")
    _title(
        figure, "What eviction policies hit (dotted: hits of an algorithm that knows the future)"
    )
    _legend(both[0], look, "outside right upper")


FIGURES: dict[str, Callable[[dict[str, Any], Figure, Look], None]] = {
    "idle": idle,
    "deaths": deaths,
    "leftovers": leftovers,
    "tail": tail,
    "sizes": sizes,
    "growth": growth,
    "engine": engine,
    "policies": policies,
}
WIDE = ("sizes", "growth", "engine", "policies")


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def _title(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.01, ha="left", fontsize=12, fontweight="bold")


def _legend(axes: Axes, look: Look, place: str) -> None:
    handles, labels = axes.get_legend_handles_labels()
    where = axes.figure if place.startswith("outside") else axes
    where.legend(
        handles[::-1], labels[::-1], loc=place, fontsize=9, framealpha=0.8, facecolor=look.paper
    )


def draw(name: str, raw: dict[str, Any], folder: Path) -> Iterator[Path]:
    """Writes NAME-light.svg and NAME-dark.svg to the folder; yields their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    for look in LOOKS:
        settings: dict[str, Any] = {
            "svg.hashsalt": name,
            "font.family": "DejaVu Sans",
            "text.color": look.ink,
            "axes.labelcolor": look.ink,
            "axes.edgecolor": look.faint,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": look.faint,
            "grid.linewidth": 0.6,
            "xtick.color": look.ink,
            "ytick.color": look.ink,
            "legend.edgecolor": look.faint,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.facecolor": look.paper,
            "figure.facecolor": look.paper,
        }
        with mpl.rc_context(settings):
            figure = Figure(figsize=(10 if name in WIDE else 8, 4.6), layout="constrained")
            FIGURES[name](raw, figure, look)
            where = f"{raw['machine']}; {raw['date']}; {raw['command']}"
            figure.supxlabel(where, fontsize=7, x=0.01, ha="left", color=look.ink)
            path = folder / f"{name}-{look.name}.svg"
            figure.savefig(path, metadata={"Date": None})
            yield path
