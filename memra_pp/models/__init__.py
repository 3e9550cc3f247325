"""Models that stages run: the `StageModel` protocol, the reference forwards and the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike

import numpy as np
from numpy.typing import NDArray

from ..cache import PRIME_CHUNK_MAX_TOKENS, Cache, KvPolicy
from ..config import ModelConfig
from ..config.forwards import REFERENCE_FORWARDS
from ..errors import ConfigError
from ..kernels import CpuDev
from .gemma3 import Gemma3
from .parts import Forward
from .protocol import Segment, StageModel, StepBatch
from .qwen3_5 import Qwen35
from .tokenizer import load_tokenizer
from .weights import open_weights

__all__ = [
    "Forward",
    "Gemma3",
    "Qwen35",
    "Segment",
    "StageModel",
    "StepBatch",
    "forward_layers",
    "load_tokenizer",
    "stage_model_for",
]

_FORWARDS: Mapping[str, type[Forward]] = {forward.__name__: forward for forward in (Gemma3, Qwen35)}


def stage_model_for(cfg: ModelConfig) -> type[Forward]:
    """The reference forward of an architecture.

    Raises:
        ConfigError: there is none, or the config asks for what it does not compute; pass your own `StageModel`.
    """
    if cfg.arch not in REFERENCE_FORWARDS:
        raise ConfigError(
            f"no reference forward for {cfg.arch}: there is one for {', '.join(REFERENCE_FORWARDS)}; "
            "pass your own StageModel class as stage_model"
        )
    forward = _FORWARDS[REFERENCE_FORWARDS[cfg.arch]]
    forward.check(cfg)
    return forward


def forward_layers(
    model: str | PathLike[str],
    layers: range,
    x: NDArray[np.float32],
    *,
    policy: KvPolicy | None = None,
    device: CpuDev | None = None,
) -> NDArray[np.float32]:
    """Runs some layers alone on a fresh cache: the tool for bisecting a numeric difference.

    Args:
        model: a GGUF file, or a directory with config.json and safetensors.
        layers: consecutive layers of it.
        x: f32 `[rows, n_embd]`, the hidden rows that enter the first of them, from position 0 on.

    Returns:
        f32 `[rows, n_embd]`: the hidden rows after the last of them; no embedding, final norm or head.

    Raises:
        ConfigError: the model cannot be read, or `layers` or `x` do not fit it.
    """
    weights = open_weights(model)
    cfg = weights.cfg
    if not (0 <= layers.start < layers.stop <= cfg.n_trunk and layers.step == 1):
        raise ConfigError(f"layers {layers}: the model has layers 0 to {cfg.n_trunk - 1}; pass consecutive ones")
    if x.ndim != 2 or x.shape[1] != cfg.n_embd or len(x) < 1:
        raise ConfigError(f"x of shape {x.shape}: this model takes f32 [rows, {cfg.n_embd}]")
    dev = CpuDev() if device is None else device
    forward = stage_model_for(cfg)(weights, layers, dev)
    parts = []
    with Cache.new_ppn_slice(dev, layers.start, layers.stop, cfg, len(x), policy=policy) as cache:
        for at in range(0, len(x), PRIME_CHUNK_MAX_TOKENS):
            rows = x[at : at + PRIME_CHUNK_MAX_TOKENS]
            batch = StepBatch((Segment(cache.pos, len(rows), logits=0),))
            parts.append(forward.run_layers(batch, rows, [cache]))
            cache.pos += len(rows)
    return np.concatenate(parts)
