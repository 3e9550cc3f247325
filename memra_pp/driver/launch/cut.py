"""Where `launch` cuts a model: evenly, where it is told to, where the most sessions fit, or where steps take the least time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from ...admission import Device, SessionShape, WorkTimes, best_fence, fence_by_time
from ...admission.planner import Setup
from ...cache import KvPolicy
from ...config import ModelConfig, WeightBytes, read_weight_bytes
from ...config.fence import Fence, even_fence, fence_from_cuts, fence_from_env
from ...errors import ConfigError
from ...models.parts import Forward
from ...models.protocol import StageModel
from ...models.stored import kept_bytes
from ...stage.spec import StageSpec
from ...stage.worker import RESERVE_BYTES
from ..chain import Progress
from .layer_times import WorkKind, measure_layers

log = logging.getLogger(__name__)

Refence: TypeAlias = Callable[[Sequence[int]], Fence]
"""The fence for stages that have so many bytes free each."""


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


def fence_by_budgets(cfg: ModelConfig, policy: KvPolicy, budgets: Sequence[int], max_ctx: int) -> Fence:
    """The fence under which the most sessions of `max_ctx` rows fit, of `budgets` bytes for them on each stage.

    Raises:
        ConfigError: the model cannot be cut into so many stages.
    """
    return best_fence(cfg, policy, SessionShape(max_ctx), _stages(budgets))


def fence_by_memory(
    cfg: ModelConfig,
    policy: KvPolicy,
    path: Path,
    model: type[StageModel],
    max_ctx: int,
    max_rows: int,
    memory: Sequence[int],
) -> Fence:
    """The fence under which the most sessions of `max_ctx` rows fit, with weights and workspace beside them.

    Args:
        max_rows: most rows of a step.
        memory: bytes that are free for each stage before anything is loaded. They may differ.

    Raises:
        ConfigError: the model cannot be cut into so many stages, or its weights cannot be told from its files.
    """
    shape = SessionShape(max_ctx)
    setup = Setup(cfg, tuple(_stages(memory)), shape, policy, _weights(cfg, path, model), RESERVE_BYTES, max_rows)
    return best_fence(cfg, policy, shape, setup.budgets, setup.weights)


def refenced(specs: Sequence[StageSpec], free: Sequence[int], by_memory: Refence | None) -> list[StageSpec]:
    """Stages cut for what their devices have free, in bytes, each its share of it; as they are, if no cut waits for that."""
    if by_memory is None:
        return list(specs)
    fence = by_memory([nbytes // spec.share for spec, nbytes in zip(specs, free, strict=True)])
    return [replace(spec, fence=fence) for spec in specs]


def _stages(each: Sequence[int]) -> list[Device]:
    return [Device(f"stage {s}", nbytes) for s, nbytes in enumerate(each)]


def cut_by_time(
    cfg: ModelConfig,
    policy: KvPolicy,
    path: Path,
    model: type[StageModel],
    stages: int,
    work: WorkKind,
    threads: int,
    max_rows: int,
    progress: Progress,
) -> tuple[Fence, dict[str, Any]]:
    """The fence whose slowest stage takes the least time for a step of `work`, and what `stats()["cut"]` says of it.

    That is, for `decode` and for `prefill`, what `measure_layers` has found, the `fence` that is best for such work, and
    `stage_s`, the seconds of its stages. Where the two fences differ, that is logged.

    Args:
        threads: kernel threads a stage.
        max_rows: most rows of a step.

    Raises:
        ConfigError: the model cannot be cut into so many stages, or its weights cannot be loaded.
    """
    measured = measure_layers(path, cfg, model, policy, threads, max_rows, progress)
    fences = {kind: fence_by_time(cfg, times, stages) for kind, times in measured.items()}
    if fences["decode"] != fences["prefill"]:
        wants = " and ".join(f"{kind} is fastest with the fence {list(fence)}" for kind, fence in fences.items())
        log.info("%s: %s; it is cut for %s", path.name, wants, work)
    return fences[work], {"by": f"time:{work}"} | {kind: _told(fences[kind], times) for kind, times in measured.items()}


def _told(fence: Fence, times: WorkTimes) -> dict[str, Any]:
    return {
        "fence": list(fence),
        "stage_s": times.of_stages(fence),
        "embed_s": times.embed_s,
        "layers_s": list(times.layers_s),
        "head_s": times.head_s,
    }


def _weights(cfg: ModelConfig, path: Path, model: type[StageModel]) -> WeightBytes:
    """What a model's stages hold: the files' bytes, or, in the reference forwards, which read the embedding where it lies, what
    they keep of the files' tensors."""
    if not issubclass(model, Forward):
        return read_weight_bytes(path, cfg)
    held = read_weight_bytes(path, cfg, kept_bytes)
    return replace(held, embedding=0, tied=False)
