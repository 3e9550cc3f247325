"""Fences: where a model is cut into pipeline stages. A fence is `(0, c1, ..., n_trunk)`; stage `s` runs from entry `s`
up to entry `s + 1`, and the last stage also runs the MTP/NextN blocks after the trunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import TypeAlias

from ..errors import ConfigError
from .fields import show
from .model import ModelConfig, SharedKvPlan

Fence: TypeAlias = tuple[int, ...]


def even_fence(cfg: ModelConfig, stages: int) -> Fence:
    """The fence of `stages` stages with cut `s` at `s * n_trunk // stages`.

    Raises:
        ConfigError: no such fence, or one of its cuts parts shared K/V (the message names the nearest valid fence).
    """
    if type(stages) is not int or not 1 <= stages <= cfg.n_trunk:
        raise ConfigError(f"stages={show(stages)}: choose from 1 to {cfg.n_trunk}, at least one trunk layer a stage")
    return check_fence(cfg, [s * cfg.n_trunk // stages for s in range(stages + 1)])


def nearest_even_fence(cfg: ModelConfig, stages: int) -> Fence:
    """`even_fence`, its cuts moved as little as shared K/V asks.

    Raises:
        ConfigError: the model cannot be cut into so many stages.
    """
    allowed = valid_cuts(cfg)
    if type(stages) is not int or not 1 <= stages <= len(allowed) + 1:
        raise ConfigError(
            f"stages={show(stages)}: choose from 1 to {len(allowed) + 1}, as there are {len(allowed)} places to cut this model"
        )
    return (0, *_nearest([s * cfg.n_trunk // stages for s in range(1, stages)], allowed), cfg.n_trunk)


def valid_cuts(cfg: ModelConfig) -> list[int]:
    """Every layer that a stage after the first may begin with: between trunk layers, where no shared K/V are parted."""
    parted = _parted(cfg)
    return [cut for cut in range(1, cfg.n_trunk) if cut not in parted]


def fence_from_cuts(cfg: ModelConfig, cuts: Iterable[int]) -> Fence:
    """The fence with these cuts: each is the first layer of a stage, from 1 to `n_trunk - 1`, rising.

    Raises:
        ConfigError: as `check_fence`.
    """
    if not isinstance(cuts, Iterable):
        raise ConfigError(f"cuts={show(cuts)}: give a list of layers, each the first of a stage")
    return check_fence(cfg, [0, *cuts, cfg.n_trunk])


def check_fence(cfg: ModelConfig, fence: Sequence[int]) -> Fence:
    """`fence` as a tuple, if it is one of `cfg`.

    Raises:
        ConfigError: an entry is no whole number, they do not rise strictly from 0 to `n_trunk`, or a cut parts a layer
            from the one whose K/V it reads; then both layers and the nearest valid fence are named.
    """
    fence = tuple(fence)
    if any(type(c) is not int for c in fence):
        raise ConfigError(f"fence {show(list(fence))}: every cut is a whole number")
    if len(fence) < 2 or fence[0] != 0 or fence[-1] != cfg.n_trunk or any(a >= b for a, b in pairwise(fence)):
        raise ConfigError(
            f"fence {show(list(fence))}: cuts rise strictly, each from 1 to {cfg.n_trunk - 1}, "
            f"between 0 and the {cfg.n_trunk} trunk layers"
        )
    parted = _parted(cfg)
    for cut in fence[1:-1]:
        if cut in parted:
            layer, source = parted[cut]
            raise ConfigError(
                f"fence {show(list(fence))}: cut {cut} parts layer {layer} from layer {source}, whose K/V it reads; "
                f"{_advice(cfg, fence)}"
            )
    return fence


def stage_layers(cfg: ModelConfig, fence: Sequence[int], s: int) -> range:
    """The layers of stage `s`; the last stage's reach up to `n_layer`.

    Raises:
        ConfigError: no such stage.
    """
    stages = len(fence) - 1
    if type(s) is not int or not 0 <= s < stages:
        raise ConfigError(f"stage {show(s)}: the fence has stages 0 to {stages - 1}")
    return range(fence[s], cfg.n_layer if s == stages - 1 else fence[s + 1])


def fence_from_env(cfg: ModelConfig, env: Mapping[str, str]) -> Fence | None:
    """The fence that the environment asks for, None if it asks for none; an empty variable is an unset one.

    `MEMRA_PP_STAGES=N` is an even cut, `MEMRA_PP_SPLITS=c1,c2` lists the cuts, `MEMRA_PP_SPLIT=c` is the one cut of two
    stages. `MEMRA_PP_STAGES` beside a list must agree with it.

    Raises:
        ConfigError: a variable that is no such thing or contradicts another, named with its value; or a bad fence.
    """
    stages, splits, split = (env.get(f"MEMRA_PP_{name}", "").strip() for name in ("STAGES", "SPLITS", "SPLIT"))
    if splits and split:
        raise ConfigError(f"MEMRA_PP_SPLITS={show(splits)} and MEMRA_PP_SPLIT={show(split)} are both set; unset one")
    n = _whole("MEMRA_PP_STAGES", stages) if stages else None
    if not splits and not split:
        return None if n is None else even_fence(cfg, n)
    name, text = ("MEMRA_PP_SPLITS", splits) if splits else ("MEMRA_PP_SPLIT", split)
    cuts = [_whole(name, part) for part in (text.split(",") if splits else [text])]
    if n is not None and n != len(cuts) + 1:
        raise ConfigError(f"MEMRA_PP_STAGES={n} but {name}={show(text)} makes {len(cuts) + 1} stages; unset one")
    return fence_from_cuts(cfg, cuts)


def _whole(name: str, text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit() and len(text) <= 9):
        raise ConfigError(f"{name}={show(text)}: not a whole number")
    return int(text)


def _parted(cfg: ModelConfig) -> dict[int, tuple[int, int]]:
    """Every layer before which a cut would part shared K/V, and the first (layer, source) pair that it would part."""
    out: dict[int, tuple[int, int]] = {}
    for il, plan in enumerate(cfg.layers):
        if isinstance(plan, SharedKvPlan):
            for cut in range(plan.source + 1, il + 1):
                out.setdefault(cut, (il, plan.source))
    return out


def _advice(cfg: ModelConfig, fence: Fence) -> str:
    allowed = valid_cuts(cfg)
    if len(allowed) < len(fence) - 2:
        return f"this model can be cut into at most {len(allowed) + 1} stages"
    return f"the nearest valid fence is {[0, *_nearest(fence[1:-1], allowed), cfg.n_trunk]}"


def _nearest(cuts: Sequence[int], allowed: Sequence[int]) -> list[int]:
    """The rising choice from `allowed` that moves `cuts` least in total (the lowest of equals).

    `best[j]` is the least movement of the cuts so far, the last of them within `allowed[:j]`.
    """
    best = [0] * (len(allowed) + 1)
    picks: list[list[int]] = []
    for i, cut in enumerate(cuts):
        row, pick = [1 << 62] * (len(allowed) + 1), [-1] * (len(allowed) + 1)
        for j in range(i, len(allowed)):
            cost = best[j] + abs(allowed[j] - cut)
            row[j + 1], pick[j + 1] = (cost, j) if cost < row[j] else (row[j], pick[j])
        best = row
        picks.append(pick)
    out: list[int] = []
    j = len(allowed)
    for pick in reversed(picks):
        j = pick[j]
        out.append(allowed[j])
    return out[::-1]
