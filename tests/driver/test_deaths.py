"""Stages that are killed and stopped while sessions stream: every text as if nothing had been, and nothing left."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import memra_pp
from cluster import chaos
from memra_pp.cache import Cache
from memra_pp.errors import ConfigError, StageError
from memra_pp.models import Qwen35
from memra_pp.models.protocol import StepBatch
from memra_pp.stage import listener

DEADLY = 13
GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray of this module's own."""
    from memra_pp.driver.launch.ray_runtime import runtime

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
        while not all(s["allocated_bytes"] == s["planned_bytes"] > 0 for s in pipe.stats()["stages"]):
            threading.Event().wait(0.01)  # the session is opened again behind whoever asks
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


def crashing() -> type[Qwen35]:
    """A model that takes its process down with one token; of a function, so that actors are sent it whole."""

    class Crashes(Qwen35):
        def forward(self, batch: StepBatch, x: Any, caches: Sequence[Cache]) -> Any:
            if x.ndim == 1 and DEADLY in x:
                os._exit(1)
            return super().forward(batch, x, caches)

    return Crashes


def test_a_request_that_its_stage_crashes_of_costs_nobody_else(cluster: None, hybrid: Path) -> None:
    with memra_pp.launch(hybrid, stages=2, stage_model=crashing()) as pipe:
        text = list(pipe.generate([5, 6, 7], max_new_tokens=40, sampling=GREEDY))
        assert DEADLY not in text
        made: list[int] = []
        streaming = threading.Thread(target=lambda: made.extend(pipe.generate([5, 6, 7], max_new_tokens=40, sampling=GREEDY)))
        with pipe.open([5, 6], max_new_tokens=5) as session:
            session.prefill()
            streaming.start()
            with pytest.raises(StageError, match="3 stages in a row were lost at this step"):
                session.decode(DEADLY)
        streaming.join(60)
        assert made == text and pipe.health()["recoveries"] == 3 and pipe.stats()["sessions"] == 0


def test_a_thousand_strangers_at_every_stage_s_door_change_nothing(cluster: None, hybrid: Path) -> None:
    """Without the key, with garbage, or without a word, while a session streams."""
    with memra_pp.launch(hybrid, stages=2) as pipe:
        text = list(pipe.generate([5, 6, 7], max_new_tokens=60, sampling=GREEDY))
        doors = sorted(Path(pipe.chain._on_close.__self__._dir).glob("stage*"))  # type: ignore[attr-defined]
        assert len(doors) == 2 and all(door.parent.stat().st_mode & 0o777 == 0o700 for door in doors)
        files = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids(pipe)]
        rng, silent = random.Random(1), []
        tokens = pipe.generate([5, 6, 7], max_new_tokens=60, sampling=GREEDY)
        made = [next(tokens)]
        for n in range(1000):
            stranger = socket.socket(socket.AF_UNIX)
            stranger.settimeout(5)
            with contextlib.suppress(OSError):
                stranger.connect(str(doors[n % 2]))
                match n % 4:
                    case 0:
                        stranger.sendall(rng.randbytes(200))
                    case 1:
                        stranger.sendall(listener._HELLO + b"frames".ljust(16, b"\0") + bytes(64))
                    case 2:
                        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            silent.append(stranger)
            if len(silent) > 40:
                silent.pop(0).close()
            if n % 20 == 0:
                made.append(next(tokens))
        made += tokens
        for stranger in silent:
            stranger.close()
        health = pipe.health()
        assert made == text and health["recoveries"] == 0 and health["ready"]
        deadline = time.monotonic() + 30
        while [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids(pipe)] > files and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids(pipe)] <= files
