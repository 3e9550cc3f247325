"""`plan`: what every stage of a pipeline would hold, how many sessions fit, and which cut lets the most fit.

No device is asked and no weights are read: charges are those that admission makes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from ..cache import (
    PRIME_CHUNK_MAX_TOKENS,
    KvPolicy,
    cache_allocated_bytes_for_layers,
    cache_bytes_per_token_for_layers,
    cache_fixed_bytes_for_layers,
    cache_snapshot_bytes_for_layers,
)
from ..cache.formats import resolved
from ..cache.sizing import Recurrent
from ..config import (
    Fence,
    KvPlan,
    ModelConfig,
    RecurrentPlan,
    WeightBytes,
    check_fence,
    estimate_weight_bytes,
    stage_layers,
)
from ..config.fence import nearest_even_fence
from ..errors import ConfigError, checked_int, require
from .balance import UNBOUNDED, best_fence, sessions_in
from .cost import CostModel, workspace_bytes
from .ledger import Device
from .shape import MAX_SNAPSHOTS, SessionShape, checked_recurrent

RESERVE_BYTES = 1 << 30
"""Left alone on each device, for what nobody counts: contexts, libraries, buffers between stages."""

STEP_ROWS = 512
"""The most rows of one step, for which a stage keeps workspace."""

_MAX_BYTES = 1 << 60


@dataclass(frozen=True)
class Setup:
    """What is planned for. Each device's `budget` is all of its memory here, of which `reserve` bytes are left alone."""

    cfg: ModelConfig
    devices: tuple[Device, ...]
    shape: SessionShape
    policy: KvPolicy
    weights: WeightBytes
    reserve: int = RESERVE_BYTES
    max_rows: int = STEP_ROWS

    @cached_property
    def workspaces(self) -> tuple[int, ...]:
        """Bytes of workspace on every stage: an estimate, as `widest_row` is. The last stage's has the logits."""
        width, stages = widest_row(self.cfg), len(self.devices)
        rows, n_embd, n_vocab = self.max_rows, self.cfg.n_embd, self.cfg.n_vocab
        return tuple(workspace_bytes(rows, n_embd, width, n_vocab if s == stages - 1 else 0) for s in range(stages))

    @cached_property
    def budgets(self) -> tuple[Device, ...]:
        """The devices, each with what it has for weights and sessions."""
        taken = [workspace + self.reserve for workspace in self.workspaces]
        return tuple(replace(d, budget=d.budget - n) for d, n in zip(self.devices, taken, strict=True))


@dataclass(frozen=True)
class StagePlan:
    """One stage of a cut.

    Attributes:
        memory_bytes: of its device, off which `reserve_bytes`, `workspace_bytes` and `weight_bytes` are taken.
        token_bytes: a session's cache of one token. A ring holds no more tokens than its rows.
        snapshot_bytes: one copy of a session's recurrent state.
        rows_bytes: a session's cache of its context, rings no longer than they get.
        fixed_bytes: a session's cache that no context changes.
        copies_bytes: every copy of a session's recurrent state, of snapshots and of kept states.
        session_bytes: the slab that a session is charged: rows, fixed bytes, copies and `padding_bytes`.
        sessions: how many fit here (None: any number, as they hold nothing here).
        free_bytes: left beside the sessions that were asked for, else those that the cut holds and at least one. Below 0:
            what they lack.
    """

    stage: int
    device: str
    layers: range
    memory_bytes: int
    reserve_bytes: int
    workspace_bytes: int
    weight_bytes: int
    token_bytes: int
    snapshot_bytes: int
    rows_bytes: int
    fixed_bytes: int
    copies_bytes: int
    session_bytes: int
    sessions: int | None
    free_bytes: int

    @property
    def room_bytes(self) -> int:
        """For sessions; below 0 where the weights do not fit."""
        return self.memory_bytes - self.kept_bytes - self.weight_bytes

    @property
    def kept_bytes(self) -> int:
        """For workspace and reserve."""
        return self.workspace_bytes + self.reserve_bytes

    @property
    def padding_bytes(self) -> int:
        """What rounding adds to a session, of its buffers, and of the slab to the device's granularity."""
        return self.session_bytes - self.rows_bytes - self.fixed_bytes - self.copies_bytes

    @property
    def bound_by(self) -> Literal["weights", "workspace and reserve", "cache"]:
        """What takes the most of the device."""
        if max(self.weight_bytes, self.kept_bytes) <= self.room_bytes:
            return "cache"
        return "weights" if self.weight_bytes >= self.kept_bytes else "workspace and reserve"


