"""`cluster/grafana-dashboard.json`: Grafana can import it, and it draws every metric that there is, and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memra_pp.driver.figures.metrics import METRICS, PIPELINE

EXPORTED = "ray_"
"""What Ray puts before each name."""
NAME = re.compile(r"\b(?:ray_)?memra_pp_\w+")


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(__file__).parents[1] / "cluster" / "grafana-dashboard.json").read_text())
    return found


def drawn(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The expression and the legend of every target."""
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"], target["legendFormat"]


def test_it_has_what_an_import_needs(dashboard: dict[str, Any]) -> None:
    assert dashboard["title"] and dashboard["uid"] and dashboard["id"] is None and dashboard["schemaVersion"] >= 36
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    assert variables["pipeline"]["definition"] == f"label_values({EXPORTED}{METRICS[0].name}, {PIPELINE})"
    rows = [panel["title"] for panel in dashboard["panels"] if panel["type"] == "row"]
    assert rows == ["Serving", "Stages", "Bytes", "Admission", "Failures"]


def test_every_panel_has_a_place_of_its_own_a_data_source_and_something_to_draw(dashboard: dict[str, Any]) -> None:
    panels, taken = dashboard["panels"], set[tuple[int, int]]()
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24 and not cells & taken
        taken |= cells
        if panel["type"] != "row":
            assert panel["title"] and panel["description"].endswith(".") and panel["targets"]
            assert all(of["datasource"]["uid"] == "${datasource}" for of in (panel, *panel["targets"]))


def test_it_draws_every_metric_and_no_other(dashboard: dict[str, Any]) -> None:
    names = {name for expr, _ in drawn(dashboard) for name in NAME.findall(expr)}
    assert names == {EXPORTED + metric.name for metric in METRICS}


def test_it_asks_for_no_tag_that_a_metric_has_not(dashboard: dict[str, Any]) -> None:
    tags = {EXPORTED + metric.name: {PIPELINE, *metric.tags} for metric in METRICS}
    for expr, legend in drawn(dashboard):
        for by, name, selected in re.findall(r"by \(([^)]*)\) \((?:rate\()?(\w+)\{([^}]*)\}", expr):
            assert {*by.split(", ")} | {*re.findall(r"(\w+)(?:=|!)", selected)} <= tags[name], expr
            assert {*re.findall(r"\{\{(\w+)\}\}", legend)} <= {*by.split(", ")}, legend
        assert len(re.findall(r"by \(", expr)) == len(NAME.findall(expr)), expr


def test_counters_that_grow_often_are_drawn_as_rates_and_gauges_never(dashboard: dict[str, Any]) -> None:
    rare = {f"{EXPORTED}memra_pp_{name}_total" for name in ("recoveries", "rebuilds", "not_admitted", "stage_faults")}
    for expr, _ in drawn(dashboard):
        for rate, name in re.findall(r"(rate\()?((?:ray_)memra_pp_\w+)", expr):
            assert bool(rate) == (name.endswith("_total") and name not in rare), expr
