"""The transformers library's logits and greedy tokens, by the CUDA backend on one stage and on two; and nothing that grows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fiber_gpu import FiberGpu
from runs import MODELS

from memra_pp.cache import Cache, KvPolicy
from memra_pp.kernels.cuda.device import CudaDev
from memra_pp.kernels.cuda.gpu import CupyGpu, Gpu
from memra_pp.models import Segment, StepBatch, stage_model_for
from memra_pp.models.weights import open_weights

PAIRS = [("f32", "f32"), ("q8_0", "q5_1"), ("q8_0", "q4_0"), ("fp8", "fp8")]


@pytest.fixture(params=["fibers", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Any:
    gpu: Gpu = CupyGpu() if request.param == "cuda" else FiberGpu(request.getfixturevalue("kernels"))
    dev = CudaDev(gpu)
    yield dev
    dev.close()


class Stages:
    """A model's stages on one device, and a session's cache on each."""

    def __init__(self, path: Path, cuts: Sequence[int], device: CudaDev, policy: KvPolicy, ctx: int) -> None:
        cfg = open_weights(path).cfg
        fence = [0, *cuts, cfg.n_layer]
        ranges = [range(lo, hi) for lo, hi in itertools.pairwise(fence)]
        self.models = [stage_model_for(cfg).load(path, layers, device) for layers in ranges]
        self.caches = [Cache.new_ppn_slice(device, r.start, r.stop, cfg, ctx, policy=policy) for r in ranges]

    def feed(self, tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        """All logits."""
        batch, rows = StepBatch((Segment(self.caches[0].pos, len(tokens), len(tokens)),)), np.array(tokens, np.int32)
        for model, cache in zip(self.models, self.caches, strict=True):
            rows = model.forward(batch, rows, [cache])
            cache.pos += len(tokens)
        return rows


@pytest.mark.parametrize("cuts", [[], [3]], ids=["1 stage", "2 stages"])
@pytest.mark.parametrize(("k", "v"), PAIRS)
@pytest.mark.parametrize("name", MODELS)
def test_goldens(data: Path, device: CudaDev, name: str, k: str, v: str, cuts: list[int]) -> None:
    golden, pair = np.load(data / name / "golden.npz"), f"{k}_{v}"
    ids, greedy = golden["input_ids"].tolist(), golden[f"greedy_{pair}"].tolist()
    stages = Stages(data / name, cuts, device, KvPolicy(k=k, v=v), len(ids) + len(greedy))
    logits = stages.feed(ids)
    mean, most = golden[f"tol_{pair}"]
    error = np.abs(logits - golden[f"logits_{pair}"])
    assert error.mean() < mean and error.max() < most
    made = [int(logits[-1].argmax())]
    while len(made) < len(greedy):
        made.append(int(stages.feed(made[-1:])[-1].argmax()))
    assert made == greedy


@pytest.mark.parametrize(("kind", "rounds"), [("fibers", 5), pytest.param("cuda", 1000, marks=pytest.mark.gpu)])
def test_rounds_leave_memory_as_it_was(data: Path, request: pytest.FixtureRequest, kind: str, rounds: int) -> None:
    """Draft, verify, roll back: after a first round, no byte more is used by the session or taken from the GPU."""
    gpu: Gpu = CupyGpu() if kind == "cuda" else FiberGpu(request.getfixturevalue("kernels"))
    device = CudaDev(gpu)
    stages = Stages(data / "hybrid", [3], device, KvPolicy(), 64)
    stages.feed(range(10))
    snaps = [cache.snapshot() for cache in stages.caches]

    def round_of(seed: int) -> None:
        stages.feed(np.random.default_rng(seed).integers(0, 250, 5).tolist())
        for cache, snap in zip(stages.caches, snaps, strict=True):
            cache.rollback(snap, 2)
        stages.feed([1, 2])
        for cache, snap in zip(stages.caches, snaps, strict=True):
            cache.rollback(snap, 0)

    round_of(0)
    used = device.allocated_bytes, device.allocations, gpu.free_bytes()
    for seed in range(rounds):
        round_of(seed)
    assert (device.allocated_bytes, device.allocations, gpu.free_bytes()) == used
    device.close()


def test_planes_and_states_are_shared_by_dlpack(data: Path, device: CudaDev) -> None:
    """By torch if it is there and reads the device, else by NumPy from a GPU of fibers."""
    stages = Stages(data / "hybrid", [], device, KvPolicy(), 64)
    stages.feed(range(10))
    cache = stages.caches[0]
    buffers = [b for layer in (*cache.kv, *cache.recur) if layer is not None for b in layer.buffers()]
    if isinstance(device.gpu, CupyGpu):
        torch = pytest.importorskip("torch")
        shared = [torch.from_dlpack(device.export(buffer)).cpu().numpy() for buffer in buffers]
    else:
        shared = [np.from_dlpack(device.export(buffer)) for buffer in buffers]
    for buffer, seen in zip(buffers, shared, strict=True):
        np.testing.assert_array_equal(seen, device.gpu.download(buffer))
