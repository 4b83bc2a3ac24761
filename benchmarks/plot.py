"""Draws a run as an SVG picture of horizontal bars, for the README."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from benchmarks.results import RATES, Results
from memlane.cli.bench.measure import CellResult

# Payload, readers, measure, title, unit.
Panel = tuple[str, int, str, str, str]
PANEL_WIDTH, ROW, TOP, GAP = 460, 20, 34, 24
LABELS, VALUES = 120, 80
OURS, THEIRS, TEXT = "#1a7f64", "#b5bcc4", "#24292f"


def _panel(cell: CellResult, measure: str, title: str, unit: str, x: int, y: int) -> list[str]:
    medians = {
        name: number
        for name, figures in cell.peers.items()
        if (number := figures.median(measure)) is not None
    }
    longest = max(medians.values())
    room = PANEL_WIDTH - LABELS - VALUES
    lines = [f'<text x="{x}" y="{y + 16}" font-weight="bold">{escape(title)}</text>']
    order = sorted(medians, key=lambda name: medians[name], reverse=measure in RATES)
    for row, name in enumerate(order):
        top = y + TOP + row * ROW
        length = max(1.0, room * medians[name] / longest)
        color = OURS if name.startswith("memlane") else THEIRS
        baseline = top + ROW - 8
        lines += [
            f'<text x="{x + LABELS - 6}" y="{baseline}" text-anchor="end">{escape(name)}</text>',
            f'<rect x="{x + LABELS}" y="{top}" width="{length:.1f}" height="{ROW - 5}" '
            f'fill="{color}"/>',
            f'<text x="{x + LABELS + length + 5:.1f}" y="{baseline}">'
            f"{medians[name]:.3g} {unit}</text>",
        ]
    return lines


def svg(results: Results, panels: Sequence[Panel]) -> str | None:
    """The picture, or None if the run measured none of the panels."""
    found = [
        (cell, measure, title, unit)
        for payload, readers, measure, title, unit in panels
        if (cell := results.cell(payload, readers)) and cell.peers
    ]
    if not found:
        return None
    height = TOP + ROW * max(len(cell.peers) for cell, *_ in found) + GAP
    body: list[str] = []
    for place, (cell, measure, title, unit) in enumerate(found):
        column, row = place % 2, place // 2
        x, y = GAP + column * (PANEL_WIDTH + GAP), GAP // 2 + row * height
        body += _panel(cell, measure, title, unit, x, y)
    width = GAP + 2 * (PANEL_WIDTH + GAP)
    total = GAP + height * (1 + (len(found) - 1) // 2) + 16
    body.append(
        f'<text x="{GAP}" y="{total - 12}" font-size="11">{escape(results.machine)}; medians of '
        f"{results.rounds} rounds</text>"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {total}" '
            f'width="{width}" height="{total}" font-family="sans-serif" font-size="12" '
            f'fill="{TEXT}">',
            f'<rect width="{width}" height="{total}" fill="#ffffff"/>',
            *body,
            "</svg>",
            "",
        ]
    )
