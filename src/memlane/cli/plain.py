"""`memlane doctor` on the standard library alone, for where the extra is missing."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Sequence

from memlane.cli.doctor import Finding, report

USAGE = "usage: memlane doctor [--json]"


def lines(findings: Sequence[Finding]) -> list[str]:
    """What hurts first, each with its cure."""
    order = {"hurts": 0, "note": 1, "ok": 2}
    made = []
    for finding in sorted(findings, key=lambda finding: order[finding.level]):
        made.append(f"{finding.level:<5} {finding.topic}: {finding.text}")
        if finding.cure:
            made.append(f"      {finding.cure}")
    return made


def exit_code(findings: Sequence[Finding]) -> int:
    return int(any(finding.level == "hurts" for finding in findings))


def doctor(arguments: Sequence[str]) -> int:
    """Prints the report; returns the exit code."""
    if [*arguments] not in ([], ["--json"]):
        print(USAGE)
        return 0 if "--help" in arguments else 2
    found = report()
    if arguments:
        print(json.dumps(found.as_json(), indent=2))
    else:
        versions = ", ".join(f"{name} {text}" for name, text in found.versions.items())
        for line in [*lines(found.findings), f"ok    versions: {versions}"]:
            print(_wrapped(line))
    return exit_code(found.findings)


def _wrapped(line: str) -> str:
    """On a terminal, between words; a cure is one line, to be copied."""
    if not sys.stdout.isatty() or line.startswith("      "):
        return line
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, subsequent_indent=" " * 6, break_on_hyphens=False)
