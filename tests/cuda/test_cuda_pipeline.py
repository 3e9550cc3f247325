"""A whole pipeline on devices of fibers: launched by name, admitted to the byte, the texts of the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fiber_gpu import FiberGpu
from on_cpu import Kernels

import memra_pp
from memra_pp.errors import StageError
from memra_pp.kernels.cuda import gpu
from memra_pp.stage.worker import RESERVE_BYTES

GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())
FREE = 320 << 20
"""Of each GPU: what is left alone, twice, and some megabytes."""
PROMPTS = [[7, 3, 99, 4], [5] * 40, [201, 9]]


@pytest.fixture(params=["hybrid", "gemma3_tiny"])
def model(request: pytest.FixtureRequest, data: Path, kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, where GPUs are of fibers."""
    monkeypatch.setattr(gpu, "CupyGpu", lambda index: FiberGpu(kernels, free=FREE))
    monkeypatch.setattr(gpu, "visible_gpus", lambda: 2)
    return data / str(request.param)


@pytest.fixture
def pipe(model: Path) -> Iterator[memra_pp.Pipeline]:
    with memra_pp.launch(model, stages=2, devices="cuda", backend="local", max_ctx=120) as pipe:
        yield pipe
        stats = pipe.stats()
        assert stats["sessions"] == stats["rebuilds"] == 0
        assert all(stage["allocated_bytes"] == stage["planned_bytes"] == 0 for stage in stats["stages"])


def texts(pipe: memra_pp.Pipeline, **options: object) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in PROMPTS]
    for index, token in pipe.generate_many(PROMPTS, max_new_tokens=12, sampling=GREEDY, **options):  # type: ignore[arg-type]
        out[index].append(token)
    return out


def test_texts_are_those_of_the_cpu_alone_together_and_drafted(model: Path, pipe: memra_pp.Pipeline) -> None:
    with memra_pp.launch(model, stages=2, backend="local", max_ctx=120) as cpu:
        expected = texts(cpu)
    assert texts(pipe) == expected
    assert [list(pipe.generate(prompt, max_new_tokens=12, sampling=GREEDY)) for prompt in PROMPTS] == expected
    for mode in ("replay", "states"):
        assert texts(pipe, draft=memra_pp.Draft(3, by=lambda tokens, k: [5] * k, recurrent=mode)) == expected  # type: ignore[arg-type]


def test_what_is_allocated_is_what_was_planned(pipe: memra_pp.Pipeline) -> None:
    with pipe.open(PROMPTS[1], max_new_tokens=20, speculate=3, recurrent="states") as session:
        session.prefill()
        stages = pipe.stats()["stages"]
    assert [stage["device"] for stage in stages] == ["cuda:0 x1", "cuda:1 x1"] or all(
        "cuda" in stage["device"] for stage in stages
    )
    assert all(stage["allocated_bytes"] == stage["planned_bytes"] > 0 for stage in stages)


def test_stages_of_one_gpu_divide_its_bytes(model: Path) -> None:
    with memra_pp.launch(model, devices=["cuda:0", "cuda:0", "cuda:1"], stages=3, backend="local", max_ctx=120) as pipe:
        stages = pipe.stats()["stages"]
        assert [stage["boundary"] for stage in stages] == ["slots", "slots", "lane"]
        first, second, alone = (stage["arena_bytes"] for stage in stages)
        assert first + second < FREE - 2 * RESERVE_BYTES and first < alone < FREE - RESERVE_BYTES
        with memra_pp.launch(model, stages=3, backend="local", max_ctx=120) as cpu:
            assert texts(pipe) == texts(cpu)


def test_a_value_that_cannot_be_kept_costs_its_session_one_replay_then_ends_it(pipe: memra_pp.Pipeline) -> None:
    worker = pipe.chain._workers[1]  # type: ignore[attr-defined]
    with pipe.open(PROMPTS[0], max_new_tokens=8) as session:
        session.prefill()
        upload = worker.model.backend.upload
        worker.model.backend.upload = lambda array: upload(array * float("nan") if array.dtype == "float32" else array)
        with pytest.raises(StageError, match=r"CacheError.*close it|which .* cannot keep"):
            session.decode(5)
        worker.model.backend.upload = upload
    assert len(list(pipe.generate(PROMPTS[2], max_new_tokens=3, sampling=GREEDY))) == 3
    pipe.report._counters["rebuilds"] = 0
