"""The best cuts, found exactly: `best_fence` lets the most sessions fit, over devices that may differ, and `fence_by_time` has
the slowest stage take the least time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

from ..cache import KvPolicy
from ..cache.sizing import round_up
from ..config import Fence, ModelConfig, WeightBytes
from ..config.fence import nearest_even_fence, valid_cuts
from ..errors import ConfigError
from .cost import layer_charge
from .ledger import Device
from .shape import SessionShape

UNBOUNDED = 1 << 62
"""The sessions that a stage without any cache can hold."""

_NEVER = -(1 << 80)
_FAR = 1 << 200

_Stage: TypeAlias = Callable[[int, int, int], tuple[int, int]]
_Score: TypeAlias = Callable[[int, int, int], int]
"""What stage `s` comes to when it runs the trunk layers `[lo, hi)`, called with `(s, lo, hi)`."""


@dataclass(frozen=True)
class WorkTimes:
    """Seconds that one step of some kind of work takes in the embedding, in each trunk layer, and in the head."""

    embed_s: float
    layers_s: tuple[float, ...]
    head_s: float

    def of_stages(self, fence: Fence) -> list[float]:
        """Each stage's seconds; the embedding is the first one's, the head the last one's."""
        seconds = [sum(self.layers_s[lo:hi]) for lo, hi in pairwise(fence)]
        seconds[0] += self.embed_s
        seconds[-1] += self.head_s
        return seconds


def sessions_in(room: int, slab: int) -> int:
    """How many slabs of `slab` bytes fit in `room` bytes: `UNBOUNDED` of nothing, 0 where the room itself is lacking."""
    if room < 0:
        return 0
    return room // slab if slab else UNBOUNDED


def best_fence(
    cfg: ModelConfig,
    policy: KvPolicy,
    shape: SessionShape,
    devices: Sequence[Device],
    weights: WeightBytes | None = None,
) -> Fence:
    """The fence, stage `s` on `devices[s]`, under which the most sessions of `shape` fit: the least of what its stages hold.

    Exact, over every valid cut, in O(stages * cuts**2) steps at worst. Of equals it is the one whose cuts are off the even
    ones least in total, and of those the first in order. Where not one session fits, it is the fence whose worst stage lacks
    the fewest bytes for one.

    Args:
        devices: one a stage; `budget` is what each has for weights and slabs together.
        weights: what the layers, embedding and head take off the budgets (None: nothing).

    Raises:
        ConfigError: the model cannot be cut into so many stages, or `weights` are of another number of layers.
    """
    even = nearest_even_fence(cfg, len(devices))
    stage = _stage(cfg, policy, shape, devices, weights or WeightBytes((0,) * cfg.n_layer, 0, 0, False, False, "none"))
    cuts = [0, *valid_cuts(cfg), cfg.n_trunk]

    def fit(s: int, lo: int, hi: int) -> int:
        return sessions_in(*stage(s, lo, hi))

    def margin(s: int, lo: int, hi: int) -> int:
        room, slab = stage(s, lo, hi)
        return room - slab

    score = fit
    most = _highest(score, cuts, len(devices))
    if most == 0:
        score = margin
        most = _highest(score, cuts, len(devices))
    return _cheapest(score, most, _off(even), cuts, len(devices))


