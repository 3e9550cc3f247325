"""Gemma-3-270M: a decode step of some sessions at once beside one session's, and beside NumPy's products alone. One thread.

The sessions stand at different positions. NumPy multiplies as many rows by the same weights, in f32, and does nothing else
of the step: no norms, no attention, no cache. `x one` is how much faster tokens come than from one session.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from _timing import medians, one_thread_process

from memra_pp.cache import Cache, KvPolicy
from memra_pp.cli import demo_weights
from memra_pp.kernels import CpuDev
from memra_pp.models import Gemma3, Segment, StepBatch
from memra_pp.models.weights import Weights, open_weights

SESSIONS = (1, 2, 4, 8, 16)
PROMPT, LONGER = 100, 20
"""Rows that the first session holds, and how many more each of the next."""
PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def matrices(weights: Weights) -> list[np.ndarray]:
    """Every matrix that a row is multiplied by, the tied embedding last."""
    names = [f"model.layers.{il}.{name}.weight" for il in range(weights.cfg.n_trunk) for name in PROJECTIONS]
    return [weights.tensor(name) for name in (*names, "model.embed_tokens.weight")]


def step_of(model: Gemma3, caches: list[Cache]) -> Callable[[], object]:
    """A row for each cache, at the position where it stands: every call does the same."""
    batch = StepBatch(tuple(Segment(cache.pos, 1) for cache in caches))
    tokens = np.arange(len(caches), dtype=np.int32) + 818
    return lambda: model.forward(batch, tokens, caches)


def opened(model: Gemma3, device: CpuDev, rows: int) -> Cache:
    """A cache of `rows` rows."""
    cache = Cache.new(device, model.cfg, rows + 1, policy=KvPolicy())
    model.forward(StepBatch((Segment(0, rows),)), np.arange(rows, dtype=np.int32) + 1000, [cache])
    cache.pos = rows
    return cache


def main() -> None:
    one_thread_process()
    path, device = demo_weights(), CpuDev()
    weights = open_weights(path)
    model = Gemma3.load(path, range(weights.cfg.n_layer), device)
    caches = [opened(model, device, PROMPT + LONGER * i) for i in range(max(SESSIONS))]
    held, one = matrices(weights), 0.0
    print("sessions   step ms   tok/s  x one   NumPy's products ms  x NumPy")
    for count in SESSIONS:
        rows = {width: np.ones((count, width), np.float32) for width in {matrix.shape[1] for matrix in held}}

        def products(rows: dict[int, np.ndarray] = rows) -> None:
            for matrix in held:
                np.matmul(rows[matrix.shape[1]], matrix.T)

        step, peer = medians(step_of(model, caches[:count]), products, rounds=7)
        one = one or step
        print(
            f"{count:8} {step * 1e3:9.1f} {count / step:7.1f} {one * count / step:6.2f} {peer * 1e3:21.1f} {step / peer:8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
