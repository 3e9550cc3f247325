"""`launch`: from a model and a number of stages to a pipeline that is ready."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

from ...admission import Admission, CostModel, Ledger
from ...cache import PRIME_CHUNK_MAX_TOKENS, KvPolicy
from ...cache.formats import resolved
from ...config import ModelConfig
from ...config.fence import nearest_even_fence
from ...errors import ConfigError, checked_int, require
from ...kernels.devices import free_bytes, kind_of, require_gpus
from ...models import stage_model_for
from ...models.protocol import StageModel
from ...stage.spec import StageSpec, threads_each
from ...stage.worker import StageWorker
from ..chain import Chain, LocalChain, Progress
from ..figures.report import Report
from ..figures.status import open_door
from ..figures.watcher import Watcher
from ..heart import DEATH_S
from ..lane_chain import Recovery
from ..pipeline import Pipeline
from .cut import Refence, cut_by_time, fence_by_budgets, fence_by_memory, fence_for, refenced
from .layer_times import WorkKind

STEP_S = 300.0
DEFAULT_MAX_NEW_TOKENS = 512
MAX_BYPASS = 1 << 20
MAX_BUDGET = 1 << 50
MAX_STEP_S = 86400.0
RECOVERIES, MAX_RECOVERIES = 3, 1 << 20
PREFILL_CHUNK = 512
PLACEMENT_S = 10.0
Backend = Literal["ray", "local"]
Balance = Literal["even", "bytes", "time", "time:decode", "time:prefill"]
_numbers = itertools.count(1)
"""Of this process's pipelines."""
TIMED: Mapping[str, WorkKind] = {"time": "decode", "time:decode": "decode", "time:prefill": "prefill"}


