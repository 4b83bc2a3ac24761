"""`memlane doctor` on the standard library alone, for where the extra is missing."""

from __future__ import annotations

import json
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
        print("\n".join(lines(found.findings)))
    return exit_code(found.findings)