@dataclass(frozen=True)
class CutPlan:
    """What a fence comes to: its stages, and the sessions that fit on all of them (None: any number).

    `binding` is the stage that holds the fewest sessions, of several the one that lacks most for one more.
    """

    fence: Fence
    stages: tuple[StagePlan, ...]
    sessions: int | None
    binding: int

    @property
    def shortest(self) -> StagePlan | None:
        """The stage that lacks the most bytes for the sessions asked for (see `free_bytes`); None where they fit."""
        stage = min(self.stages, key=lambda stage: stage.free_bytes)
        return stage if stage.free_bytes < 0 else None


@dataclass(frozen=True)
class Plan:
    """The even cut, the best one and the one that was asked for, if one was. `asked` sessions are to fit (None: the most)."""

    setup: Setup
    asked: int | None
    even: CutPlan
    best: CutPlan
    given: CutPlan | None = None

    @property
    def base(self) -> CutPlan:
        """The cut that the best one is compared with, the one asked for, else the even one."""
        return self.given or self.even

    @property
    def advised(self) -> CutPlan:
        """The one asked for, else the best one."""
        return self.given or self.best


def plan(
    cfg: ModelConfig,
    devices: Sequence[Device | int],
    ctx: int,
    sessions: int | None = None,
    policy: KvPolicy | None = None,
    *,
    weights: WeightBytes | None = None,
    snapshots: int = 1,
    recurrent: Recurrent = "replay",
    speculate: int = 0,
    fence: Sequence[int] | None = None,
    reserve: int = RESERVE_BYTES,
    max_rows: int = STEP_ROWS,
) -> Plan:
    """Plans a pipeline with one stage on each of `devices`, in that order.

    A device's memory less the stage's weights, workspace and the reserve is for sessions, and each takes what `CostModel`
    charges for `ctx` rows exactly. The embedding is on the first stage; the head and MTP/NextN blocks are on the last.

    Args:
        devices: one a stage, its `budget` all of its memory in bytes; or that number alone.
        ctx: rows of a session's context, all of them: `session_ctx` of its prompt and new tokens.
        sessions: how many are to fit (None: as many as do).
        policy: K/V formats and rings (None: the process's).
        weights: their bytes (default: `estimate_weight_bytes`; `setup.weights.estimated` says which they are).
        snapshots: most live snapshots of a session; `recurrent` and `speculate`: how it rolls back, and drafts a round.
        fence: a cut to plan beside the even and the best one.
        reserve: bytes of every device that are left alone.
        max_rows: most rows of one step, for which workspace is kept.

    Raises:
        ConfigError: a number out of its bounds, drafts without a snapshot, more devices than the model can be cut for, a
            fence that is not the model's or not of one stage a device, or weights that cannot be estimated or are of another
            number of layers.
        InputError: `recurrent` is neither replay nor states.
    """
    max_rows = checked_int(ConfigError, "max_rows", max_rows, 1, PRIME_CHUNK_MAX_TOKENS)
    if type(ctx) is not int or not 1 <= ctx <= cfg.max_ctx:
        raise ConfigError(f"ctx={ctx!r:.40}: choose from 1 to {cfg.max_ctx} rows, the context that {cfg.arch} was made for")
    shape = SessionShape(
        ctx,
        checked_int(ConfigError, "snapshots", snapshots, 0, MAX_SNAPSHOTS),
        checked_recurrent(recurrent),
        checked_int(ConfigError, "speculate", speculate, 0, max_rows - 1),
    )
    if shape.speculate and not shape.snapshots:
        raise ConfigError(f"speculate={shape.speculate} with snapshots=0: drafts are rolled back to a snapshot, so give 1")
    if sessions is not None:
        checked_int(ConfigError, "sessions", sessions, 1, _MAX_BYTES)
    setup = Setup(
        cfg,
        _checked_devices(devices),
        shape,
        resolved(policy),
        estimate_weight_bytes(cfg) if weights is None else weights,
        checked_int(ConfigError, "reserve", reserve, 0, _MAX_BYTES),
        max_rows,
    )
    return planned(setup, sessions, fence)


def _checked_devices(devices: Sequence[Device | int]) -> tuple[Device, ...]:
    require(len(devices) > 0, ConfigError, "devices", list(devices), "at least one, one a stage")
    return tuple(_checked_device(Device(f"device {s}", n) if type(n) is int else n) for s, n in enumerate(devices))


