"""Metrics by way of Ray: what a node exports over HTTP is what the pipeline says of itself, also after a stage is lost."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import memra_pp
from memra_pp.driver.figures.metrics import METRICS, PIPELINE, Exporter
from memra_pp.errors import AdmissionError

pytestmark = pytest.mark.cluster

WAIT_S = 60.0
GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())
Scraped = dict[str, dict[frozenset[tuple[str, str]], float]]
OWN = {PIPELINE, *(tag for metric in METRICS for tag in metric.tags)}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's own processes report every second, not every ten."""
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "1000")


@pytest.fixture
def pipe(hybrid: Path, quick: None) -> Iterator[memra_pp.Pipeline]:
    with memra_pp.launch(hybrid, stages=2, threads=1, budget_bytes=300_000) as made:
        yield made


def scraped() -> Scraped:
    """What this process's node exports of pipelines: names, and values by their tags."""
    import ray
    from prometheus_client.parser import text_string_to_metric_families

    here = ray.get_runtime_context().get_node_id()
    [port] = [node["MetricsExportPort"] for node in ray.nodes() if node["NodeID"] == here]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
        text = answer.read().decode()
    found: Scraped = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("ray_memra_pp_"):
                tags = frozenset((tag, value) for tag, value in sample.labels.items() if tag in OWN)
                found.setdefault(sample.name, {})[tags] = sample.value
    return found


def until(found: Callable[[], Any], wanted: Callable[[], Any]) -> None:
    """Looks until the two are the same: what is exported is some seconds old."""
    deadline = time.monotonic() + WAIT_S
    while (seen := found()) != wanted() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert seen == wanted()


def expected(pipe: memra_pp.Pipeline) -> Scraped:
    """What the pipeline says of itself, as it is exported."""
    figures = {**pipe.stats(), "health": pipe.health()}
    [exporter] = [watcher for watcher in pipe.watchers if isinstance(watcher, Exporter)]
    own = (PIPELINE, exporter._sink.pipeline)  # type: ignore[attr-defined]
    told: Scraped = {}
    for metric in METRICS:
        samples = [(tags, float(value)) for tags, value in metric.samples(figures) if value or not metric.counter]
        series: Any = {frozenset([own, *tags.items()]): pytest.approx(value) for tags, value in samples}
        if series:
            told["ray_" + metric.name] = series
    return told


def total(found: Scraped, name: str, **tags: str) -> float:
    return sum(value for of, value in found.get(f"ray_memra_pp_{name}", {}).items() if tags.items() <= dict(of).items())


def test_what_ray_exports_is_what_the_pipeline_says_of_itself(pipe: memra_pp.Pipeline) -> None:
    with pipe.open([5, 6, 7] * 8, max_new_tokens=40, speculate=2) as session:
        list(session.generate(20, GREEDY, memra_pp.Draft(k=2)))
        with pytest.raises(AdmissionError):
            pipe.open([5], max_new_tokens=16000)
        until(scraped, lambda: expected(pipe))
        found, stats = scraped(), pipe.stats()
        for stage in stats["stages"]:
            assert total(found, "stage_cache_bytes", stage=str(stage["stage"])) == stage["allocated_bytes"] > 0
        assert total(found, "tokens_total") == 20 and total(found, "drafted_tokens_total") == stats["drafted"] > 0
        assert total(found, "not_admitted_total", verdict="refused", reason="bytes") == 1

        os.kill(stats["stages"][1]["pid"], signal.SIGKILL)
        made: list[Any] = list(session.generate(10, GREEDY))
        assert len(made) == 10
        until(lambda: total(scraped(), "recoveries_total"), lambda: 1)
        until(lambda: total(scraped(), "state", state="ready"), lambda: 1)
        found = scraped()
        assert total(found, "rebuilds_total") == pipe.stats()["rebuilds"] == 1 and total(found, "state") == 1
        rows = total(found, "stage_rows_total", stage="1")
        until(lambda: total(scraped(), "tokens_total"), lambda: 30)
        assert total(scraped(), "stage_rows_total", stage="1") >= rows >= stats["stages"][1]["rows"]
