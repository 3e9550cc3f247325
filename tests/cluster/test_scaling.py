"""The scaling command: what it forecasts and what fits, and what it measures beside its simulation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from processes import MARK, marked

from benchmarks._report import Report
from cluster import scaling
from cluster.hardware import Hardware, Model, forecast
from memra_pp.admission import plan
from memra_pp.config import ModelConfig
from memra_pp.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def llama(data: Path) -> Model:
    return Model.of(ModelConfig.from_hf(data / "configs" / "llama3_1-70b.json"), ctx=4096, batch=2)


def test_what_fits_is_what_the_planner_says(llama: Model) -> None:
    hardware = Hardware()
    whole = plan(llama.cfg, [int(hardware.memory)] * 8, 4096, policy=llama.policy, weights=llama.weights).even
    assert forecast(llama, hardware, 8).fit == whole.sessions
    deep = llama.repeated(3, 12)
    repeated = plan(deep.cfg, [int(hardware.memory)] * 12, 4096, policy=llama.policy, weights=deep.weights).even
    seen = forecast(llama, hardware, 12, layers=3)
    assert (seen.fit, seen.layers) == (repeated.sessions, 3)


def test_no_more_sessions_are_served_than_fit_and_no_more_tokens_than_the_slowest_stage_makes(llama: Model) -> None:
    many = forecast(replace(llama, ctx=131072, batch=64), Hardware(), 8)
    assert many.served == many.fit and many.outcome.pace.tokens_per_s < many.ideal
    few = forecast(llama, replace(Hardware(), jitter=0.0, inside_s=0.0, between_s=0.0, turnaround_s=0.0), 8)
    assert few.served == 16 and few.outcome.pace.tokens_per_s == pytest.approx(few.ideal, rel=0.01)


def test_slower_memory_links_and_drivers_are_slower(llama: Model) -> None:
    fast = Hardware(jitter=0.0)
    base = forecast(llama, fast, 16).outcome.pace.tokens_per_s
    for slower in ({"memory_bytes_per_s": 1e12}, {"between_bytes_per_s": 1e6}, {"inside_s": 0.01}, {"driver_entry_s": 0.01}):
        assert forecast(llama, replace(fast, **slower), 16).outcome.pace.tokens_per_s < 0.9 * base, slower


def test_where_not_one_session_fits_it_is_refused(llama: Model) -> None:
    with pytest.raises(ConfigError, match="no session"):
        forecast(llama, Hardware(memory=16 * 2**30), 8)


def test_hardware_is_the_default_but_what_a_file_and_flags_say(tmp_path: Path) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text("memory: 5.0e+10\njitter: 0.1\n")
    read = Hardware.read(str(file), {"jitter": 0.2})
    assert (read.memory, read.jitter, read.flops) == (5e10, 0.2, Hardware().flops)


@pytest.mark.parametrize("text", ["memroy: 1", "- 1", "memory: -1", "memory: much", "memory: [", "per_node: 0"])
def test_bad_hardware_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "hardware.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        Hardware.read(str(file), {})


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> Any:
    """What the command exits with."""
    monkeypatch.setattr(sys, "argv", ["scaling", *args])
    with pytest.raises(SystemExit) as ended:
        scaling.main()
    return ended.value.code


def test_more_gpus_than_layers_get_a_layer_each(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hybrid: Path) -> None:
    out = tmp_path / "out.json"
    code = run(
        monkeypatch, "simulate", "--model", str(hybrid / "config.json"), "--gpus", "4,16", "--batch", "2", "--json", str(out)
    )
    told = json.loads(out.read_text())
    assert not code and told["inputs"]["memory"] == Hardware().memory
    layers = {row["at"]: row["value"] for row in told["rows"] if row["what"].startswith("layers")}
    assert layers == {4: 2, 16: 1}
    assert all(row["ratio"] <= 1 for row in told["rows"] if row["what"] == "throughput")


def test_a_bad_model_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "nowhere.json" in run(monkeypatch, "simulate", "--model", "nowhere.json")


@pytest.mark.parametrize(("measured", "code"), [(95.0, 0), (105.0, 0), (89.0, 1), (112.0, 1)])
def test_a_simulation_that_is_off_by_more_than_a_tenth_fails(
    monkeypatch: pytest.MonkeyPatch, measured: float, code: int
) -> None:
    report = Report("a run", "stages")
    scaling.compare(report, "throughput", "tok/s", [(1, 100.0, 100.0), (2, measured, 100.0)], within=scaling.OFF)
    monkeypatch.setattr(scaling, "measure", lambda stages, tokens: report)
    assert run(monkeypatch, "measure") == code


@pytest.mark.cluster
def test_measured_throughput_is_the_simulated_one_and_nothing_is_left(tmp_path: Path) -> None:
    out, mark = tmp_path / "out.json", uuid.uuid4().hex
    command = [sys.executable, "-m", "cluster.scaling", "measure", "--stages", "1,2,3", "--tokens", "30", "--json", str(out)]
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, MARK: mark}, capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [row["at"] for row in rows if row["what"] == "throughput" and row["met"]] == [1, 2, 3]
    assert all(row["value"] > 0 for row in rows)
    assert not marked(mark)
