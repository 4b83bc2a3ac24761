"""Runs the tests in groups, several at once, and counts them: `make test`, when all is built.

    python -m tests.run [-m MARKS] [--jobs N] [PATH ...]

A group is one process with a /dev/shm of its own (`own_shm.sh`): pytest with some files, or ctest
with the C++ tests (PATH `native`). What took long in the last run begins first. The output of a
group is printed when the group has ended; a group that prints nothing for `SILENT` seconds is
aborted, which makes pytest print all stacks. The last lines name what failed, what was missing and
the command that brings it, and the sum. With MARKS all files are one group, as most have no such
test.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
WORK = ROOT / "build/tests"
LAST_RUN = WORK / "seconds.json"  # by file
NATIVE = "native"
OTHERS = ("fresh", "gpu")  # folders with targets of their own
BATCH = 60.0
"""Seconds that the files of a group take together; one that takes longer is alone."""
NO_PLUGINS = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Looking for plugins among the installed packages takes longer than pytest's own start."""
SILENT = 2000.0
"""Seconds without output after which a group hangs: a test's deadline is 600, in C++ 1800."""
USUAL = 4.0
"""Seconds of a file that has not run here, unless it is one of these."""
LONG = {
    NATIVE: 150.0,
    "tests/base/test_exit_is_death.py": 15.0,
    "tests/base/test_failed_starts.py": 30.0,
    "tests/base/test_failing_calls.py": 35.0,
    "tests/base/test_full_shm.py": 30.0,
    "tests/base/test_import.py": 20.0,
    "tests/base/test_sweep.py": 15.0,
    "tests/base/test_timeout_rule.py": 25.0,
    "tests/broadcast/test_latest.py": 15.0,
    "tests/cli/test_command_line.py": 30.0,
    "tests/cli/test_export.py": 40.0,
    "tests/crash/test_every_point.py": 50.0,
    "tests/docs/test_examples.py": 35.0,
    "tests/engines/test_sglang.py": 50.0,
    "tests/engines/test_sglang_tiers.py": 15.0,
    "tests/engines/test_stuck_in_engines.py": 15.0,
    "tests/engines/test_vllm.py": 135.0,
    "tests/engines/test_vllm_own.py": 40.0,
    "tests/engines/test_vllm_region.py": 90.0,
    "tests/engines/test_vllm_remote_tiers.py": 105.0,
    "tests/engines/test_vllm_store.py": 95.0,
    "tests/engines/test_vllm_tiers.py": 15.0,
    "tests/examples/test_ending.py": 40.0,
    "tests/examples/test_engine.py": 35.0,
    "tests/examples/test_hosts.py": 65.0,
    "tests/examples/test_live.py": 25.0,
    "tests/examples/test_offload.py": 45.0,
    "tests/fuzz/test_targets.py": 45.0,
    "tests/groups/test_missing.py": 20.0,
    "tests/groups/test_strangers.py": 15.0,
    "tests/house/test_checkers.py": 15.0,
    "tests/inspect/test_same_words.py": 25.0,
    "tests/inspect/test_usual_hangs.py": 40.0,
    "tests/network/test_awaiting.py": 60.0,
    "tests/network/test_costs.py": 20.0,
    "tests/network/test_deaths.py": 35.0,
    "tests/network/test_ends.py": 15.0,
    "tests/network/test_queue.py": 15.0,
    "tests/network/test_reach.py": 15.0,
    "tests/network/test_relay.py": 35.0,
    "tests/network/test_relay_hosts.py": 30.0,
    "tests/network/test_replaced.py": 40.0,
    "tests/network/test_stops.py": 15.0,
    "tests/network/test_strangers.py": 15.0,
    "tests/network/test_streams.py": 15.0,
    "tests/store/test_serde_round_trip.py": 15.0,
    "tests/tiers/test_disk_tier.py": 20.0,
    "tests/tiers/test_disk_tier_faults.py": 25.0,
    "tests/tiers/test_mooncake_tier.py": 55.0,
    "tests/tiers/test_object_tier.py": 35.0,
    "tests/tiers/test_redis_tier.py": 35.0,
    "tests/tiers/test_tier_chain.py": 50.0,
}