def launch(
    model: str | PathLike[str],
    *,
    stages: int | None = None,
    cuts: Sequence[int] | None = None,
    balance: Balance = "even",
    devices: str | Sequence[str] = "auto",
    backend: Backend = "ray",
    policy: KvPolicy | None = None,
    mtp: bool = True,
    max_ctx: int | None = None,
    threads: int | None = None,
    budget_bytes: int | Sequence[int] | None = None,
    default_max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS,
    bypass: int = 0,
    tenant_share: float | None = None,
    prefill_chunk: int = PREFILL_CHUNK,
    step_timeout: float = STEP_S,
    silence_timeout: float = DEATH_S,
    recoveries: int = RECOVERIES,
    placement_timeout: float = PLACEMENT_S,
    stage_model: type[StageModel] | None = None,
    progress: Progress | None = None,
) -> Pipeline:
    """Loads a model onto pipeline stages; use the result as a context manager.

    Args:
        model: a GGUF file, or a directory with `config.json` and `*.safetensors`.
        stages: number of stages, cut evenly; `cuts` names the first layer of every stage after the first instead. With
            neither, `MEMRA_PP_STAGES`, `MEMRA_PP_SPLITS` or `MEMRA_PP_SPLIT`, else one stage.
        balance: how `stages` are cut: `even`; `bytes`, where the most sessions of `max_ctx` rows fit beside the weights; or
            `time:decode` (`time` for short) or `time:prefill`, where the slowest stage takes the least time for such a step.
            That is measured first, here, in some seconds, a layer at a time (see `measure_layers`), and told by `stats()`. For
            `bytes` without `budget_bytes` every device is asked what it has free, where Ray has placed the stages.
        devices: a name a stage, `cpu`, `cpu:N`, `cuda` or `cuda:N`; stages that name the same `cpu` share its bytes, those of
            one GPU divide them, and each has a stream of its own. `cpu` or `cuda`: one of that kind for each stage. `auto`: the
            names in `MEMRA_PP_DEVICES`, separated by commas, else `cpu`.
        backend: `ray` (one actor a stage) or `local` (all stages in this process).
        policy: K/V formats and ring switch (default: from the environment, once, here).
        mtp: keep cache for MTP/NextN blocks, on the last stage.
        max_ctx: longest context of a session, in tokens (default and limit: the model's own).
        threads: kernel threads a stage (default: its machine's cores, shared among the stages there).
        budget_bytes: bytes a stage's caches may take, one number or one a stage (default: what is free after loading, shared
            among the stages of the machine or the GPU); a device that stages share has their sum.
        default_max_new_tokens: what a session is charged for that does not say how many tokens it wants.
        bypass: how many later sessions may be opened before one that waits for bytes (0: strictly first come, first served).
        tenant_share: the part of every device that one tenant's sessions may hold, above 0 and up to 1 (default: no cap).
        prefill_chunk: most rows in one step.
        step_timeout: seconds after which a step that has not come back means that a stage hangs.
        silence_timeout: seconds without a sign of life after which a stage is taken for dead.
        recoveries: how many times within five minutes a lost stage may be replaced; sessions go on then as if nothing had been.
            0: never, the pipeline fails. Stages of the `local` backend are never replaced.
        placement_timeout: seconds that a Ray cluster may take to have room for the stages; more where it adds nodes by itself.
        stage_model: your own `StageModel` class (default: the reference forward of the model's architecture).
        progress: called with a short text and the steps done and to do, as stages come up.

    Raises:
        ConfigError: a model, fence, policy or option that cannot be used; nothing was started.
        StageError: a stage could not be started; nothing is left running.
    """
    path = model_path(model)
    cfg = ModelConfig.from_path(path)
    cfg = cfg if mtp else cfg.without_mtp()
    policy = resolved(policy)
    require(isinstance(policy, KvPolicy), ConfigError, "policy", policy, "a KvPolicy")
    prefill_chunk = checked_int(ConfigError, "prefill_chunk", prefill_chunk, 1, PRIME_CHUNK_MAX_TOKENS)
    max_ctx = checked_int(ConfigError, "max_ctx", cfg.max_ctx if max_ctx is None else max_ctx, 1, cfg.max_ctx)
    _check_balance(balance, stages, cuts)
    fence = fence_for(cfg, stages, cuts) if balance == "even" or stages is None else nearest_even_fence(cfg, stages)
    n = len(fence) - 1
    names, budgets = _device_names(devices, n), _budgets(budget_bytes, n)
    chosen = stage_model_for(cfg) if stage_model is None else _checked(stage_model)
    _check_measurable(balance, names)
    by_memory: Refence | None = None
    if balance == "bytes":
        require(len(set(names)) == n, ConfigError, "devices", names, "one of its own for every stage, to balance bytes")
        given = [budget for budget in budgets if budget is not None]
        if len(given) == n:
            fence = fence_by_budgets(cfg, policy, given, max_ctx)
        else:
            by_memory = partial(fence_by_memory, cfg, policy, path, chosen, max_ctx, prefill_chunk)
    threads = 0 if threads is None else checked_int(ConfigError, "threads", threads, 1, 256)
    most = default_max_new_tokens
    default_max_new_tokens = checked_int(ConfigError, "default_max_new_tokens", most, 1, sys.maxsize)
    bypass = checked_int(ConfigError, "bypass", bypass, 0, MAX_BYPASS)
    shared = tenant_share is None or (isinstance(tenant_share, (int, float)) and 0 < tenant_share <= 1)
    require(shared, ConfigError, "tenant_share", tenant_share, "None, or a number above 0 and up to 1")
    _check_seconds("step_timeout", step_timeout)
    heard = isinstance(silence_timeout, (int, float)) and 1 <= silence_timeout <= MAX_STEP_S
    require(heard, ConfigError, "silence_timeout", silence_timeout, f"1 to {MAX_STEP_S} seconds")
    _check_seconds("placement_timeout", placement_timeout)
    recovery = Recovery(checked_int(ConfigError, "recoveries", recoveries, 0, MAX_RECOVERIES), silence_timeout)
    progress = progress or (lambda text, done, of: None)
    told = cuts is not None or (balance == "even" and fence != nearest_even_fence(cfg, n))
    cut: dict[str, Any] = {"by": "cuts" if told else balance}
    if balance in TIMED:
        of_each = threads or threads_each(os.cpu_count() or 1, n)
        fence, cut = cut_by_time(cfg, policy, path, chosen, n, TIMED[balance], of_each, prefill_chunk, progress)
    specs = [
        StageSpec(
            model=str(path),
            cfg=cfg,
            fence=fence,
            stage=s,
            policy=policy,
            threads=threads,
            max_rows=prefill_chunk,
            device=device,
            share=names.count(device),
            budget_bytes=budget,
        )
        for s, (device, budget) in enumerate(zip(names, budgets, strict=True))
    ]
    chain = _chain(backend, specs, chosen, by_memory, recovery, placement_timeout, progress)
    cost = CostModel(cfg, chain.specs[0].fence, policy, [chain.devices[home].granularity for home in chain.homes])
    admission = Admission(Ledger(chain.devices, chain.homes), cost, max_ctx, bypass=bypass, tenant_share=tenant_share)
    pipe = Pipeline(path, chain, admission, default_max_new_tokens, prefill_chunk, step_timeout, cut)
    pipe.watchers += _watchers(backend, path, pipe.report)
    return pipe


