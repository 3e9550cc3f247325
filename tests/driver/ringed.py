"""A model without weights that has what no small real one has: rings of two windows, recurrent state, a flat layer and a ringed
MTP block. It is whole-numbered, so exact, and a row depends on every token before it; a thousand rows take a millisecond."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import memra_pp
from memra_pp.admission import Admission, CostModel, Ledger
from memra_pp.cache import Cache, KvLayer, KvPolicy, RecurLayer
from memra_pp.config import KvPlan, ModelConfig, RecurrentPlan
from memra_pp.driver.chain import LocalChain
from memra_pp.kernels import append
from memra_pp.models.protocol import Array, Segment, StageModel, StepBatch
from memra_pp.stage.spec import StageSpec
from memra_pp.stage.worker import StageWorker

DATA = Path(__file__).parents[1] / "data"
N_EMBD, N_VOCAB, MAX_CTX, PRIME = 32, 61, 20_000, 4093
NARROW, WIDE = KvPlan(1, 32, 32, window=32, ring="reader"), KvPlan(1, 32, 64, window=100, ring="reader")
STATE = RecurrentPlan(conv_width=4, conv_kernel=3, state_width=8)
CFG = ModelConfig("ringed", 6, N_EMBD, N_VOCAB, MAX_CTX, (NARROW, STATE, KvPlan(1, 32, 32), STATE, WIDE, NARROW, NARROW))
POLICY = KvPolicy(k="f32", v="f32", ring="all")


class Ringed:
    """A `StageModel`. Column 0 of a hidden row is the row, a number below `PRIME`; the others repeat it."""

    def __init__(self, layers: range) -> None:
        self.cfg, self.layers = CFG, range(layers.start, min(layers.stop, CFG.n_trunk))
        self.last = layers.stop == CFG.n_layer

    @classmethod
    def load(cls, path: Any, layers: range, device: Any) -> Ringed:
        return cls(layers)

    def workspace_bytes(self, max_rows: int) -> int:
        return 4 * max_rows * N_VOCAB

    def forward(self, batch: StepBatch, x: Array, caches: Sequence[Cache]) -> Array:
        h = (x if self.layers.start == 0 else x[:, 0]).astype(np.int64)
        for il in self.layers:
            for segment, where, cache in zip(batch.segments, batch.slices, caches, strict=True):
                kv = cache.kv[il]
                h[where] = attend(kv, segment, h[where], cache) if kv else scan(cache.state(il), il, segment, h[where])
                if cache.dflash_taps is not None:
                    cache.dflash_taps.write(il, wide(h[where]))
        if not self.last:
            return wide(h)
        h = h[batch.logit_rows, None]
        return ((h * h + 29 * np.arange(N_VOCAB) * (h % 17 + 1)) % PRIME / 512).astype(np.float32)


def wide(h: Array, width: int = N_EMBD) -> Array:
    return np.repeat(h[:, None], width, 1).astype(np.float32)


def attend(layer: KvLayer, segment: Segment, h: Array, cache: Cache) -> Array:
    """Appends the rows, and adds up what each sees in the planes."""
    pos, end, seen = segment.pos, segment.pos + segment.rows, layer.plan.window or CFG.max_ctx
    append(layer, pos, wide(h, layer.kv_dim_k), wide(PRIME - h, layer.kv_dim_v), cache.retain_from(layer))
    start = max(0, pos + 1 - seen)
    rows = layer.physical_rows(start, end)
    total = np.zeros(end - start + 1, np.int64)
    for plane, size, times in ((layer.k, layer.k_tok_bytes, 3), (layer.v, layer.v_tok_bytes, 5)):
        held = plane[rows.start * size : rows.stop * size].view(np.float32).reshape(len(rows), -1)[:, 0]
        total[1:] += np.cumsum(times * held.astype(np.int64))
    at = np.arange(pos, end)
    views = total[at + 1 - start] - total[np.maximum(0, at + 1 - seen) - start]
    return (7 * h + views + layer.index) % PRIME


def scan(state: RecurLayer, il: int, segment: Segment, h: Array) -> Array:
    """Row by row: the state after a row depends on that row, the one before it and the state there."""
    last, s = int(state.conv_state[0]), int(state.ssm_state[0])
    captures, out, given = {r: snap for r, snap in segment.captures}, [], h.tolist()
    for r, value in enumerate(given, start=1):
        s = (5 * s + 3 * value + last + il) % PRIME
        last = value
        out.append((value + s) % PRIME)
        if r in captures or r == len(given):
            state.conv_state[:], state.ssm_state_alt[:] = last, s
            state.swap()
            state.ssm_state_alt[:] = np.nan
        if r in captures:
            copy = captures[r].states[il]
            copy.conv[:], copy.ssm[:] = last, s
    return np.array(out)


def launch_tiny(
    name: str, stages: int, prefill_chunk: int = 512, stage_model: type[StageModel] | None = None
) -> memra_pp.Pipeline:
    """A pipeline in this process, rings on: of `ringed`, or of the random weights in `tests/data/{name}`."""
    if name != "ringed":
        return memra_pp.launch(
            DATA / name,
            stages=stages,
            backend="local",
            policy=KvPolicy.from_env({"MEMRA_SWA_RING": "all"}),
            threads=1,
            prefill_chunk=prefill_chunk,
            stage_model=stage_model,
        )
    model = Ringed if stage_model is None else stage_model
    fence = tuple(s * CFG.n_trunk // stages for s in range(stages + 1))
    specs = [
        StageSpec(name, CFG, fence, s, POLICY, 1, prefill_chunk, device=f"cpu:{s}", budget_bytes=1 << 27) for s in range(stages)
    ]
    workers = [StageWorker.load(spec, model) for spec in specs]
    chain = LocalChain(workers)
    admission = Admission(Ledger(chain.devices, chain.homes), CostModel(CFG, fence, POLICY), CFG.max_ctx)
    return memra_pp.Pipeline(Path(name), chain, admission, 64, prefill_chunk, 60.0, {"by": "even"})


def some_tokens(n: int, seed: int = 0) -> list[int]:
    """Tokens that every one of these models knows."""
    ids: list[int] = np.random.default_rng([n, seed]).integers(0, N_VOCAB, n).tolist()
    return ids
