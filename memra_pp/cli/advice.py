"""What to change so that more sessions fit: each change is planned, and those that help are told with their numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any, TypeAlias

from ..admission.ledger import Device
from ..admission.planner import Plan, Setup, planned
from ..cache.formats import K_CHOICES, V_CHOICES, KvPolicy, RingMode
from ..config import KvPlan, ModelConfig
from ..config.fence import valid_cuts
from ..errors import ConfigError
from .options import spelled, spelled_devices, weights

MAX_ORDERS = 24
"""Up to so many orders of the devices are all tried, else from small to large and back."""

MAX_ORDER_TEXT = 60
FEWER_BITS = "4.5bpw"

_DOORS = {"fp8_ordinary": "MEMRA_KV_FP8", "fp8_gemma4_global": "MEMRA_GEMMA_GKV", "fp8_gemma4_window": "MEMRA_GEMMA_WKV"}
"""The switches that give a class of layers e4m3 whatever the formats are: a policy's field, and its name outside."""

_Memory: TypeAlias = tuple[int, int]
"""A device's bytes and its granularity."""


@dataclass(frozen=True)
class Alternative:
    """A change, in the words of the command, and the plan it leads to."""

    change: str
    plan: Plan


@dataclass(frozen=True)
class Advice:
    """The changes that help, and, where too little fits, how many devices like the last one would do (None: no number)."""

    alternatives: list[Alternative]
    devices_needed: int | None


def advice(plan: Plan) -> Advice:
    """The changes under which more sessions fit, on the plan's own cut or on the best one."""
    fence, stages = plan.given.fence if plan.given else None, len(plan.setup.devices)
    changed = [
        Alternative(change, planned(setup, plan.asked, fence if len(setup.devices) == stages else None))
        for change, setup in _changes(plan)
    ]
    helpful = [
        a for a in changed if _more(a.plan.base.sessions, plan.base.sessions) or _more(a.plan.best.sessions, plan.best.sessions)
    ]
    return Advice(helpful + _best_order(plan), _devices_needed(plan) if lacks(plan) else None)


def lacks(plan: Plan) -> bool:
    """Whether fewer fit than were asked for, or none."""
    return _more(plan.asked or 1, plan.best.sessions)


def open_doors(cfg: ModelConfig, policy: KvPolicy) -> dict[str, str]:
    """The doors to e4m3 that are open, for a class of layers that the model has."""
    classes = {f"fp8_{plan.kv_class}" for plan in cfg.layers if isinstance(plan, KvPlan)}
    return {door: name for door, name in _DOORS.items() if door in classes and getattr(policy, door)}


def _more(a: int | None, b: int | None) -> bool:
    return b is not None and (a is None or a > b)


def _changes(plan: Plan) -> Iterator[tuple[str, Setup]]:
    """Every change worth a try, most of them one option of the command."""
    setup = plan.setup
    shape, policy = setup.shape, setup.policy
    ring = _widest_ring(setup.cfg, policy)
    yield f"--ring {ring}", replace(setup, policy=replace(policy, ring=ring))
    for k, v in product(K_CHOICES, V_CHOICES):
        yield f"--kv-k {k} --kv-v {v}", replace(setup, policy=replace(policy, k=k, v=v))
    if doors := open_doors(setup.cfg, policy):
        closed: dict[str, Any] = dict.fromkeys(doors, False)
        yield " ".join(f"{name}=0" for name in doors.values()), replace(setup, policy=replace(policy, **closed))
    if shape.recurrent == "states":
        yield "--recurrent replay", replace(setup, shape=replace(shape, recurrent="replay"))
    if shape.snapshots > 1:
        yield "--snapshots 1", replace(setup, shape=replace(shape, snapshots=1))
    elif not shape.speculate:
        yield "--snapshots 0 (no rollback, no drafts)", replace(setup, shape=replace(shape, snapshots=0))
    if shape.ctx > 1:
        yield f"--ctx {shape.ctx // 2}", replace(setup, shape=replace(shape, ctx=shape.ctx // 2))
    if any(cut.stages[cut.binding].bound_by == "weights" for cut in (plan.base, plan.best)):
        yield from _fewer_bits(setup)
    if len(setup.devices) <= len(valid_cuts(setup.cfg)):
        last = setup.devices[-1]
        yield f"one more device of {spelled(last.budget)}, last", replace(setup, devices=(*setup.devices, last))


def _fewer_bits(setup: Setup) -> Iterator[tuple[str, Setup]]:
    """Quantised weights, where the config says how many there are."""
    try:
        yield f"--weights {FEWER_BITS}", replace(setup, weights=weights(FEWER_BITS)(setup.cfg))
    except ConfigError:
        return


def _widest_ring(cfg: ModelConfig, policy: KvPolicy) -> RingMode:
    """The mode that rings the most layers, of equals the one that asks for least."""
    modes: tuple[RingMode, ...] = ("off", "step", "all")
    layers = [plan for plan in cfg.layers if isinstance(plan, KvPlan)]
    return max(modes, key=lambda mode: sum(map(replace(policy, ring=mode).ringed, layers)))


def _best_order(plan: Plan) -> list[Alternative]:
    """The order of the devices in which the most sessions fit, if they are more."""
    memory = [(device.budget, device.granularity) for device in plan.setup.devices]
    if len(set(memory)) == 1:
        return []
    fence = plan.given.fence if plan.given else None
    plans = [planned(_on(plan.setup, order), plan.asked, fence) for order in _orders(memory)]
    best = max(plans, key=lambda p: float("inf") if p.best.sessions is None else p.best.sessions)
    if not _more(best.best.sessions, plan.best.sessions):
        return []
    text = f"--devices {spelled_devices([device.budget for device in best.setup.devices])}"
    if len(text) > MAX_ORDER_TEXT:
        first, last = (best.setup.devices[s].budget for s in (0, -1))
        text = f"the devices from {'small to large' if first < last else 'large to small'}"
    return [Alternative(text, best)]


def _orders(memory: list[_Memory]) -> list[tuple[_Memory, ...]]:
    """Every order if there are few, else from small to large and back."""
    few = list(islice(_distinct(memory), MAX_ORDERS + 1)) if len(memory) <= MAX_ORDERS else []
    if 0 < len(few) <= MAX_ORDERS:
        return few
    return [tuple(sorted(memory)), tuple(sorted(memory, reverse=True))]


def _distinct(memory: list[_Memory]) -> Iterator[tuple[_Memory, ...]]:
    if not memory:
        yield ()
    for first in sorted(set(memory)):
        at = memory.index(first)
        yield from ((first, *others) for others in _distinct(memory[:at] + memory[at + 1 :]))


def _devices_needed(plan: Plan) -> int | None:
    """The fewest devices like the last one that hold what was asked for. One more never holds fewer: a stage is cut in two."""
    setup, most = plan.setup, len(valid_cuts(plan.setup.cfg)) + 1
    last = setup.devices[-1].budget, setup.devices[-1].granularity

    def enough(n: int) -> bool:
        return not lacks(planned(_on(setup, (last,) * n), plan.asked))

    needed = bisect_left(range(1, most + 1), True, key=enough) + 1
    return needed if needed <= most else None


def _on(setup: Setup, memory: tuple[_Memory, ...]) -> Setup:
    devices = tuple(Device(f"device {s}", *each) for s, each in enumerate(memory))
    return replace(setup, devices=devices)