@dataclass
class Group:
    """A command that writes a JUnit report, and the files that it tests."""

    files: list[str]
    command: list[str]
    report: Path
    expected: float  # seconds
    took: float = 0.0
    computed: float = 0.0  # seconds of a core, of all its processes

    @property
    def name(self) -> str:
        return self.files[0] + (f" and {len(self.files) - 1} more" if self.files[1:] else "")

    def __str__(self) -> str:
        return f"{self.took:.0f} s, {self.computed:.0f} s of a core"

    def run(self, options: dict[str, Any]) -> tuple[int, str]:
        """Returns the exit status and what was printed.

        What it prints goes to a file: a process that a test left behind may still hold it open.
        """
        self.report.unlink(missing_ok=True)
        begin = time.monotonic()
        with (
            self.report.with_suffix(".log").open("w+", errors="replace") as log,
            subprocess.Popen(
                [str(ROOT / "tests/own_shm.sh"), *self.command],
                cwd=ROOT,
                **options,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            ) as process,
        ):
            _running.add(process)
            self._wait(process, log)
            _running.discard(process)
            self.took = time.monotonic() - begin
            log.seek(0)
            return process.returncode, log.read()

    def _wait(self, process: subprocess.Popen[bytes], log: TextIO) -> None:
        size = -1
        ends = select.poll()
        with open(os.pidfd_open(process.pid)) as ended:
            ends.register(ended, select.POLLIN)
            while not ends.poll(1000 * SILENT):
                before, size = size, os.fstat(log.fileno()).st_size
                if size == before:
                    process.send_signal(signal.SIGABRT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.computed = usage.ru_utime + usage.ru_stime


_running: set[subprocess.Popen[bytes]] = set()


@dataclass(frozen=True)
class Case:
    """One test of a report; `reason` says why it was skipped."""

    file: str
    name: str
    seconds: float
    failed: bool
    reason: str


@dataclass
class Outcome:
    """The results of the tests of some groups."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    seconds: dict[str, float] = field(default_factory=dict)  # by file

    def add(self, group: Group, status: int) -> None:
        """Reads the group's report. A group that ran no test, or ended early, has failed."""
        cases = list(_cases(group))
        failed = [f"{case.file}::{case.name}" for case in cases if case.failed]
        if not cases:
            failed = [f"{group.name}: no test ran, exit status {status}"]
        elif status not in (0, 5) and not failed:  # 5: all of its files were skipped as a whole
            failed = [f"{group.name}: exit status {status}"]
        self.failed += failed
        self.skipped.update(case.reason for case in cases if case.reason)
        self.passed += sum(not case.failed and not case.reason for case in cases)
        for case in cases:
            self.seconds[case.file] = self.seconds.get(case.file, 0.0) + case.seconds

    def __str__(self) -> str:
        lines = [f"failed: {name}" for name in sorted(self.failed)]
        lines += [f"{count} skipped: {reason}" for reason, count in self.skipped.most_common()]
        failed, skipped = len(self.failed), self.skipped.total()
        return "\n".join([*lines, f"{self.passed} passed, {failed} failed, {skipped} skipped"])


def _cases(group: Group) -> Iterator[Case]:
    if not group.report.exists():
        return
    for case in ElementTree.parse(group.report).iter("testcase"):
        module = (case.get("classname") or case.get("name") or "").replace(".", "/")
        file = next((file for file in group.files if module.startswith(file[:-3])), group.files[0])
        failed = case.find("failure") is not None or case.find("error") is not None
        skip = None if failed else case.find("skipped")
        reason = "" if skip is None else skip.get("message") or "no reason given"
        if skip is not None and reason == "collection skipped":  # text: (file, line, reason)
            reason = str(ast.literal_eval(skip.text or "")[2]).removeprefix("Skipped: ")
        yield Case(file, case.get("name") or "", float(case.get("time") or 0), failed, reason)


def groups_of(paths: list[Path], marks: str) -> list[Group]:
    """Groups of the files in the paths, the longest first."""
    seconds = {**LONG, **(json.loads(LAST_RUN.read_text()) if LAST_RUN.exists() else {})}
    files = {
        str(file.resolve().relative_to(ROOT))
        for path in paths
        for file in ([path] if str(path) == NATIVE or path.is_file() else path.rglob("test_*.py"))
    }
    made: list[Group] = []
    room = 0.0
    for file in sorted(files, key=lambda file: (_imports(file), file)):
        expected = seconds.get(file, USUAL)
        if file == NATIVE:
            made.insert(0, _native(expected))
        elif expected > BATCH and not marks:
            made.insert(0, _pytest(file, expected, marks))
        else:
            if room < expected and not (marks and made):
                made.append(_pytest(file, 0, marks))
                room = BATCH
            else:
                made[-1].files.append(file)
                made[-1].command.append(file)
            made[-1].expected += expected
            room -= expected
    return sorted(made, key=lambda group: -group.expected)


def _imports(file: str) -> tuple[bool, ...]:
    """Tells files by the packages that take seconds to import: those with the same are together."""
    text = "" if file == NATIVE else Path(file).read_text()
    return 'package("torch")' in text, "hypothesis" in text


def _pytest(file: str, expected: float, marks: str) -> Group:
    report = WORK / file.replace("/", ".").replace(".py", ".xml")
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider"),
        *("--continue-on-collection-errors", f"--junitxml={report}"),
        *(("-m", marks) if marks else ()),
        file,
    ]
    return Group([file], command, report, expected)


