"""Charged is allocated: on every stage of every cut of every known model, whatever the session's shape and the device."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_pp.admission import CostModel, SessionShape
from memra_pp.cache import Cache, KvPolicy, slab_bytes, slice_layout, stage_layers, stage_layout
from memra_pp.config import KvPlan, ModelConfig, RecurrentPlan, SharedKvPlan
from memra_pp.errors import ConfigError
from memra_pp.kernels import CpuDev

CONFIGS = sorted((Path(__file__).parents[1] / "data" / "configs").glob("*.json"))
GRANULARITIES = (1, 256, 512, 2 << 20)
RINGS = (KvPolicy(), KvPolicy(ring="all"))
SHAPES = (
    SessionShape(777),
    SessionShape(9000, speculate=8),
    SessionShape(4640, speculate=3, recurrent="states"),
)
SEEDED_CUTS = 200


class Cut(NamedTuple):
    """A fence, and what the model says of it: an error, or None."""

    fence: tuple[int, ...]
    error: str | None


def checked(cfg: ModelConfig, fence: tuple[int, ...]) -> Cut:
    try:
        CostModel(cfg, fence, RINGS[0])
    except ConfigError as error:
        return Cut(fence, str(error))
    return Cut(fence, None)


def cuts_of(cfg: ModelConfig) -> list[Cut]:
    """Every cut into two stages, and seeded ones into three to eight until 200 of each are valid (or there are no more)."""
    rng, found = random.Random(cfg.arch), [checked(cfg, (0, c, cfg.n_trunk)) for c in range(1, cfg.n_trunk)]
    for stages in range(3, min(8, cfg.n_trunk) + 1):
        seen: dict[tuple[int, ...], Cut] = {}
        for _ in range(20 * SEEDED_CUTS):
            fence = (0, *sorted(rng.sample(range(1, cfg.n_trunk), stages - 1)), cfg.n_trunk)
            if fence not in seen:
                seen[fence] = checked(cfg, fence)
            if sum(cut.error is None for cut in seen.values()) == SEEDED_CUTS:
                break
        found += seen.values()
    return found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_charged_is_allocated_on_every_stage_of_every_cut(path):
    cfg = ModelConfig.from_hf(path)
    devices = [CpuDev(1, granularity=unit) for unit in GRANULARITIES]
    for device in devices:
        device.reserve(1 << 42)

    @cache
    def allocated(layers: range, policy: KvPolicy, shape: SessionShape) -> list[int]:
        """What a session's slab really takes from a device of each granularity."""
        out = []
        layout = slice_layout(cfg, layers, shape.ctx, policy, shape.slots)
        for device in devices:
            slab = device.slab(0, slab_bytes(layout, device.granularity))
            out.append(device.allocated_bytes)
            if device.granularity == 1:
                session = Cache.new_ppn_slice(slab, layers.start, layers.stop, cfg, shape.ctx, policy=policy)
                for _ in range(shape.slots):
                    session.new_snapshot()
                assert slab.used == slab.size and slab.allocated_bytes == sum(a.bytes for a in layout)
            slab.close()
            assert device.allocated_bytes == 0
        return out

    cuts = [fence for fence, error in cuts_of(cfg) if error is None]
    for fence, policy in product(cuts, RINGS):
        models = [CostModel(cfg, fence, policy, [unit] * (len(fence) - 1)) for unit in GRANULARITIES]
        for shape in SHAPES:
            stages = [allocated(stage_layers(cfg, fence, s), policy, shape) for s in range(len(fence) - 1)]
            assert [model.charges(shape) for model in models] == list(zip(*stages, strict=True))
    assert len(cuts) >= min(SEEDED_CUTS, cfg.n_trunk // 2)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_a_cut_that_is_refused_names_the_nearest_that_is_not(path):
    cfg = ModelConfig.from_hf(path)
    refused = [cut for cut in cuts_of(cfg) if cut.error is not None]
    assert bool(refused) == any(isinstance(plan, SharedKvPlan) for plan in cfg.layers)
    for fence, error in refused:
        named = re.search(r"the nearest valid fence is \[([\d, ]+)\]", error)
        if named is None:
            assert f"at most {len(set(valid_cuts(cfg))) + 1} stages" in error and len(fence) - 2 > len(valid_cuts(cfg))
        else:
            assert len(CostModel(cfg, [int(c) for c in named[1].split(",")], RINGS[0]).fence) == len(fence)


def valid_cuts(cfg: ModelConfig) -> list[int]:
    return [c for c in range(1, cfg.n_trunk) if checked(cfg, (0, c, cfg.n_trunk)).error is None]


PLANS = st.one_of(
    st.builds(KvPlan, st.integers(1, 4), st.just(32), st.sampled_from([32, 64]), window=st.sampled_from([None, 32, 100])),
    st.builds(KvPlan, st.just(1), st.just(32), st.just(32), st.just("gemma4_window"), st.just(64), st.just("reader")),
    st.builds(RecurrentPlan, st.integers(1, 40), st.integers(2, 5), st.integers(1, 300)),
)
SHAPE = st.builds(
    SessionShape, st.integers(1, 10_000), st.integers(0, 4), st.sampled_from(["replay", "states"]), st.integers(0, 9)
)


@given(
    plans=st.lists(PLANS, min_size=2, max_size=12),
    mtp=st.lists(PLANS, max_size=2),
    cuts=st.sets(st.integers(1, 11), max_size=4),
    shape=SHAPE,
    granularity=st.sampled_from([1, 100, 256, 4096]),
    policy=st.sampled_from([*RINGS, KvPolicy(k="fp8", v="q4_0"), KvPolicy(k="f32", v="f32", ring="all")]),
)
@settings(max_examples=200, deadline=None)
def test_the_charge_is_the_slab_of_the_stage_s_layout(plans, mtp, cuts, shape, granularity, policy):
    cfg = ModelConfig("any", len(plans), 32, 40, 1 << 20, (*plans, *mtp))
    fence = (0, *sorted(c for c in cuts if c < len(plans)), len(plans))
    cost = CostModel(cfg, fence, policy, [granularity] * (len(fence) - 1))
    for stage in range(len(fence) - 1):
        layout = stage_layout(cfg, fence, stage, shape.ctx, policy, **shape.states)
        assert cost.charges(shape)[stage] == slab_bytes(layout, granularity)
        assert cost.charge(stage, shape.ctx, **shape.states) == cost.charges(shape)[stage]


@given(shape=SHAPE, more=st.sampled_from(["ctx", "snapshots", "speculate"]))
def test_a_larger_shape_is_never_cheaper(shape, more):
    cfg = ModelConfig.from_hf(CONFIGS[0].with_name("qwen3_5-tiny.json"))
    cost = CostModel(cfg, (0, 3, cfg.n_trunk), RINGS[0])
    larger = replace(shape, **{more: getattr(shape, more) + 1})
    assert all(a <= b for a, b in zip(cost.charges(shape), cost.charges(larger), strict=True))
