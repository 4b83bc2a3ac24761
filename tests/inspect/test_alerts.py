"""The alert rules on made-up series, in virtual time, by Prometheus' own tool."""

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from tests.support.missing import needed

pytestmark = needed("Prometheus", shutil.which("promtool") is not None)
SAMPLES = 120  # one a minute


def growing(**per_minute: int) -> list[dict[str, str]]:
    """Counters of one tier for two hours."""
    return [
        {"series": f'memlane_tier_{name}_total{{tier="t"}}', "values": f"0+{step}x{SAMPLES}"}
        for name, step in per_minute.items()
    ]


@pytest.mark.parametrize(
    ("series", "fires"),
    [
        (growing(accesses=100, hits=0, stored=0), True),
        (growing(accesses=100, hits=50, stored=0), True),
        (growing(accesses=100, hits=0, stored=99), False),
        (growing(accesses=100, hits=100, stored=0), False),  # nothing is missing
        (growing(accesses=1, hits=0, stored=0), False),  # hardly anybody asks
    ],
)
def test_a_tier_that_keeps_nothing(
    series: list[dict[str, str]], fires: bool, tmp_path: Path
) -> None:
    assert alerts(series, "MemlaneTierKeepsNothing", tmp_path) == fires


@pytest.mark.parametrize(
    ("series", "fires"),
    [
        (growing(errors=10, expired=0, stored=0), True),
        (growing(errors=0, expired=10, stored=5), True),
        (growing(errors=1, expired=1, stored=100), False),
        (growing(errors=0, expired=0, stored=0), False),
    ],
)
def test_a_tier_whose_stores_fail(
    series: list[dict[str, str]], fires: bool, tmp_path: Path
) -> None:
    assert alerts(series, "MemlaneTierStoresFail", tmp_path) == fires


@pytest.mark.parametrize(("value", "fires"), [(1, True), (0, False)])
@pytest.mark.parametrize("gauge", ["left_out", "detached"])
def test_a_tier_that_is_left_out_or_whose_files_are_gone(
    gauge: str, value: int, fires: bool, tmp_path: Path
) -> None:
    series = [{"series": f'memlane_tier_{gauge}{{tier="t"}}', "values": f"{value}x{SAMPLES}"}]
    alert = {"left_out": "MemlaneTierLeftOut", "detached": "MemlaneTierDetached"}[gauge]
    assert alerts(series, alert, tmp_path) == fires


@pytest.mark.parametrize(
    ("values", "fires"), [(f"0x{SAMPLES - 3} 1x3", True), (f"0x{SAMPLES}", False)]
)
def test_a_death_that_has_ended_its_engine(values: str, fires: bool, tmp_path: Path) -> None:
    """The queue is gone, and the exporter still says so."""
    name = "memlane_queue_deaths_total"
    series = [{"series": f'{name}{{queue="steps",role="reader"}}', "values": values}]
    assert alerts(series, "MemlaneProcessDied", tmp_path) == fires


@pytest.mark.parametrize(("value", "fires"), [(600, False), (3600, True)])
def test_a_start_is_no_stall_and_late_after_half_an_hour(
    value: int, fires: bool, tmp_path: Path
) -> None:
    series = [{"series": 'memlane_starting_seconds{queue="q"}', "values": f"{value}x{SAMPLES}"}]
    assert alerts(series, "MemlaneStartIsLate", tmp_path) == fires
    assert not alerts(series, "MemlaneStuck", tmp_path)


def alerts(series: list[dict[str, str]], name: str, folder: Path) -> bool:
    """Returns whether that alert fires after two hours."""
    (folder / "alerts.yml").write_text((files("memlane.metrics") / "alerts.yml").read_text())
    query = f'count(ALERTS{{alertname="{name}", alertstate="firing"}}) or vector(0)'

    def holds(number: int) -> bool:
        expected = [{"expr": query, "eval_time": "2h", "exp_samples": [sample(number)]}]
        test = {"interval": "1m", "input_series": series, "promql_expr_test": expected}
        whole = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": [test]}
        (folder / "test.yml").write_text(json.dumps(whole))  # JSON is YAML
        command = ["promtool", "test", "rules", "test.yml"]
        run = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert run.returncode == 0 or "FAILED" in run.stdout + run.stderr, run.stderr
        return run.returncode == 0

    assert holds(0) != holds(1)
    return holds(1)


def sample(value: int) -> dict[str, Any]:
    return {"labels": "{}", "value": value}
