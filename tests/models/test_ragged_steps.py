"""A whole forward over a ragged batch is each session's forward alone: hidden rows, caches and snapshots, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memra_pp.cache import Cache, CacheSnapshot, KvPolicy
from memra_pp.config import KvPlan, ModelConfig
from memra_pp.errors import CacheError, ConfigError
from memra_pp.kernels import CpuDev
from memra_pp.models import Forward, Segment, StepBatch, stage_model_for
from memra_pp.models.parts import Step
from memra_pp.models.weights import open_weights

DATA = Path(__file__).parents[1] / "data"
CTX = 200
STEPS = [(40, 1, 9, 70), (1, 1, 1, 1), (1, 33, 1, 5), (8, 1, 60, 2), (1, 1, 1, 1)]
"""Rows of four sessions, step by step."""


@pytest.fixture(params=["gemma3_tiny", "hybrid"])
def path(request: pytest.FixtureRequest) -> Path:
    return DATA / str(request.param)


@pytest.fixture(autouse=True)
def even_small_work_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    for kernels in ("attention", "delta", "matmul"):
        monkeypatch.setattr(f"memra_pp.kernels.{kernels}.SHARE", 1)


def layers_of(path: Path, device: CpuDev) -> Forward:
    weights = open_weights(path)
    return stage_model_for(weights.cfg)(weights, range(weights.cfg.n_layer), device)


def image(cache: Cache) -> list[Any]:
    """Everything a cache holds that will be read again."""
    kv = [layer for layer in cache.kv if layer is not None]
    states = [buffer.tobytes() for layer in cache.recur if layer is not None for buffer in (layer.conv_state, layer.ssm_state)]
    return [[(la.k.tobytes(), la.v.tobytes(), la.len, int(la.len_d[0]), la.base) for la in kv], states]


def copies(snapshot: CacheSnapshot) -> list[bytes]:
    return [buffer.tobytes() for copy in snapshot.states.values() for buffer in (copy.conv, copy.ssm)]


def advance(model: Forward, caches: list[Cache], x: list[Any], snapshots: list[CacheSnapshot]) -> list[Any]:
    """One step; each session's state after its first row, and after its last, goes into its snapshot, the latter last."""
    segments = [
        Segment(cache.pos, len(rows), 0, ((1, snapshot), (len(rows), snapshot)))
        for cache, rows, snapshot in zip(caches, x, snapshots, strict=True)
    ]
    batch = StepBatch(tuple(segments))
    out = model.run_layers(batch, np.concatenate(x), caches)
    for cache, rows in zip(caches, x, strict=True):
        cache.pos += len(rows)
    return [out[where] for where in batch.slices]


@pytest.mark.parametrize("threads", [1, 2])
def test_a_ragged_batch_is_each_session_alone(path: Path, threads: int) -> None:
    policies = [KvPolicy(ring="all"), KvPolicy(v="q4_0"), KvPolicy(k="f32", v="f32"), KvPolicy(fp8_ordinary=True, ring="all")]
    device, rng = CpuDev(threads=threads), np.random.default_rng(0)
    model = layers_of(path, device)
    together, alone = ([Cache.new(device, model.cfg, CTX, policy=policy) for policy in policies] for _ in range(2))
    taken, taken_alone = ([cache.new_snapshot() for cache in caches] for caches in (together, alone))
    for rows in STEPS:
        x = [rng.standard_normal((count, model.cfg.n_embd), dtype=np.float32) for count in rows]
        got = advance(model, together, x, taken)
        for i, cache in enumerate(alone):
            np.testing.assert_array_equal(got[i], advance(model, [cache], [x[i]], [taken_alone[i]])[0])
            assert image(cache) == image(together[i])
            assert copies(taken_alone[i]) == copies(taken[i])
    device.close()


def test_what_each_ring_must_keep_is_its_own() -> None:
    """Two windows and a flat layer between them, in sessions at rows of their own, one of them with a pin."""
    plans = KvPlan(1, 32, 32, window=32, ring="reader"), KvPlan(1, 32, 32), KvPlan(1, 32, 32, window=100, ring="reader")
    cfg = ModelConfig("toy", 6, 32, 50, 1 << 20, plans * 2)
    caches = [Cache.new(CpuDev(), cfg, 9000, policy=KvPolicy(ring=ring)) for ring in ("all", "all", "off")]
    for cache, pos in zip(caches, (5000, 300, 7000), strict=True):
        cache.pos = pos
    caches[0].snapshot()
    caches[0].pos = 5200
    step = Step(StepBatch(tuple(Segment(cache.pos, 1) for cache in caches)), caches, CpuDev().backend)
    kept = [step.retain_from(step.kv(il).layers) for il in range(6)]
    assert kept == [[4960, 256, 0], [0, 0, 0], [4896, 192, 0]] * 2
    for il, own in enumerate(kept):
        assert own == [cache.retain_from(cache.kv[il]) for cache in caches]  # type: ignore[arg-type]


def test_caches_that_were_closed_or_cut_elsewhere_are_refused(path: Path) -> None:
    device = CpuDev()
    model = layers_of(path, device)
    whole = Cache.new(device, model.cfg, CTX)
    x, batch = np.zeros((2, model.cfg.n_embd), np.float32), StepBatch((Segment(0, 1), Segment(0, 1)))
    with (
        Cache.new_ppn_slice(device, 1, model.cfg.n_layer, model.cfg, CTX) as cut,
        pytest.raises((ConfigError, CacheError), match="layer 0"),
    ):
        model.run_layers(batch, x, [whole, cut])
    other = Cache.new(device, model.cfg, CTX)
    model.run_layers(batch, x, [whole, other])
    other.close()
    with pytest.raises((ConfigError, CacheError), match="layer 0"):
        model.run_layers(batch, x, [whole, other])
