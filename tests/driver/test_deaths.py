"""Stages that are killed and stopped while sessions stream: every text as if nothing had been, and nothing left."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import memra_pp
from cluster import chaos
from memra_pp.errors import ConfigError, StageError

GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray of this module's own."""
    from memra_pp.driver.launch_ray_runtime import runtime

    runtime.acquire(6)
    yield
    runtime.release()


def pids(pipe: memra_pp.Pipeline) -> list[int]:
    return [stage["pid"] for stage in pipe.stats()["stages"]]


def test_twelve_kills_at_every_kind_of_moment_do_not_show(hybrid: Path) -> None:
    told: list[str] = []
    summary = chaos.run(hybrid, stages=3, kills=12, seed=12, sessions=8, say=told.append)
    print(*told, sep="\n")
    assert summary["recoveries"] >= 12 and summary["rebuilds"] > 0 and all(summary["texts"].values())


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stopped_stage_is_noticed_by_its_silence_and_replaced(cluster: None, hybrid: Path, stage: int) -> None:
    with memra_pp.launch(hybrid, stages=2, silence_timeout=1.5) as pipe:
        text = list(pipe.generate([5, 6, 7], max_new_tokens=20, sampling=GREEDY))
        tokens = pipe.generate([5, 6, 7], max_new_tokens=20, sampling=GREEDY)
        made = [next(tokens)]
        before = pids(pipe)
        os.kill(before[stage], signal.SIGSTOP)
        made += tokens
        after = pids(pipe)
        assert made == text and after[stage] != before[stage] and after[1 - stage] == before[1 - stage]
        last = pipe.health()["last_recovery"]
        assert f"stage {stage} " in last["lost"] and "silent" in last["lost"] and f"cpu:{stage}" in last["cause"]
        assert not Path(f"/proc/{before[stage]}").exists()


def test_a_stage_that_dies_while_nobody_calls_is_replaced_before_anybody_does(cluster: None, hybrid: Path) -> None:
    with memra_pp.launch(hybrid, stages=2) as pipe, pipe.open([5, 6, 7], max_new_tokens=20) as session:
        row = session.prefill()
        os.kill(pids(pipe)[1], signal.SIGKILL)
        while pipe.health()["epoch"] == 1 or not pipe.health()["ready"]:
            threading.Event().wait(0.01)
        assert all(s["allocated_bytes"] == s["planned_bytes"] > 0 for s in pipe.stats()["stages"])
        with pipe.open([5, 6, 7], max_new_tokens=20) as other:
            assert (other.prefill() == row).all() and (other.decode(9) == session.decode(9)).all()


def test_a_stage_that_is_lost_too_often_is_an_error_that_names_it(cluster: None, hybrid: Path) -> None:
    with memra_pp.launch(hybrid, stages=2, recoveries=1) as pipe:
        for _ in range(2):
            assert len(list(pipe.generate([5, 6, 7], max_new_tokens=3, sampling=GREEDY))) == 3
            os.kill(pids(pipe)[1], signal.SIGKILL)
        with pytest.raises(StageError, match=r"stage 1 \(layers 4 to 7\).*cpu:1"):
            list(pipe.generate([5, 6, 7], max_new_tokens=3, sampling=GREEDY))
        health = pipe.health()
        assert health["state"] == "failed" and not health["ready"] and "stage 1" in health["cause"]
        with pytest.raises(StageError, match="stage 1"):
            pipe.stats()


@pytest.mark.parametrize(
    "options", [{"recoveries": -1}, {"recoveries": "3"}, {"silence_timeout": 0.5}, {"silence_timeout": None}]
)
def test_what_is_put_up_with_is_checked(hybrid: Path, options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        memra_pp.launch(hybrid, backend="local", **options)  # type: ignore[arg-type]


def test_a_pipeline_that_closes_while_a_stage_is_replaced_leaves_nothing(cluster: None, hybrid: Path) -> None:
    with memra_pp.launch(hybrid, stages=2) as pipe:
        stages = pids(pipe)
        os.kill(stages[0], signal.SIGKILL)
        while pipe.health()["ready"]:
            threading.Event().wait(0.005)
    assert pipe.health()["state"] == "closed" and not any(Path(f"/proc/{pid}").exists() for pid in stages)
