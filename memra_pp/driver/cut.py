"""Where `launch` cuts a model: evenly, where it is told to, or where the most sessions fit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..admission import Device, SessionShape, best_fence
from ..admission.planner import Setup
from ..cache import KvPolicy
from ..config import ModelConfig, WeightBytes, estimate_weight_bytes, read_weight_bytes
from ..config.fence import Fence, even_fence, fence_from_cuts, fence_from_env
from ..errors import ConfigError
from ..kernels.cpu import available_bytes
from ..models.parts import Forward
from ..models.protocol import StageModel
from ..stage.worker import RESERVE_BYTES


def fence_for(cfg: ModelConfig, stages: int | None, cuts: Sequence[int] | None) -> Fence:
    """The fence that `launch` uses: from `cuts`, else `stages`, else the environment, else one stage.

    Raises:
        ConfigError: it is not valid for the model; where a cut parts shared K/V, the nearest valid fence is named.
    """
    if cuts is not None:
        fence = fence_from_cuts(cfg, cuts)
        if stages is not None and stages != len(fence) - 1:
            raise ConfigError(
                f"stages={stages} with {len(fence) - 2} cuts, which make {len(fence) - 1} stages: pass one of them"
            )
        return fence
    if stages is not None:
        return even_fence(cfg, stages)
    return fence_from_env(cfg, os.environ) or even_fence(cfg, 1)


def fence_by_bytes(
    cfg: ModelConfig,
    policy: KvPolicy,
    path: Path,
    model: type[StageModel],
    budgets: Sequence[int | None],
    max_ctx: int,
    max_rows: int,
) -> Fence:
    """The fence under which the most sessions of `max_ctx` rows fit.

    Args:
        budgets: each stage's bytes for sessions; None: this machine's free memory, shared evenly, less weights and workspace.
        max_rows: most rows of a step.

    Raises:
        ConfigError: the model cannot be cut into so many stages, or its weights cannot be told from its files.
    """
    shape = SessionShape(max_ctx)
    given = [Device(f"stage {s}", budget) for s, budget in enumerate(budgets) if budget is not None]
    if len(given) == len(budgets):
        return best_fence(cfg, policy, shape, given)
    share = available_bytes() // len(budgets)
    memory = tuple(Device(f"stage {s}", share) for s in range(len(budgets)))
    setup = Setup(cfg, memory, shape, policy, _weights(cfg, path, model), RESERVE_BYTES, max_rows)
    return best_fence(cfg, policy, shape, setup.budgets, setup.weights)


def _weights(cfg: ModelConfig, path: Path, model: type[StageModel]) -> WeightBytes:
    """What a model's stages hold: the files' bytes; the reference forwards hold f32, and read the embedding where it lies."""
    if not issubclass(model, Forward):
        return read_weight_bytes(path, cfg)
    f32 = {**cfg.hparams, "dtype": "float32", "torch_dtype": None, "quantization_config": None}
    return replace(estimate_weight_bytes(replace(cfg, hparams=f32)), embedding=0, tied=False)
