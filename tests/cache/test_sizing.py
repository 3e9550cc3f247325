"""The byte functions: golden tables, sums over any fence, and stage layouts equal to what a device hands out."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import DATA, FLAT, PACKED, RECURRENT, RINGED, SHAPES, SHARED, model, shape

from memra_pp.cache import (
    Cache,
    KvPolicy,
    cache_allocated_bytes_for_layers,
    cache_bytes_per_token,
    cache_bytes_per_token_for_layers,
    cache_fixed_bytes_for_layers,
    cache_ring_bytes_per_token,
    cache_ring_bytes_per_token_for_layers,
    cache_ring_row_cap,
    cache_snapshot_bytes_for_layers,
    cache_states_bytes_for_layers,
    slab_bytes,
    slab_bytes_by_kind,
    stage_layers,
    stage_layout,
)
from memra_pp.config import even_fence
from memra_pp.errors import ConfigError
from memra_pp.kernels import CpuDev

GOLDEN = json.loads(gzip.decompress((DATA / "sizing.json.gz").read_bytes()))
CONFIGS = {name: shape(name) for name in SHAPES}
HYBRID = model(RINGED, RECURRENT, FLAT, RECURRENT, SHARED)
POLICIES = [KvPolicy(), PACKED, KvPolicy(fp8_ordinary=True), KvPolicy(k="f32", v="f32", ring="step")]

OVER_RANGES = {
    "bytes_per_token": cache_bytes_per_token_for_layers,
    "ring_bytes_per_token": cache_ring_bytes_per_token_for_layers,
    "fixed_bytes": cache_fixed_bytes_for_layers,
    "snapshot_bytes": cache_snapshot_bytes_for_layers,
}
EVERY_SIZE = [
    *OVER_RANGES.values(),
    lambda *args, policy: cache_states_bytes_for_layers(*args, 5, policy=policy),
    lambda *args, policy: cache_allocated_bytes_for_layers(*args, 777, policy=policy),
    lambda *args, policy: cache_allocated_bytes_for_layers(*args, 1 << 20, policy=policy),
]


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: g["name"])
def test_golden_tables(golden):
    cfg = CONFIGS[golden["name"]]
    assert cfg.n_layer == golden["n_layer"]
    for table in golden["tables"]:
        policy = KvPolicy.from_env(table["env"])
        assert cache_ring_row_cap(cfg, policy=policy) == table["ring_row_cap"], table["env"]
        for row in table["ranges"]:
            lo, hi = row["lo"], row["hi"]
            got = {name: size(cfg, lo, hi, policy=policy) for name, size in OVER_RANGES.items()}
            got["allocated_bytes"] = {
                ctx: cache_allocated_bytes_for_layers(cfg, lo, hi, int(ctx), policy=policy) for ctx in row["allocated_bytes"]
            }
            assert {"lo": lo, "hi": hi, **got} == row, table["env"]


@given(data=st.data(), name=st.sampled_from(SHAPES), policy=st.sampled_from(POLICIES))
def test_any_fence_s_parts_sum_to_the_whole(data, name, policy):
    cfg = CONFIGS[name]
    cuts = data.draw(st.lists(st.integers(0, cfg.n_layer), max_size=5))
    fence = [0, *sorted(cuts), cfg.n_layer]
    for size in EVERY_SIZE:
        assert sum(size(cfg, lo, hi, policy=policy) for lo, hi in pairwise(fence)) == size(cfg, 0, cfg.n_layer, policy=policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SHAPES)
def test_whole_model_sizes_are_those_of_the_whole_range(name, policy):
    cfg = CONFIGS[name]
    whole = cfg, 0, cfg.n_layer
    assert cache_bytes_per_token(cfg, policy=policy) == cache_bytes_per_token_for_layers(*whole, policy=policy)
    assert cache_ring_bytes_per_token(cfg, policy=policy) == cache_ring_bytes_per_token_for_layers(*whole, policy=policy)


@given(data=st.data(), name=st.sampled_from(SHAPES), policy=st.sampled_from(POLICIES), ctx=st.integers(1, 10**6))
def test_allocated_is_fixed_plus_rows_times_bytes_a_token(data, name, policy, ctx):
    cfg = CONFIGS[name]
    lo = data.draw(st.integers(0, cfg.n_layer))
    hi = data.draw(st.integers(lo, cfg.n_layer))
    per_token, ringed, fixed = (
        size(cfg, lo, hi, policy=policy)
        for size in (cache_bytes_per_token_for_layers, cache_ring_bytes_per_token_for_layers, cache_fixed_bytes_for_layers)
    )
    rows = min(ctx, cache_ring_row_cap(cfg, policy=policy)), ctx  # every golden shape has one window at most a policy rings
    expected = fixed + rows[0] * ringed + rows[1] * (per_token - ringed)
    assert cache_allocated_bytes_for_layers(cfg, lo, hi, ctx, policy=policy) == expected


def test_one_layer_of_each_kind_by_hand():
    policy = KvPolicy(ring="all")
    sizes = [cache_allocated_bytes_for_layers(HYBRID, il, il + 1, 10_000, policy=policy) for il in range(HYBRID.n_layer)]
    ringed, flat, recurrent = 4159 * (34 + 2 * 24) + 20, 10_000 * (34 + 24) + 20, 4 * (6 * 3 + 2 * 20)
    assert sizes == [ringed, recurrent, flat, recurrent, 0]
    assert cache_snapshot_bytes_for_layers(HYBRID, 0, 5) == 2 * 4 * (6 * 3 + 20)
    assert cache_states_bytes_for_layers(HYBRID, 0, 5, 6) == 6 * cache_snapshot_bytes_for_layers(HYBRID, 0, 5)


def test_the_ring_cap_is_that_of_the_widest_window():
    assert cache_ring_row_cap(HYBRID, policy=KvPolicy(ring="all")) == 32 + 4096 + 31
    assert cache_ring_row_cap(HYBRID, policy=KvPolicy(ring="step")) == 0


@pytest.mark.parametrize("size", EVERY_SIZE)
@pytest.mark.parametrize(("lo", "hi"), [(3, 2), (0, 6), (6, 6), (-1, 2), (6, 5)])
def test_a_range_that_is_not_in_the_model_is_an_error(size, lo, hi):
    with pytest.raises(ConfigError, match=rf"{lo}, {hi}.* 5"):
        size(HYBRID, lo, hi, policy=None)


def test_a_context_of_no_tokens_is_an_error():
    with pytest.raises(ConfigError, match="at least 1"):
        cache_allocated_bytes_for_layers(HYBRID, 0, 5, 0)


def test_no_policy_is_the_process_s(monkeypatch):
    monkeypatch.setenv("MEMRA_KV_FP8", "1")
    monkeypatch.setenv("MEMRA_SWA_RING", "all")
    policy = KvPolicy(fp8_ordinary=True, ring="all")
    assert [size(HYBRID, 0, 5, policy=None) for size in EVERY_SIZE] == [
        size(HYBRID, 0, 5, policy=policy) for size in EVERY_SIZE
    ]
    assert cache_ring_row_cap(HYBRID) == 4159
    assert stage_layout(HYBRID, [0, 5], 0, 9000) == stage_layout(HYBRID, [0, 5], 0, 9000, policy)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", SHAPES)
def test_stage_layouts_sum_to_the_byte_functions(name, policy):
    cfg = CONFIGS[name]
    fence = even_fence(cfg, 2)
    for s in range(2):
        layers = stage_layers(cfg, fence, s)
        lo, hi = layers.start, layers.stop
        allocated = cache_allocated_bytes_for_layers(cfg, lo, hi, 5000, policy=policy)
        snapshot = cache_snapshot_bytes_for_layers(cfg, lo, hi, policy=policy)

        def total(*args, s=s, **kwargs):
            return sum(a.bytes for a in stage_layout(cfg, fence, s, 5000, policy, *args, **kwargs))

        assert total() == allocated
        assert total(snapshots=3) == allocated + 3 * snapshot
        assert total(1, "replay", speculate=4) == allocated + snapshot
        states = cache_states_bytes_for_layers(cfg, lo, hi, 4 + 1, policy=policy)
        assert total(1, "states", speculate=4) == allocated + states


def test_a_stage_layout_names_every_buffer_and_the_layer_it_belongs_to():
    layout = stage_layout(HYBRID, [0, 2, 5], 1, 100, PACKED, snapshots=1)
    kinds = Counter((a.layer, a.name) for a in layout)
    assert set(kinds.values()) == {1}
    assert Counter(a.layer for a in layout) == {2: 3, 3: 3 + 2}


@pytest.mark.parametrize("snapshots", [0, 2])
@pytest.mark.parametrize(("name", "stages"), [("qwen3_5-tiny", 3), ("gemma3-tiny", 2)])
def test_a_device_hands_out_exactly_a_stage_s_layout(name, stages, snapshots):
    cfg = CONFIGS[name]
    fence = even_fence(cfg, stages)
    for s in range(stages):
        dev = CpuDev(1 << 30)
        layers = stage_layers(cfg, fence, s)
        with Cache.new_ppn_slice(dev, layers.start, layers.stop, cfg, 300, policy=PACKED) as cache:
            for _ in range(snapshots):
                cache.new_snapshot()
            assert dev.allocated_bytes == sum(a.bytes for a in stage_layout(cfg, fence, s, 300, PACKED, snapshots))


@pytest.mark.parametrize("granularity", [1, 4096])
@pytest.mark.parametrize("name", SHAPES)
def test_the_kinds_of_a_slab_s_bytes_add_up_to_it(name, granularity):
    cfg = CONFIGS[name]
    fence = even_fence(cfg, 2)
    for s in range(2):
        layout = stage_layout(cfg, fence, s, 777, snapshots=2)
        kinds = slab_bytes_by_kind(layout, granularity)
        assert sum(kinds.values()) == slab_bytes(layout, granularity)
        assert sum(kinds.values()) - kinds["padding"] == sum(a.bytes for a in layout) and kinds["padding"] >= 0
        layers = stage_layers(cfg, fence, s)
        assert kinds["snapshot"] == 2 * cache_snapshot_bytes_for_layers(cfg, layers.start, layers.stop)


def test_each_kind_of_a_slab_s_bytes_by_hand():
    recurrent = 4 * (RECURRENT.conv_width * (RECURRENT.conv_kernel - 1) + RECURRENT.state_width)
    kinds = slab_bytes_by_kind(stage_layout(HYBRID, [0, 2, 5], 1, 100, KvPolicy(), snapshots=3))
    k, v = (FLAT.kv_dim_k // 32 * 34 * 100 + 8, FLAT.kv_dim_v // 32 * 24 * 100 + 8)
    assert (kinds["k"], kinds["v"], kinds["length"], kinds["snapshot"]) == (k, v, 4, 3 * recurrent)
    assert kinds["recurrent"] == recurrent + 4 * RECURRENT.state_width