def _native(expected: float) -> Group:
    """The C++ tests, two at once."""
    ctest, report = Path(sys.executable).with_name("ctest"), WORK / "native.xml"
    command = [str(ctest), "--test-dir", str(ROOT / "build/native"), "--output-on-failure", "-j2"]
    return Group([NATIVE], [*command, "--output-junit", str(report)], report, expected)


def sharing_a_control(groups: list[Group]) -> dict[str, Any]:
    """Options of `Popen` for groups with one control of time, which ends with this process."""
    if all(group.files == [NATIVE] for group in groups):
        return {"env": NO_PLUGINS}
    from tests.support.punctual import SHARED, Control  # where only C++ is built is no pytest

    files = Control().files()
    return {"env": {**NO_PLUGINS, SHARED: " ".join(map(str, files))}, "pass_fds": files}


def run(groups: list[Group], jobs: int) -> Outcome:
    """Runs the groups in their order, `jobs` at once."""
    outcome, options = Outcome(), sharing_a_control(groups)
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(group.run, options): group for group in groups}
        try:
            for future in as_completed(futures):
                group, (status, output) = futures[future], future.result()
                print(f"\n== {group.name}: {group}\n{output.rstrip()}", flush=True)
                outcome.add(group, status)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(_running):
                process.terminate()
            raise
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.run", description=__doc__)
    parser.add_argument("-m", dest="marks", default="", help="only tests with these marks")
    parser.add_argument("--jobs", type=int, default=2 + 2 * len(os.sched_getaffinity(0)))
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH")
    options = parser.parse_args()
    os.chdir(ROOT)
    WORK.mkdir(parents=True, exist_ok=True)
    folders = [
        path for path in Path("tests").iterdir() if path.is_dir() and path.name not in OTHERS
    ]
    everything = folders if options.marks else [*folders, Path(NATIVE)]
    if absent := [str(path) for path in options.paths if not path.exists()]:
        parser.error(f"there is no {', '.join(absent)}")
    groups = groups_of(options.paths or everything, options.marks)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    begin = time.monotonic()
    outcome = run(groups, options.jobs)
    if not options.marks:
        before = json.loads(LAST_RUN.read_text()) if LAST_RUN.exists() else {}
        LAST_RUN.write_text(json.dumps({**before, **outcome.seconds}, indent=0))
    computed = sum(group.computed for group in groups)
    took = time.monotonic() - begin
    print(f"\n{len(groups)} groups in {took:.0f} s, {computed:.0f} s of a core\n{outcome}")
    return 1 if outcome.failed or not groups else 0


if __name__ == "__main__":
    sys.exit(main())