def _chain(
    backend: str,
    specs: list[StageSpec],
    model: type[StageModel],
    by_memory: Refence | None,
    recovery: Recovery,
    placement_s: float,
    progress: Progress,
) -> Chain:
    match backend:
        case "ray":
            from .ray_stages import launch_ray

            return launch_ray(specs, model, by_memory, recovery, placement_s, progress)
        case "local":
            require_gpus([spec.device for spec in specs])
            return _local_chain(specs, model, by_memory, progress)
        case _:
            raise ConfigError(f"backend={backend!r}: choose ray or local")


def _watchers(backend: str, model: Path, report: Report) -> list[Watcher]:
    """Who looks at a pipeline: whoever asks for its status, and, by way of Ray, Prometheus."""
    name = f"{os.getpid()}-{next(_numbers)}"
    watchers: list[Watcher] = [*open_door(name, report, {"model": str(model), "backend": backend})]
    if backend == "ray":
        from ..figures.metrics_ray import exporters

        watchers += exporters(f"{model.stem}-{name}", report)
    return watchers


def _local_chain(specs: list[StageSpec], model: type[StageModel], by_memory: Refence | None, progress: Progress) -> LocalChain:
    workers: list[StageWorker] = []
    specs = [spec.among(len(specs), os.cpu_count() or 1, os.uname().nodename) for spec in specs]
    free = [] if by_memory is None else [free_bytes(spec.device) for spec in specs]
    specs = refenced(specs, free, by_memory)
    try:
        for done, spec in enumerate(specs):
            progress(f"loading {spec}", done, len(specs))
            workers.append(StageWorker.load(spec, model))
        return LocalChain(workers)
    except BaseException:
        for worker in workers:
            worker.close()
        raise


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


def _checked(model: type[StageModel]) -> type[StageModel]:
    missing = [name for name in ("load", "workspace_bytes", "forward") if not callable(getattr(model, name, None))]
    if missing or not isinstance(model, type):
        what = f"has no {', no '.join(missing)}" if missing else "is no class"
        raise ConfigError(f"stage_model={model!r:.80} {what}: pass a class, as memra_pp.models.StageModel says")
    return model


def _check_balance(balance: str, stages: int | None, cuts: Sequence[int] | None) -> None:
    require(balance in get_args(Balance), ConfigError, "balance", balance, f"one of {', '.join(get_args(Balance))}")
    if balance != "even" and cuts is not None:
        raise ConfigError(f"balance={balance!r} with cuts={list(cuts)}: pass one of them")
    if balance in TIMED and stages is None:
        raise ConfigError(f"balance={balance!r} without stages: say how many stages to cut the model into")


def _check_seconds(name: str, value: float) -> None:
    allowed = isinstance(value, (int, float)) and 0 < value <= MAX_STEP_S
    require(allowed, ConfigError, name, value, f"more than 0 and at most {MAX_STEP_S} seconds")


def _check_measurable(balance: str, names: list[str]) -> None:
    """Times are found out on this machine's CPU: of a GPU they say nothing."""
    if balance in TIMED and any(kind_of(name) == "cuda" for name in names):
        raise ConfigError(f"balance={balance!r} on devices {names}: it is measured on a CPU; pass cuts, or balance='bytes'")


def _device_names(devices: str | Sequence[str], stages: int) -> list[str]:
    """The device of every stage."""
    if isinstance(devices, str):
        require(devices in ("auto", "cpu", "cuda"), ConfigError, "devices", devices, "auto, cpu, cuda, or a list of names")
        listed = os.environ.get("MEMRA_PP_DEVICES", "").strip()
        if devices != "auto" or not listed:
            return [f"{'cpu' if devices == 'auto' else devices}:{s}" for s in range(stages)]
        devices = [name.strip() for name in listed.split(",")]
    names = list(devices)
    require(len(names) == stages, ConfigError, "devices", names, f"{stages} names, one a stage")
    for name in names:
        kind_of(name)
    return names


def _budgets(budget_bytes: int | Sequence[int] | None, stages: int) -> list[int | None]:
    if budget_bytes is None:
        return [None] * stages
    each = list(budget_bytes) if isinstance(budget_bytes, Sequence) else [budget_bytes] * stages
    require(len(each) == stages, ConfigError, "budget_bytes", budget_bytes, f"one number, or {stages} of them, one a stage")
    return [checked_int(ConfigError, "budget_bytes", budget, 1, MAX_BUDGET) for budget in each]
