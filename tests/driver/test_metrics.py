"""The exporter: every name is one that Prometheus takes, every value one of `stats()`, and no poll costs or ends anything."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import memra_pp
from memra_pp.driver.figures import metrics
from memra_pp.driver.figures.metrics import METRICS, PIPELINE, Exporter, Metric
from memra_pp.errors import StageError

WAIT_S = 60.0
GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())
UNITS = ("bytes", "seconds", "ratio", "tokens")
Series = tuple[str, tuple[tuple[str, str], ...]]


class Board:
    """A sink that adds up what it is told."""

    def __init__(self) -> None:
        self.values: dict[Series, float] = {}
        self.polls = 0
        self._news = threading.Condition()

    def gauge(self, metric: Metric, tags: Mapping[str, str], value: float) -> None:
        assert not metric.counter and tuple(tags) == metric.tags
        with self._news:
            self.polls += metric is METRICS[0] and tags["state"] == "ready"  # the first that every poll tells
            self.values[metric.name, tuple(tags.items())] = value
            self._news.notify_all()

    def count(self, metric: Metric, tags: Mapping[str, str], more: float) -> None:
        assert metric.counter and tuple(tags) == metric.tags and more > 0
        series = metric.name, tuple(tags.items())
        self.values[series] = self.values.get(series, 0) + more

    def next_poll(self) -> None:
        """Waits until one that began after this call has told everything."""
        with self._news:
            seen = self.polls
            assert self._news.wait_for(lambda: self.polls > seen + 2, WAIT_S)

    def of(self, name: str, **tags: str) -> float:
        return self.values[name, tuple(tags.items())]


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "EVERY_S", 0.01)


@pytest.fixture
def pipe(hybrid: Path) -> Iterator[memra_pp.Pipeline]:
    with memra_pp.launch(hybrid, stages=2, backend="local", threads=1, budget_bytes=300_000) as made:
        yield made


@pytest.fixture
def board(pipe: memra_pp.Pipeline) -> Board:
    """What an exporter of the pipeline tells."""
    made = Board()
    pipe.watchers.append(Exporter(pipe.report, made))
    return made


def expected(stats: dict[str, Any], health: dict[str, Any]) -> dict[Series, float]:
    """Every series of some figures that is not a count of 0, told independently of `METRICS.read` where it matters."""
    told = {**stats, "health": health}
    return {
        (metric.name, tuple(tags.items())): value
        for metric in METRICS
        for tags, value in metric.samples(told)
        if value or not metric.counter
    }


def test_names_units_and_types_are_those_of_prometheus() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"memra_pp_[a-z][a-z_]*[a-z]", metric.name) and metric.help.endswith(".")
        assert not metric.name.endswith(("_count", "_sum", "_bucket", "_info")) and PIPELINE not in metric.tags
        base = metric.name.removesuffix("_total")
        assert not any(f"_{unit}_" in base for unit in ("bytes", "seconds", "ratio"))  # a unit comes last
        assert metric.counter or not base.endswith("seconds")


def test_every_value_is_one_of_the_figures(pipe: memra_pp.Pipeline, board: Board) -> None:
    with pipe.open([5, 6, 7] * 8, max_new_tokens=40, speculate=2) as session:
        list(session.generate(20, GREEDY, memra_pp.Draft(k=2)))
        with pytest.raises(memra_pp.AdmissionError):
            pipe.open([5], max_new_tokens=16000)
        board.next_poll()
        stats = pipe.stats()
        assert board.values == expected(stats, pipe.health())
        stage, [why] = stats["stages"][1], stats["admission"]["reasons"]
        assert board.of("memra_pp_stage_cache_bytes", stage="1", device="cpu:1", kind="snapshot") == stage["bytes"]["snapshot"]
        assert board.of("memra_pp_stage_rows_total", stage="1", device="cpu:1") == stage["rows"] > 0
        assert board.of("memra_pp_tokens_total") == 20 and board.of("memra_pp_drafted_tokens_total") == stats["drafted"] > 0
        assert board.of("memra_pp_not_admitted_total", verdict="refused", stage=str(why["stage"]), reason=why["reason"]) == 1
        assert board.of("memra_pp_state", state="ready") == 1 and board.of("memra_pp_state", state="failed") == 0
        assert board.of("memra_pp_device_bytes", device="cpu:0", kind="reserved") == stats["stages"][0]["allocated_bytes"]
        assert board.of("memra_pp_hop_seconds_total") == stats["hop_s"] > 0
    board.next_poll()
    assert board.of("memra_pp_sessions") == 0


@pytest.mark.parametrize("where", ["between stages", "in a stage"])
def test_the_time_of_hops_is_what_no_stage_was_at(pipe: memra_pp.Pipeline, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    worker = pipe.chain._workers[1]  # type: ignore[attr-defined]
    slow = (pipe.chain, "_send") if where == "between stages" else (worker.model, "forward")
    call = getattr(*slow)

    def slowly(*args: Any) -> Any:
        time.sleep(0.2)
        return call(*args)

    with pipe.open([5, 6, 7], max_new_tokens=8) as session:
        before = pipe.stats()
        monkeypatch.setattr(*slow, slowly)
        began = time.monotonic()
        session.prefill()
        took, after = time.monotonic() - began, pipe.stats()
        monkeypatch.undo()
    frames = after["traversals"] - before["traversals"]
    assert frames > 0 and after["hops"] - before["hops"] == 3 * frames
    busy = sum(stage["busy_s"] for stage in after["stages"]) - sum(stage["busy_s"] for stage in before["stages"])
    hops = after["hop_s"] - before["hop_s"]
    assert (hops if where == "between stages" else busy) >= 0.2
    assert hops + busy <= took + 1e-3


def test_while_no_stage_answers_the_state_is_told_alone(
    pipe: memra_pp.Pipeline, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    board.next_poll()
    health = pipe.health() | {"state": "recovering", "recoveries": 1}
    monkeypatch.setattr(pipe.report, "stats", raising(StageError("stage 1 is being replaced")))
    monkeypatch.setattr(pipe.report, "health", lambda: health)
    board.values.clear()
    board.next_poll()
    assert set(board.values) == {("memra_pp_recoveries_total", ())} | {
        ("memra_pp_state", (("state", state),)) for state in ("ready", "recovering", "failed")
    }
    assert board.of("memra_pp_state", state="recovering") == board.of("memra_pp_recoveries_total") == 1
    monkeypatch.undo()
    board.next_poll()
    assert board.of("memra_pp_state", state="ready") == 1 and board.of("memra_pp_sessions") == 0


def raising(error: Exception) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it


def test_a_stage_that_begins_anew_takes_nothing_from_a_count(
    pipe: memra_pp.Pipeline, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = pipe.stats()
    for rows in (10, 25, 4, 4, 6):
        stages = [{**stage, "rows": rows} for stage in stats["stages"]]
        monkeypatch.setattr(pipe.report, "stats", lambda stages=stages: {**stats, "stages": stages})
        board.next_poll()
    assert board.of("memra_pp_stage_rows_total", stage="0", device="cpu:0") == 25 + 6


def test_a_sink_that_fails_once_is_asked_again(pipe: memra_pp.Pipeline, board: Board, monkeypatch: pytest.MonkeyPatch) -> None:
    gauge, failed = board.gauge, threading.Event()

    def failing(*args: Any) -> None:
        if not failed.is_set():
            failed.set()
            raise RuntimeError("no room for another metric")
        gauge(*args)

    monkeypatch.setattr(board, "gauge", failing)
    assert failed.wait(WAIT_S)
    board.next_poll()


def test_a_close_does_not_wait_for_a_poll_and_nothing_is_told_after_it(
    pipe: memra_pp.Pipeline, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    board.next_poll()
    asked, go = threading.Event(), threading.Event()

    def slowly() -> dict[str, Any]:
        asked.set()
        assert go.wait(WAIT_S)
        raise StageError("this pipeline is closed")

    monkeypatch.setattr(pipe.report, "stats", slowly)
    assert asked.wait(WAIT_S)
    close = pipe.chain.close
    told = board.values.copy()
    monkeypatch.setattr(pipe.chain, "close", lambda: (close(), go.set()))  # what a chain does to those who ask it
    pipe.close()
    assert board.values == told and not [thread for thread in threading.enumerate() if thread.name == "metrics"]


def test_the_local_backend_exports_nothing_of_itself(pipe: memra_pp.Pipeline) -> None:
    assert not [watcher for watcher in pipe.watchers if isinstance(watcher, Exporter)]
