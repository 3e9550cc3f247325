"""What to change so that more sessions fit: each change is planned, and those that help are told with their numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from ..admission.planner import Plan, Setup, planned
from ..cache.formats import K_CHOICES, V_CHOICES, KvPolicy, RingMode
from ..config import KvPlan, ModelConfig
from ..config.fence import valid_cuts
from .table import human

_DOORS = {"fp8_ordinary": "MEMRA_KV_FP8", "fp8_gemma4_global": "MEMRA_GEMMA_GKV", "fp8_gemma4_window": "MEMRA_GEMMA_WKV"}
"""The switches that give a class of layers e4m3 whatever the formats are: a policy's field, and its name outside."""


@dataclass(frozen=True)
class Alternative:
    """A change, in the words of the command, and the plan it leads to."""

    change: str
    plan: Plan


def alternatives(plan: Plan) -> list[Alternative]:
    """The changes under which more sessions fit, on the plan's own cut or on the best one."""
    fence, stages = plan.given.fence if plan.given else None, len(plan.setup.devices)
    changed = [
        Alternative(change, planned(setup, plan.asked, fence if len(setup.devices) == stages else None))
        for change, setup in _changes(plan.setup)
    ]
    return [
        a for a in changed if _more(a.plan.base.sessions, plan.base.sessions) or _more(a.plan.best.sessions, plan.best.sessions)
    ]


def _more(a: int | None, b: int | None) -> bool:
    return b is not None and (a is None or a > b)


def _changes(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Every change worth a try, most of them one option of the command."""
    shape, policy = setup.shape, setup.policy
    ring = _widest_ring(setup.cfg, policy)
    yield f"--ring {ring}", replace(setup, policy=replace(policy, ring=ring))
    for k, v in product(K_CHOICES, V_CHOICES):
        yield f"--kv-k {k} --kv-v {v}", replace(setup, policy=replace(policy, k=k, v=v))
    if doors := _open_doors(setup.cfg, policy):
        closed: dict[str, Any] = dict.fromkeys(doors, False)
        yield " ".join(f"{_DOORS[door]}=0" for door in doors), replace(setup, policy=replace(policy, **closed))
    if shape.recurrent == "states":
        yield "--recurrent replay", replace(setup, shape=replace(shape, recurrent="replay"))
    fewer = 1 if shape.snapshots > 1 or shape.speculate else 0
    yield f"--snapshots {fewer}", replace(setup, shape=replace(shape, snapshots=fewer))
    if shape.ctx > 1:
        yield f"--ctx {shape.ctx // 2}", replace(setup, shape=replace(shape, ctx=shape.ctx // 2))
    if len(setup.devices) <= len(valid_cuts(setup.cfg)):
        last = setup.devices[-1]
        yield f"one more device of {human(last.budget)}", replace(setup, devices=(*setup.devices, last))


def _widest_ring(cfg: ModelConfig, policy: KvPolicy) -> RingMode:
    """The mode that rings the most layers, of equals the one that asks for least."""
    modes: tuple[RingMode, ...] = ("off", "step", "all")
    layers = [plan for plan in cfg.layers if isinstance(plan, KvPlan)]
    return max(modes, key=lambda mode: sum(map(replace(policy, ring=mode).ringed, layers)))


def _open_doors(cfg: ModelConfig, policy: KvPolicy) -> list[str]:
    """The doors to e4m3 that are open, for a class of layers that the model has."""
    classes = {f"fp8_{plan.kv_class}" for plan in cfg.layers if isinstance(plan, KvPlan)}
    return [door for door in _DOORS if door in classes and getattr(policy, door)]
