"""The best cut, against every cut there is."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_pp.admission import CostModel, Device, SessionShape, WorkTimes, balance, best_fence, fence_by_time
from memra_pp.admission.balance import sessions_in
from memra_pp.cache import KvPolicy
from memra_pp.config import KvPlan, ModelConfig, RecurrentPlan, SharedKvPlan, WeightBytes, check_fence, stage_layers
from memra_pp.config.fence import nearest_even_fence, valid_cuts
from memra_pp.errors import ConfigError

POLICY = KvPolicy()
SHAPE = SessionShape(40)
KV, WIDE, RECURRENT, NOTHING = KvPlan(1, 32, 32), KvPlan(4, 64, 64), RecurrentPlan(64, 4, 512), RecurrentPlan(0, 2, 0)


def model(layers, n_mtp: int = 0) -> ModelConfig:
    return ModelConfig("test", len(layers) - n_mtp, 64, 100, 1000, tuple(layers))


def none_of(cfg: ModelConfig) -> WeightBytes:
    return WeightBytes((0,) * cfg.n_layer, 0, 0, False, False, "none")


@st.composite
def models(draw):
    layers = [draw(st.sampled_from([KV, WIDE, RECURRENT, NOTHING]))]
    for _ in range(draw(st.integers(0, 7))):
        owners = [il for il, plan in enumerate(layers) if isinstance(plan, KvPlan)]
        shared = [SharedKvPlan(owners[-1])] if owners and draw(st.booleans()) else []
        layers.append(draw(st.sampled_from([KV, WIDE, RECURRENT, NOTHING, *shared])))
    return model([*layers, *[KV] * (n_mtp := draw(st.integers(0, 2)))], n_mtp)


@st.composite
def problems(draw):
    """A model, its weights and as many devices as it can be cut for: some with too little for anything, one with a lot."""
    cfg = draw(models())
    small, large = st.integers(0, 3000), st.integers(0, 100_000)
    matrix = draw(small)
    weights = WeightBytes(
        tuple(draw(st.lists(small, min_size=cfg.n_layer, max_size=cfg.n_layer))),
        draw(large) + matrix, draw(large) + matrix, draw(st.booleans()), False, "test", matrix,
    )  # fmt: skip
    budget = draw(st.sampled_from([20_000, 200_000, 1_000_000]))
    devices = [
        Device(f"d{s}", draw(st.integers(-100, budget)), draw(st.sampled_from([1, 1, 4096, 50_000])))
        for s in range(draw(st.integers(1, min(4, len(valid_cuts(cfg)) + 1))))
    ]
    shape = SessionShape(draw(st.integers(1, 60)), draw(st.integers(0, 2)), "states", draw(st.integers(0, 2)))
    return cfg, shape, devices, weights


def stages_of(cfg, shape, devices, weights, fence):
    """What each stage has for slabs, and a slab there: from the cost model and the weights, a stage at a time."""
    last = len(devices) - 1
    charges = CostModel(cfg, fence, POLICY, [device.granularity for device in devices]).charges(shape)
    return [
        (device.budget - weights.of_stage(stage_layers(cfg, fence, s), s == 0, s == last), charges[s])
        for s, device in enumerate(devices)
    ]


def sessions(stages) -> float:
    """How many fit on all of them."""
    return min(0 if room < 0 else float("inf") if not slab else room // slab for room, slab in stages)


def fences(cfg, stages):
    for cuts in combinations(range(1, cfg.n_trunk), stages - 1):
        try:
            yield check_fence(cfg, (0, *cuts, cfg.n_trunk))
        except ConfigError:
            continue


@settings(max_examples=400, deadline=None)
@given(problems())
def test_no_other_cut_is_better_nor_as_good_and_closer_to_the_even_one(problem):
    cfg, shape, devices, weights = problem
    even = nearest_even_fence(cfg, len(devices))

    def rank(fence):
        stages = stages_of(*problem, fence)
        most = sessions(stages)
        margin = 0 if most else min(room - slab for room, slab in stages)
        return -most, -margin, sum(abs(a - b) for a, b in zip(fence, even, strict=True)), fence

    every = list(fences(cfg, len(devices)))
    assert best_fence(cfg, POLICY, shape, devices, weights) == min(every, key=rank)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_without_weights_they_are_nothing(problem):
    cfg, shape, devices, _ = problem
    assert best_fence(cfg, POLICY, shape, devices) == best_fence(cfg, POLICY, shape, devices, none_of(cfg))


@given(models())
def test_valid_cuts_are_those_that_a_fence_may_have(cfg):
    def valid(cut):
        try:
            return check_fence(cfg, (0, cut, cfg.n_trunk)) is not None
        except ConfigError:
            return False

    assert valid_cuts(cfg) == [cut for cut in range(1, cfg.n_trunk) if valid(cut)]


def test_more_stages_than_places_to_cut_are_refused():
    cfg = model([KV, SharedKvPlan(0), KV])
    devices = [Device("d", 10**6)] * 3
    assert best_fence(cfg, POLICY, SHAPE, devices[:2]) == (0, 2, 3)
    for some in (devices, []):
        with pytest.raises(ConfigError, match="choose from 1 to 2"):
            best_fence(cfg, POLICY, SHAPE, some)


def test_weights_of_another_model_are_refused():
    with pytest.raises(ConfigError, match="weights of 2 layers for a model of 3"):
        best_fence(model([KV] * 3), POLICY, SHAPE, [Device("d", 1)], none_of(model([KV] * 2)))


def test_a_head_heavier_than_all_layers_gets_its_stage_few_of_them():
    weights = WeightBytes((1000,) * 8, 0, 50_000, False, False, "test")
    devices = [Device("a", 60_000), Device("b", 60_000)]
    assert best_fence(model([KV] * 8), POLICY, SHAPE, devices, weights) == (0, 7, 8)
    assert best_fence(model([KV] * 8), POLICY, SHAPE, devices) == (0, 4, 8)


def test_of_equals_the_first_in_order_is_chosen():
    slab = CostModel(model([KV]), (0, 1), POLICY).charges(SHAPE)[0]
    devices = [Device("a", 4 * slab), Device("b", 2 * slab), Device("c", 4 * slab)]
    assert best_fence(model([KV] * 9), POLICY, SHAPE, devices) == (0, 3, 5, 9)  # (0, 4, 6, 9) is as close to (0, 3, 6, 9)


def test_where_nothing_fits_the_worst_stage_lacks_least():
    slab = CostModel(model([KV]), (0, 1), POLICY).charges(SHAPE)[0]
    assert slab == 2816
    devices = [Device("a", 0), Device("b", 2 * slab - 600)]
    assert best_fence(model([KV] * 8), POLICY, SHAPE, devices) == (0, 3, 8)


@pytest.mark.parametrize(("layers", "stages"), [(128, 8), (400, 16)])
def test_few_of_the_stages_that_could_be_are_looked_at(layers, stages, monkeypatch):
    cfg = model([KvPlan(8, 128, 128) if il % 4 == 3 else RecurrentPlan(10240, 4, 1 << 20) for il in range(layers)])
    weights = WeightBytes(tuple((il % 7 + 20) << 25 for il in range(layers)), 1 << 31, 1 << 31, False, False, "test")
    devices = [Device(str(s), (s % 3 + 2) * layers // stages << 29, 2 << 20) for s in range(stages)]
    looked: list[int] = []

    def counted(room, slab):
        looked.append(room)
        return sessions_in(room, slab)

    monkeypatch.setattr(balance, "sessions_in", counted)
    fence = best_fence(cfg, POLICY, SessionShape(8192), devices, weights)
    assert len(looked) < layers * layers * stages // 3
    assert sorted(b - a for a, b in pairwise(fence))[0] < layers // stages


def times_of(embed: int, layers: list[int], head: int) -> WorkTimes:
    """Of nanoseconds."""
    return WorkTimes(embed / 1e9, tuple(ns / 1e9 for ns in layers), head / 1e9)


@st.composite
def timed(draw):
    """A model with few different times, so that many cuts are equals, and a number of stages."""
    cfg = draw(models())
    ns = st.sampled_from(draw(st.sampled_from([[0, 1, 2, 3], [5], [1, 1_000_000, 1_000_001, 2_000_000]])))
    layers = draw(st.lists(ns, min_size=cfg.n_trunk, max_size=cfg.n_trunk))
    ends = st.one_of(ns, st.integers(0, 10_000_000))
    return cfg, draw(ends), layers, draw(ends), draw(st.integers(1, len(valid_cuts(cfg)) + 1))


@settings(max_examples=500, deadline=None)
@given(timed())
def test_no_other_cut_is_faster_nor_as_fast_and_more_even(problem):
    cfg, embed, layers, head, stages = problem
    even = nearest_even_fence(cfg, stages)

    def rank(fence):
        took = [sum(layers[lo:hi]) for lo, hi in pairwise(fence)]
        took[0] += embed
        took[-1] += head
        off = sum(abs(a - b) for a, b in zip(fence, even, strict=True))
        return max(took), sum(ns * ns for ns in took), off, fence

    assert fence_by_time(cfg, times_of(embed, layers, head), stages) == min(fences(cfg, stages), key=rank)


@given(st.integers(1, 12), st.integers(0, 10**12), st.data())
def test_equal_layers_are_cut_evenly(layers, ns, data):
    cfg, stages = model([KV] * layers), data.draw(st.integers(1, layers))
    assert fence_by_time(cfg, times_of(0, [ns] * layers, 0), stages) == nearest_even_fence(cfg, stages)


def test_a_head_slower_than_all_layers_gets_its_stage_one_of_them():
    times = times_of(1, [100] * 8, 5000)
    assert fence_by_time(model([KV] * 8), times, 2) == (0, 7, 8)
    assert fence_by_time(model([KV] * 8), times, 3) == (0, 3, 7, 8)  # the others as even as can be: 301 and 400
    assert times.of_stages((0, 3, 7, 8)) == pytest.approx([301e-9, 400e-9, 5100e-9])


def test_layers_that_share_rows_are_not_parted_by_time():
    cfg = model([KV, KV, SharedKvPlan(1), SharedKvPlan(1), KV])
    assert fence_by_time(cfg, times_of(0, [1, 1, 1, 1, 1], 0), 2) == (0, 1, 5)
    assert fence_by_time(cfg, times_of(0, [1, 1, 1, 1, 9], 0), 2) == (0, 4, 5)
    with pytest.raises(ConfigError, match="choose from 1 to 3"):
        fence_by_time(cfg, times_of(0, [1] * 5, 0), 4)


def test_times_of_another_model_are_refused():
    with pytest.raises(ConfigError, match="times of 2 layers for a trunk of 3"):
        fence_by_time(model([KV] * 4, n_mtp=1), times_of(0, [1, 1], 0), 1)