def _checked_device(given: Any) -> Device:
    ok = isinstance(given, Device)
    require(ok, ConfigError, "devices", given, 'a Device each, such as Device("gpu 0", 80 << 30), or its bytes')
    device: Device = given
    checked_int(ConfigError, f"memory of {device.name}", device.budget, 1, _MAX_BYTES)
    checked_int(ConfigError, f"granularity of {device.name}", device.granularity, 1, _MAX_BYTES)
    return device


def planned(setup: Setup, asked: int | None, fence: Sequence[int] | None = None) -> Plan:
    """`plan`, of options that were checked.

    Raises:
        ConfigError: as `plan`, of the fence, the weights and the number of devices.
    """
    cfg, stages = setup.cfg, len(setup.devices)
    if fence is not None and len(check_fence(cfg, fence)) - 1 != stages:
        raise ConfigError(f"fence {list(fence)}: stages={len(fence) - 1}, devices={stages}; there must be one a stage")
    best = best_fence(cfg, setup.policy, setup.shape, setup.budgets, setup.weights)
    return Plan(
        setup,
        asked,
        even=_cut(setup, asked, nearest_even_fence(cfg, stages)),
        best=_cut(setup, asked, best),
        given=None if fence is None else _cut(setup, asked, tuple(fence)),
    )


def widest_row(cfg: ModelConfig) -> int:
    """An estimate, from the config alone, of the f32 that the widest layer holds for a row beyond a few of `n_embd`: gate and
    up, or what the reference forwards' mixers project to. Of experts, only as many as one dense MLP is wide."""
    heads, mlp = (_most(cfg.hparams.get(name)) for name in ("num_attention_heads", "intermediate_size"))
    mixers = [0]
    for layer in set(cfg.layers):
        match layer:
            case KvPlan():
                mixers.append(5 * heads * layer.head_dim_k + 2 * layer.kv_dim_k + 2 * layer.kv_dim_v)
            case RecurrentPlan():
                mixers.append(6 * layer.conv_width)
    return max(2 * mlp, *mixers)


def _most(value: Any) -> int:
    """The largest of a config's number, or of its list with a number a layer; 0 where there is none."""
    return max((n for n in (value if isinstance(value, list) else [value]) if isinstance(n, int)), default=0)


def _cut(setup: Setup, asked: int | None, fence: Fence) -> CutPlan:
    cfg, stages = setup.cfg, range(len(setup.devices))
    layers = [stage_layers(cfg, fence, s) for s in stages]
    weights = [setup.weights.of_stage(layers[s], s == 0, s == stages[-1]) for s in stages]
    rooms = [device.budget - n for device, n in zip(setup.budgets, weights, strict=True)]
    slabs = CostModel(cfg, fence, setup.policy, [device.granularity for device in setup.devices]).charges(setup.shape)
    fits = [sessions_in(room, slab) for room, slab in zip(rooms, slabs, strict=True)]
    binding = min(stages, key=lambda s: (fits[s], rooms[s] - (fits[s] + 1) * slabs[s]))
    held = asked or max(1, _counted(fits[binding]) or 0)
    planned = tuple(
        StagePlan(
            stage=s,
            device=setup.devices[s].name,
            layers=layers[s],
            memory_bytes=setup.devices[s].budget,
            reserve_bytes=setup.reserve,
            workspace_bytes=setup.workspaces[s],
            weight_bytes=weights[s],
            session_bytes=slabs[s],
            sessions=_counted(fits[s]),
            free_bytes=rooms[s] - held * slabs[s],
            **_cache_parts(setup, layers[s]),
        )
        for s in stages
    )
    return CutPlan(fence, planned, _counted(fits[binding]), binding)


def _cache_parts(setup: Setup, layers: range) -> dict[str, int]:
    """What a session's slab is made of, before any rounding."""
    cfg, lo, hi, policy = setup.cfg, layers.start, layers.stop, setup.policy
    fixed = cache_fixed_bytes_for_layers(cfg, lo, hi, policy=policy)
    snapshot = cache_snapshot_bytes_for_layers(cfg, lo, hi)
    return {
        "token_bytes": cache_bytes_per_token_for_layers(cfg, lo, hi, policy=policy),
        "snapshot_bytes": snapshot,
        "rows_bytes": cache_allocated_bytes_for_layers(cfg, lo, hi, setup.shape.ctx, policy=policy) - fixed,
        "fixed_bytes": fixed,
        "copies_bytes": setup.shape.slots * snapshot,
    }


def _counted(fits: int) -> int | None:
    return None if fits == UNBOUNDED else fits
