"""`launch`: from a model and a number of stages to a pipeline that is ready."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Literal

from ..cache import PRIME_CHUNK_MAX_TOKENS, KvPolicy
from ..cache.formats import resolved
from ..config import ModelConfig
from ..config.fence import even_fence, fence_from_cuts, fence_from_env
from ..errors import ConfigError, checked_int, require
from ..models import stage_model_for
from ..models.protocol import StageModel
from ..stage.spec import StageSpec
from ..stage.worker import StageWorker
from .chain import Chain, LocalChain, Progress
from .pipeline import Pipeline

STEP_S = 300.0
MAX_STEP_S = 86400.0
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
    path = model_path(model)
    cfg = ModelConfig.from_path(path)
    cfg = cfg if mtp else cfg.without_mtp()
    fence = fence_for(cfg, stages, cuts)
    n = len(fence) - 1
    policy = resolved(policy)
    require(isinstance(policy, KvPolicy), ConfigError, "policy", policy, "a KvPolicy")
    prefill_chunk = checked_int(ConfigError, "prefill_chunk", prefill_chunk, 1, PRIME_CHUNK_MAX_TOKENS)
    max_ctx = checked_int(ConfigError, "max_ctx", cfg.max_ctx if max_ctx is None else max_ctx, 1, cfg.max_ctx)
    threads = checked_int(ConfigError, "threads", max(1, (os.cpu_count() or 1) // n) if threads is None else threads, 1, 256)
    timed = isinstance(step_timeout, (int, float)) and 0 < step_timeout <= MAX_STEP_S
    require(timed, ConfigError, "step_timeout", step_timeout, f"more than 0 and at most {MAX_STEP_S} seconds")
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
    return Pipeline(path, specs, chain, max_ctx, prefill_chunk, step_timeout)


def _chain(backend: str, specs: list[StageSpec], model: type[StageModel], progress: Progress) -> Chain:
    match backend:
        case "ray":
            from .launch_ray import launch_ray

            return launch_ray(specs, model, progress)
        case "local":
            return _local_chain(specs, model, progress)
        case _:
            raise ConfigError(f"backend={backend!r}: choose ray or local")


def _local_chain(specs: list[StageSpec], model: type[StageModel], progress: Progress) -> LocalChain:
    workers: list[StageWorker] = []
    try:
        for done, spec in enumerate(specs):
            progress(f"loading {spec}", done, len(specs))
            workers.append(StageWorker.load(spec, model))
        return LocalChain(workers)
    except BaseException:
        for worker in workers:
            worker.close()
        raise


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


def model_path(model: str | PathLike[str]) -> Path:
    """The file or directory of a model.

    Raises:
        ConfigError: there is none.
    """
    try:
        path = Path(model)
        if path.is_file() or path.is_dir():
            return path.resolve()
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(f"model={model!r:.80} is not a path ({error})") from error
    raise ConfigError(f"no such model: {path}; pass a GGUF file or a directory with config.json and *.safetensors")


def _budgets(budget_bytes: int | Sequence[int] | None, stages: int) -> list[int | None]:
    if budget_bytes is None:
        return [None] * stages
    each = list(budget_bytes) if isinstance(budget_bytes, Sequence) else [budget_bytes] * stages
    require(len(each) == stages, ConfigError, "budget_bytes", budget_bytes, f"one number, or {stages} of them, one a stage")
    return [checked_int(ConfigError, "budget_bytes", budget, 1, sys.maxsize) for budget in each]
