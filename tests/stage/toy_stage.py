"""A stage without weights: each layer adds its number to the rows and appends K/V rows taken from them."""

from __future__ import annotations

import itertools

import numpy as np

from memra_pp.admission import CostModel, SessionShape
from memra_pp.cache import KvPolicy
from memra_pp.config import KvPlan, ModelConfig, RecurrentPlan
from memra_pp.kernels import CpuDev, append
from memra_pp.stage.frames import CLOSE, OPEN, STEP, Entry, Frame, want_code
from memra_pp.stage.spec import StageSpec
from memra_pp.stage.worker import StageWorker

N_EMBD, N_VOCAB, MAX_CTX = 32, 40, 256
CFG = ModelConfig("toy", 3, N_EMBD, N_VOCAB, MAX_CTX, (KvPlan(1, 32, 32), RecurrentPlan(4, 3, 8), KvPlan(1, 32, 32)))
FENCE = (0, 2, 3)
POLICY = KvPolicy()
FRAMES = itertools.count(1)
PLACE = 1 << 16
ARGS = {"ctx": 16, "snapshots": 1, "recurrent": "replay", "speculate": 0}


class ToyModel:
    """A `StageModel`. `on_forward(batch)`, when set, may raise or replace what `forward` returns."""

    def __init__(self, layers):
        self.cfg, self.layers, self.on_forward = CFG, layers, None

    @classmethod
    def load(cls, path, layers, device):
        return cls(layers)

    def workspace_bytes(self, max_rows):
        return 4 * max_rows * N_VOCAB

    def forward(self, batch, x, caches):
        x = np.repeat(x[:, None], N_EMBD, 1).astype(np.float32) if self.layers.start == 0 else np.array(x)
        for il in self.layers:
            x += il + 1
            for cache, where in zip(caches, batch.slices, strict=True):
                if (layer := cache.kv[il]) is not None:
                    append(layer, cache.pos, x[where], x[where], cache.retain_from(layer))
        if self.layers.stop == CFG.n_layer:
            x = toy_logits(x[batch.logit_rows])
        return x if self.on_forward is None else self.on_forward(x)


def toy_logits(x):
    """f32 `[rows, N_VOCAB]`; the largest is at the row's own value, modulo the vocabulary."""
    at = np.arange(N_VOCAB, dtype=np.float32)
    return -np.abs(at - x[:, :1] % N_VOCAB)


def expected_logits(tokens):
    return toy_logits(np.array(tokens, np.float32)[:, None] + 1 + 2 + 3)


def worker(stage=0, fence=FENCE, budget_bytes=1 << 24, max_rows=64, device=None):
    spec = StageSpec("toy", CFG, fence, stage, POLICY, threads=1, max_rows=max_rows, budget_bytes=budget_bytes)
    made = StageWorker(spec, ToyModel(spec.layers), device or CpuDev(threads=1))
    made.reserve(made.share().budget)
    return made


def opening(session, epoch=1):
    return Entry(OPEN, session, 0, epoch)


def asking(session=1, fence=FENCE, **changes):
    """The note of an open: each session has a place of its own in every arena."""
    shape = SessionShape(**ARGS | changes)
    charges = CostModel(CFG, fence, POLICY).charges(shape)
    return {"args": ARGS | changes, "offsets": [session * PLACE] * len(charges), "charges": [*charges], "held": []}


def step(session, seq, base_len, rows, logits="none", want="logits", epoch=1, **fields):
    n = {"none": 0, "last": 1, "all": rows}[logits]
    return Entry(STEP, session, seq, epoch, base_len, rows, n, want_code(want, N_VOCAB), **fields)


def closing(session, epoch=1):
    return Entry(CLOSE, session, 0, epoch)


def tokens(*ids):
    return [np.array(ids, np.int32)]


def frame(*entries, arrays=(), notes=None, fence=FENCE):
    """The next frame; its opens ask for `ARGS` where `notes` do not say otherwise."""
    asked = {i: asking(entry.session, fence) for i, entry in enumerate(entries) if entry.op == OPEN}
    return Frame(next(FRAMES), list(entries), list(arrays), asked | (notes or {}))
