"""Sessions of a tiny model on a device, step by step, without a pipeline around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from memra_pp.cache import Cache, KvPolicy
from memra_pp.models import Forward, Segment, StepBatch, stage_model_for
from memra_pp.models.weights import open_weights

MODELS = ["hybrid", "gemma3_tiny"]
CTX = 120


class Run:
    """Some sessions of a model on a device, all of its layers at once."""

    def __init__(self, path: Path, device: Any, policy: KvPolicy, sessions: int = 3) -> None:
        cfg = open_weights(path).cfg
        self.model: Forward = stage_model_for(cfg).load(path, range(cfg.n_layer), device)
        self.caches = [Cache.new(device, cfg, CTX, policy=policy) for _ in range(sessions)]

    def step(self, *tokens: list[int], captures: Any = None) -> np.ndarray:
        """Feeds each session some tokens, and returns all logits."""
        fed = [i for i, some in enumerate(tokens) if some]
        segments = [Segment(self.caches[i].pos, len(tokens[i]), len(tokens[i]), (captures or {}).get(i, ())) for i in fed]
        caches = [self.caches[i] for i in fed]
        logits = self.model.forward(
            StepBatch(tuple(segments)), np.concatenate([tokens[i] for i in fed]).astype(np.int32), caches
        )
        for i in fed:
            self.caches[i].pos += len(tokens[i])
        return logits


def some(n: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 250, n).tolist()