def fence_by_time(cfg: ModelConfig, times: WorkTimes, stages: int) -> Fence:
    """The fence of `stages` stages whose slowest takes the least time.

    Exact, over every valid cut and to the nanosecond, in O(stages * cuts**2) steps. Of equals it is the one whose stages take
    the most even times (the least sum of squares), of those the one whose cuts are off the even ones least in total, and of
    those the first in order.

    Raises:
        ConfigError: the model cannot be cut into so many stages, or `times` are of another number of layers.
    """
    even = nearest_even_fence(cfg, stages)
    if len(times.layers_s) != cfg.n_trunk:
        raise ConfigError(f"times of {len(times.layers_s)} layers for a trunk of {cfg.n_trunk}: measure them with this config")
    cuts, last, off = [0, *valid_cuts(cfg), cfg.n_trunk], stages - 1, _off(even)
    embed, head, *layers = (round(1e9 * seconds) for seconds in (times.embed_s, times.head_s, *times.layers_s))
    time_to = [0, *accumulate(layers)]
    above_any_off = stages * cfg.n_trunk

    def time(s: int, lo: int, hi: int) -> int:
        return time_to[hi] - time_to[lo] + (embed if s == 0 else 0) + (head if s == last else 0)

    def haste(s: int, lo: int, hi: int) -> int:
        return -time(s, lo, hi)

    def cost(s: int, lo: int, hi: int) -> int:
        return time(s, lo, hi) ** 2 * above_any_off + off(s, lo, hi)

    return _cheapest(haste, _highest(haste, cuts, stages), cost, cuts, stages)


def _off(even: Fence) -> _Score:
    """How far the cut behind a stage is off the even one."""
    return lambda s, lo, hi: abs(hi - even[s + 1])


def _stage(cfg: ModelConfig, policy: KvPolicy, shape: SessionShape, devices: Sequence[Device], weights: WeightBytes) -> _Stage:
    """Gives the room that a stage has for slabs beside its weights, and a session's slab there, both in bytes."""
    if len(weights.layers) != cfg.n_layer:
        raise ConfigError(f"weights of {len(weights.layers)} layers for a model of {cfg.n_layer}: read them with this config")
    last = len(devices) - 1
    units = [device.granularity for device in devices]
    budgets = [device.budget - weights.of_stage(range(0), s == 0, s == last) for s, device in enumerate(devices)]
    charge = {plan: layer_charge(plan, shape, policy) for plan in set(cfg.layers)}
    weight_to = [0, *accumulate(weights.layers)]
    charge_to = [0, *accumulate(charge[plan] for plan in cfg.layers)]

    def stage(s: int, lo: int, hi: int) -> tuple[int, int]:
        end = cfg.n_layer if s == last else hi
        return budgets[s] - weight_to[end] + weight_to[lo], round_up(charge_to[end] - charge_to[lo], units[s])

    return stage


def _highest(score: _Score, cuts: Sequence[int], stages: int) -> int:
    """The highest that the worst stage of a fence over `cuts` can score. A stage with more layers never scores more.

    `best[i]` is the worst score of the stages so far, at its highest, when they end at `cuts[i]`.
    """
    best = [_NEVER, *(score(0, 0, hi) for hi in cuts[1:])]
    for s in range(1, stages):
        row = [_NEVER] * len(cuts)
        for i in range(s + 1, len(cuts)):
            for j in range(i - 1, s - 1, -1):
                here = score(s, cuts[j], cuts[i])
                if here <= row[i]:
                    break
                row[i] = max(row[i], min(best[j], here))
        best = row
    return best[-1]


def _cheapest(score: _Score, least: int, cost: _Score, cuts: Sequence[int], stages: int) -> Fence:
    """The fence over `cuts` whose stages cost least in total, of those whose every stage scores `least` or more.

    `total[j]` is what the stages from `s` on cost at least when stage `s` begins at `cuts[j]`; `ends[s][j]` is where it then
    ends.
    """
    end = len(cuts) - 1
    total, ends = [_FAR] * end + [0], list[list[int]]()
    for s in reversed(range(stages)):
        row, ends_here = [_FAR] * len(cuts), [end] * len(cuts)
        for j in range(end):
            for i in range(j + 1, end + 1):
                if score(s, cuts[j], cuts[i]) < least:
                    break
                here = cost(s, cuts[j], cuts[i]) + total[i]
                if here < row[j]:
                    row[j], ends_here[j] = here, i
        total = row
        ends.append(ends_here)
    fence, at = [0], 0
    for ends_here in reversed(ends):
        at = ends_here[at]
        fence.append(cuts[at])
    return tuple(fence)
