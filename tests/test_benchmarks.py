"""The benches can be run, and their tables say what was found. The figures themselves are nothing to test."""

from __future__ import annotations

import importlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
BENCHES = sorted(path.stem for path in FOLDER.glob("bench_*.py"))
QUICKEST = (["bench_admission"], ["bench_snapshot"], ["bench_mix", "--backend", "local"])
WAIT_S = 120


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module `_report`, while the benches' folder can be imported from."""
    monkeypatch.syspath_prepend(FOLDER)
    yield importlib.import_module("_report")


@pytest.mark.usefixtures("report")
@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_can_be_imported_without_running(name: str) -> None:
    assert callable(importlib.import_module(name).main)


@pytest.mark.parametrize("command", QUICKEST, ids=lambda command: command[0])
def test_the_quickest_print_their_figures(command: list[str]) -> None:
    name, *options = command
    ran = subprocess.run(
        [sys.executable, str(FOLDER / f"{name}.py"), "--quick", "--json", "-", *options],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["title"] and found["rows"]
    for row in found["rows"]:
        assert math.isfinite(row["value"]) and (row["peer_value"] is None or row["ratio"] > 0)


@pytest.mark.parametrize(
    ("figures", "ratio", "target", "met"),
    [
        ({"value": 9.0, "peer_value": 5.0, "at_least": 1.8}, 1.8, ">= 1.8", True),
        ({"value": 8.0, "peer_value": 5.0, "at_least": 1.8}, 1.6, ">= 1.8", False),
        ({"value": 8.0, "peer_value": 5.0, "at_most": 2.0}, 1.6, "<= 2", True),
        ({"value": 1.0, "at_most": 0}, None, "<= 0", False),
        ({"value": 0.0, "at_most": 0}, None, "<= 0", True),
        ({"value": 8.0, "peer_value": 5.0}, 1.6, "", None),
    ],
)
def test_a_target_bounds_the_ratio_or_the_value_alone(
    report: Any, figures: dict[str, float], ratio: float | None, target: str, met: bool | None
) -> None:
    row = report.Row(what="this", unit="ms", **figures)
    assert (row.ratio, row.target, row.met) == (ratio, target, met)


def test_a_missed_target_is_seen_in_the_table_and_in_the_whole(report: Any) -> None:
    made = report.Report("Title", axis="stages")
    made.add("steps", 1234.5, "steps/s", at=2, peer="ideal", peer_value=2469.0, at_least=0.9)
    title, heading, line = made.table().splitlines()
    assert title == "Title" and heading.split()[:2] == ["what", "stages"]
    assert line.split() == ["steps", "2", "1,234", "steps/s", "2,469", "ideal", "0.500", ">=", "0.9", "NO"]
    assert not made.met


def test_a_plot_without_matplotlib_is_refused_before_anything_runs(
    report: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        report.parser("A bench.").parse_args(["--plot", "plot.png"])
    assert "pip install 'memra-pp[plot]'" in capsys.readouterr().err
