"""`python -m benchmarks.figures [NAME ...] [--draw-only]`: measures, then draws; all by default."""

from __future__ import annotations

import argparse
import datetime
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import needs
from benchmarks.command import RESULTS, say
from benchmarks.figures import deaths, engine, growth, idle, leftovers, policies, sizes, tail
from benchmarks.machine import describe
from benchmarks.report import load_warning

MEASURE: dict[str, Callable[[], dict[str, Any]]] = {
    "idle": idle.measure,
    "deaths": deaths.measure,
    "leftovers": leftovers.measure,
    "tail": tail.measure,
    "sizes": sizes.measure,
    "growth": growth.measure,
    "engine": engine.measure,
    "policies": policies.measure,
}
_NEEDY = ("engine", "policies")  # they need more than this checkout
RAW = RESULTS / "figures"
PICTURES = Path(__file__).parents[2] / "docs" / "figures"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MEASURE))
    parser.add_argument("--draw-only", action="store_true", help="draw what was measured before")
    asked = parser.parse_args()
    names = asked.names or [name for name in MEASURE if name not in _NEEDY or asked.draw_only]
    if unknown := [name for name in names if name not in MEASURE]:
        parser.error(f"no figure {unknown[0]}; there are {', '.join(MEASURE)}")
    needs.package("matplotlib", "drawing")
    from benchmarks.figures import draw

    for name in names:
        if not asked.draw_only:
            if warning := load_warning(os.getloadavg()[0]):
                say(warning)
            say(f"{name}: measuring")
            raw = {
                "machine": describe(),
                "date": datetime.date.today().isoformat(),
                "command": f"python -m benchmarks.figures {name}",
                **MEASURE[name](),
            }
            RAW.mkdir(exist_ok=True)
            (RAW / f"{name}.json").write_text(json.dumps(raw, separators=(",", ":")) + "\n")
        if (RAW / f"{name}.json").exists():
            raw = json.loads((RAW / f"{name}.json").read_text())
            say(f"{name}: {draw.draw(name, raw, PICTURES)}")


if __name__ == "__main__":
    main()
