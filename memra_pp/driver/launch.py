"""`launch`: from a model and a number of stages to a pipeline that is ready."""

from __future__ import annotations

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Literal

from ..cache import PRIME_CHUNK_MAX_TOKENS, KvPolicy
from ..config import ModelConfig
from ..config.fence import even_fence, fence_from_cuts, fence_from_env
from ..errors import ConfigError
from ..models import stage_model_for
from ..models.protocol import StageModel
from ..stage.spec import StageSpec
from ..stage.worker import StageWorker
from .chain import Chain, LocalChain, Progress
from .pipeline import Pipeline

STEP_S = 300.0
PREFILL_CHUNK = 512
Backend = Literal["ray", "local"]


def launch(
    model: str | PathLike[str],
    *,
    stages: int | None = None,
    cuts: Sequence[int] | None = None,
    backend: Backend = "ray",
    policy: KvPolicy | None = None,
    mtp: bool = True,
    max_ctx: int | None = None,
    threads: int | None = None,
    budget_bytes: int | Sequence[int] | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    step_timeout: float = STEP_S,
    stage_model: type[StageModel] | None = None,
    progress: Progress | None = None,
) -> Pipeline:
    """Loads a model onto pipeline stages; use the result as a context manager.

    Args:
        model: a GGUF file, or a directory with `config.json` and `*.safetensors`.
        stages: number of stages, cut evenly; `cuts` names the first layer of every stage after the first instead. With
            neither, `MEMRA_PP_STAGES`, `MEMRA_PP_SPLITS` or `MEMRA_PP_SPLIT`, else one stage.
        backend: `ray` (one actor a stage) or `local` (all stages in this process).
        policy: K/V formats and ring switch (default: from the environment, once, here).
        mtp: keep cache for MTP/NextN blocks, on the last stage.
        max_ctx: longest context of a session, in tokens (default and limit: the model's own).
        threads: kernel threads a stage (default: the machine's cores shared among the stages).
        budget_bytes: bytes a stage's caches may take, one number or one a stage (default: what is free after loading).
        prefill_chunk: most rows in one step.
        step_timeout: seconds after which a step that has not come back is an error.
        stage_model: your own `StageModel` class (default: the reference forward of the model's architecture).
        progress: called with a short text and the steps done and to do, as stages come up.

    Raises:
        ConfigError: a model, fence, policy or option that cannot be used; nothing was started.
        StageError: a stage could not be started; nothing is left running.
    """
    path = _model_path(model)
    cfg = ModelConfig.from_path(path)
    cfg = cfg if mtp else cfg.without_mtp()
    fence = fence_for(cfg, stages, cuts)
    n = len(fence) - 1
    policy = KvPolicy.from_env() if policy is None else policy
    _require(1 <= prefill_chunk <= PRIME_CHUNK_MAX_TOKENS, "prefill_chunk", prefill_chunk, f"1 to {PRIME_CHUNK_MAX_TOKENS}")
    _require(max_ctx is None or 1 <= max_ctx <= cfg.max_ctx, "max_ctx", max_ctx, f"1 to the model's {cfg.max_ctx}")
    _require(step_timeout > 0, "step_timeout", step_timeout, "more than 0 seconds")
    threads = max(1, (os.cpu_count() or 1) // n) if threads is None else threads
    _require(1 <= threads <= 256, "threads", threads, "1 to 256")
    specs = [
        StageSpec(
            model=str(path),
            cfg=cfg,
            fence=fence,
            stage=s,
            policy=policy,
            threads=threads,
            max_rows=prefill_chunk,
            share=n,
            budget_bytes=budget,
        )
        for s, budget in enumerate(_budgets(budget_bytes, n))
    ]
    chosen = stage_model_for(cfg) if stage_model is None else stage_model
    chain = _chain(backend, specs, chosen, progress or (lambda text, done, of: None))
    return Pipeline(path, specs, chain, cfg.max_ctx if max_ctx is None else max_ctx, prefill_chunk, step_timeout)


def _chain(backend: str, specs: list[StageSpec], model: type[StageModel], progress: Progress) -> Chain:
    match backend:
        case "ray":
            from .launch_ray import launch_ray

            return launch_ray(specs, model, progress)
        case "local":
            workers = []
            for done, spec in enumerate(specs):
                progress(f"loading {spec}", done, len(specs))
                workers.append(StageWorker.load(spec, model))
            return LocalChain(workers)
        case _:
            raise ConfigError(f"backend={backend!r}: choose ray or local")


def fence_for(cfg: ModelConfig, stages: int | None, cuts: Sequence[int] | None) -> tuple[int, ...]:
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


def _model_path(model: str | PathLike[str]) -> Path:
    path = Path(model)
    if not path.exists():
        raise ConfigError(f"no such model: {path}; pass a GGUF file or a directory with config.json and *.safetensors")
    return path.resolve()


def _budgets(budget_bytes: int | Sequence[int] | None, stages: int) -> list[int | None]:
    shared = budget_bytes is None or isinstance(budget_bytes, int)
    budgets: list[int | None] = [budget_bytes] * stages if shared else list(budget_bytes)  # type: ignore[list-item,arg-type]
    if len(budgets) != stages or any(b is not None and b < 1 for b in budgets):
        raise ConfigError(f"budget_bytes={budget_bytes}: one number of at least 1, or {stages} of them, one a stage")
    return budgets


def _require(ok: bool, name: str, value: object, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name}={value}: it must be {allowed}")
