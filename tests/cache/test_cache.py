"""`Cache`: the allocation walk, whole or cut anywhere, to the byte; who holds what; and that it all comes back."""

from __future__ import annotations

from itertools import accumulate, product

import numpy as np
import pytest
from toy import F32, FLAT, PACKED, RECURRENT, RINGED, SHAPES, SHARED, feed, model, shape

from memra_pp.cache import (
    Cache,
    KvLayer,
    KvPolicy,
    cache_allocated_bytes_for_layers,
    cache_ring_row_cap,
    cache_snapshot_bytes_for_layers,
    stage_layers,
    stage_layout,
)
from memra_pp.config import KvPlan, RecurrentPlan, SharedKvPlan, even_fence
from memra_pp.errors import CacheError, CapacityExceeded, ConfigError
from memra_pp.kernels import CpuDev

BIG = 1 << 44
POLICIES = {"default": KvPolicy(), "rings": PACKED, "fp8": KvPolicy(fp8_ordinary=True), "f32": F32}
CONTEXTS = dict(zip(POLICIES, (1, 5, 33, 5), strict=True))
HYBRID = model(RINGED, RECURRENT, FLAT, RECURRENT, SHARED, FLAT, n_trunk=5)


@pytest.fixture
def dev():
    device = CpuDev(BIG)
    yield device
    assert device.allocated_bytes == 0, "what was allocated was given back"


def assert_cut_is_exact(cfg, cut, ctx, policy):
    devs = CpuDev(BIG), CpuDev(BIG)
    ranges = (0, cut), (cut, cfg.n_layer)
    caches = [Cache.new_ppn_slice(d, *r, cfg, ctx, policy=policy) for d, r in zip(devs, ranges, strict=True)]
    for d, (lo, hi), cache in zip(devs, ranges, caches, strict=True):
        assert d.allocated_bytes == cache_allocated_bytes_for_layers(cfg, lo, hi, ctx, policy=policy), (cut, lo, hi)
        cache.close()
        assert d.allocated_bytes == 0


@pytest.mark.parametrize(("name", "policy"), [*product(SHAPES, POLICIES)])
def test_a_cut_at_every_layer_allocates_exactly_what_is_said(name, policy):
    cfg = shape(name)
    for cut in range(cfg.n_layer + 1):
        assert_cut_is_exact(cfg, cut, CONTEXTS[policy], POLICIES[policy])


@pytest.mark.parametrize("policy", ["rings", "f32"])
@pytest.mark.parametrize("name", ["gemma3-tiny", "gemma3-270m", "step3p5-flash", "qwen3_5-tiny"])
def test_one_row_past_the_ring_cap(name, policy):
    cfg, kv_policy = shape(name), POLICIES[policy]
    ctx = cache_ring_row_cap(cfg, policy=kv_policy) + 1
    for cut in (0, cfg.n_layer // 3, cfg.n_layer):
        assert_cut_is_exact(cfg, cut, ctx, kv_policy)


@pytest.mark.parametrize("name", SHAPES)
def test_layers_are_at_their_global_index_and_only_where_owned(dev, name):
    cfg = shape(name)
    lo, hi = cfg.n_layer // 3, cfg.n_layer - 1
    with Cache.new_ppn_slice(dev, lo, hi, cfg, 2, policy=PACKED) as cache:
        assert len(cache.kv) == len(cache.recur) == cfg.n_layer
        for il, plan in enumerate(cfg.layers):
            owned = lo <= il < hi
            assert (cache.kv[il] is not None) == (owned and isinstance(plan, KvPlan))
            assert (cache.recur[il] is not None) == (owned and isinstance(plan, RecurrentPlan))
    with Cache.new(dev, cfg, 2, policy=PACKED) as cache:
        for il, plan in enumerate(cfg.layers):
            assert (cache.kv[il] is None and cache.recur[il] is None) == isinstance(plan, SharedKvPlan)


@pytest.mark.parametrize("name", ["qwen3_5-27b", "step3p5-flash", "gemma3-270m", "qwen3_5-tiny"])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_new_ppn_puts_each_layer_on_its_stage_s_device_and_mtp_layers_on_the_last(name, stages):
    cfg = shape(name)
    fence = even_fence(cfg, stages)
    devs = [CpuDev(BIG) for _ in range(stages)]
    with Cache.new_ppn(devs, fence, cfg, 2, policy=PACKED) as cache:
        for s, device in enumerate(devs):
            layers = stage_layers(cfg, fence, s)
            expected = cache_allocated_bytes_for_layers(cfg, layers.start, layers.stop, 2, policy=PACKED)
            assert device.allocated_bytes == expected
            assert all((cache.kv[il] or cache.recur[il]).dev is device for il in layers)
        assert all((cache.kv[il] or cache.recur[il]).dev is devs[-1] for il in range(cfg.n_trunk, cfg.n_layer))
    assert [device.allocated_bytes for device in devs] == [0] * stages


def test_new_pp2_is_a_fence_of_two():
    devs = CpuDev(BIG), CpuDev(BIG)
    with Cache.new_pp2(*devs, 1, HYBRID, 9, policy=F32) as cache:
        assert [(cache.kv[il] or cache.recur[il]).dev for il in (0, 1, 2, 3, 5)] == [devs[0], *[devs[1]] * 4]
        assert devs[0].allocated_bytes == cache_allocated_bytes_for_layers(HYBRID, 0, 1, 9, policy=F32)
    assert [device.allocated_bytes for device in devs] == [0, 0]


def test_a_fence_that_parts_shared_kv_from_its_source_is_refused():
    cfg = shape("gemma4-e4b")
    pairs = [(il, plan.source) for il, plan in enumerate(cfg.layers) if isinstance(plan, SharedKvPlan)]
    for cut in range(1, cfg.n_trunk):
        devs = CpuDev(BIG), CpuDev(BIG)
        parted = [(il, source) for il, source in pairs if source < cut <= il]
        if not parted:
            Cache.new_pp2(*devs, cut, cfg, 1, policy=PACKED).close()
            continue
        with pytest.raises(ConfigError, match="nearest") as error:
            Cache.new_ppn(devs, [0, cut, cfg.n_trunk], cfg, 1, policy=PACKED)
        named = any(f"layer {il} " in str(error.value) and f"layer {source}," in str(error.value) for il, source in parted)
        assert named and "[0, 22, 42]" in str(error.value)
        assert devs[0].allocated_bytes == devs[1].allocated_bytes == 0


@pytest.mark.parametrize("fence", [[0, 5, 5], [0, 2], [0, 6], [1, 5], [0, 3, 2, 5]])
def test_a_fence_that_is_none_of_the_model_is_refused(fence):
    with pytest.raises(ConfigError):
        Cache.new_ppn([CpuDev(BIG)] * (len(fence) - 1), fence, HYBRID, 9, policy=F32)


def test_arguments_that_cannot_be_are_refused_before_anything_is_allocated(dev):
    cases = [
        lambda: Cache.new(dev, HYBRID, 0, policy=F32),
        lambda: Cache.new_ppn_slice(dev, 3, 2, HYBRID, 9, policy=F32),
        lambda: Cache.new_ppn_slice(dev, 0, 7, HYBRID, 9, policy=F32),
        lambda: Cache.new_ppn([dev], [0, 2, 5], HYBRID, 9, policy=F32),
    ]
    for case in cases:
        with pytest.raises(ConfigError):
            case()


def budgets_that_fail(layout):
    """Budgets that hold some of a layout's allocations and not the next."""
    return [total - 1 for total in accumulate(a.bytes for a in layout)]


def test_an_allocation_that_fails_midway_leaves_nothing():
    for budget in budgets_that_fail(stage_layout(HYBRID, [0, 5], 0, 40, F32)):
        device = CpuDev(max(1, budget))
        with pytest.raises(CapacityExceeded):
            Cache.new(device, HYBRID, 40, policy=F32)
        assert device.allocated_bytes == 0


def test_a_failure_on_a_later_stage_s_device_gives_back_the_earlier_ones():
    for budget in budgets_that_fail(stage_layout(HYBRID, [0, 1, 5], 1, 40, F32)):
        devs = CpuDev(BIG), CpuDev(max(1, budget))
        with pytest.raises(CapacityExceeded):
            Cache.new_ppn(devs, [0, 1, 5], HYBRID, 40, policy=F32)
        assert [device.allocated_bytes for device in devs] == [0, 0]


def test_a_snapshot_that_does_not_fit_leaves_what_was_there():
    owned = cache_allocated_bytes_for_layers(HYBRID, 0, 6, 40, policy=F32)
    copies = stage_layout(HYBRID, [0, 5], 0, 40, F32, snapshots=1)[-4:]
    assert sum(a.bytes for a in copies) == cache_snapshot_bytes_for_layers(HYBRID, 0, 6)
    for budget in budgets_that_fail(copies):
        device = CpuDev(owned + budget)
        with Cache.new(device, HYBRID, 40, policy=F32) as cache:
            with pytest.raises(CapacityExceeded):
                cache.snapshot()
            assert device.allocated_bytes == owned
        assert device.allocated_bytes == 0


def test_close_gives_back_snapshots_and_logits_too_and_may_be_called_twice(dev):
    cache = Cache.new(dev, HYBRID, 40, policy=F32)
    cache.snapshot(), cache.new_snapshot(), cache.last_logits()
    cache.close()
    assert dev.allocated_bytes == 0
    cache.close()


def test_last_logits_are_allocated_at_first_use_on_the_last_device():
    devs = CpuDev(BIG), CpuDev(BIG)
    with Cache.new_pp2(*devs, 2, HYBRID, 9, policy=F32) as cache:
        before = [device.allocated_bytes for device in devs]
        assert cache.last_logits_dev is None
        row = cache.last_logits()
        assert (row.dtype, row.shape) == (np.float32, (HYBRID.n_vocab,))
        assert cache.last_logits() is row is cache.last_logits_dev
        assert [device.allocated_bytes for device in devs] == [before[0], before[1] + 4 * HYBRID.n_vocab]
    assert [device.allocated_bytes for device in devs] == [0, 0]


@pytest.mark.parametrize("policy", [F32, PACKED, KvPolicy(fp8_ordinary=True)])
def test_planes_and_states_have_the_sizes_of_the_contract(dev, policy):
    with Cache.new(dev, HYBRID, 10_000, policy=policy) as cache:
        layer: KvLayer = cache.kv[0]
        rows = 10_000 if policy.ring == "off" else 4159
        assert (layer.kv_dim_k, layer.kv_dim_v) == (32, 64)
        assert (layer.k.nbytes, layer.v.nbytes) == (rows * layer.k_tok_bytes + 8, rows * layer.v_tok_bytes + 8)
        assert layer.k.dtype == layer.v.dtype == np.uint8 and layer.len_d.dtype == np.int32 and layer.len_d.shape == (1,)
        assert (layer.ring is not None) == (policy.ring == "all") and cache.kv[2].ring is None
        state = cache.recur[1]
        assert (state.conv_state.shape, state.ssm_state.shape, state.ssm_state_alt.shape) == ((18,), (20,), (20,))
        assert not state.conv_state.any() and not state.ssm_state.any()
        assert (cache.pos, cache.max_ctx, layer.len, layer.len_d[0]) == (0, 10_000, 0, 0)


def test_len_d_and_the_states_stay_the_same_buffers(dev):
    with Cache.new(dev, HYBRID, 10_000, policy=F32) as cache:
        layers = [layer for layer in cache.kv if layer is not None]
        addresses = [layer.len_d.ctypes.data for layer in layers]
        ping_pong = {id(cache.recur[1].ssm_state), id(cache.recur[1].ssm_state_alt)}
        feed(cache, np.arange(41))
        with cache.snapshot() as snap:
            feed(cache, np.arange(50))
            cache.rollback(snap, 9)
            assert [int(layer.len_d[0]) for layer in layers] == [layer.len for layer in layers] == [50] * 3
            feed(cache, np.arange(9))
        feed(cache, np.arange(4096))
        feed(cache, np.arange(100))
        assert [layer.base > 0 for layer in layers] == [True, False, False]
        assert [int(layer.len_d[0]) for layer in layers] == [layer.len for layer in layers] == [4246] * 3
        assert [layer.len_d.ctypes.data for layer in layers] == addresses
        assert {id(cache.recur[1].ssm_state), id(cache.recur[1].ssm_state_alt)} == ping_pong


def test_a_state_swap_swaps_names_and_not_bytes(dev):
    with Cache.new(dev, HYBRID, 9, policy=F32) as cache:
        state = cache.recur[1]
        current, other = state.ssm_state, state.ssm_state_alt
        state.swap()
        assert state.ssm_state is other and state.ssm_state_alt is current


def test_a_buffer_is_freed_once_and_by_its_own_device(dev):
    buf, other = dev.zeros(10), CpuDev(BIG)
    with pytest.raises(CacheError):
        other.free(buf)
    with pytest.raises(CacheError):
        dev.free(buf[:])
    assert dev.allocated_bytes == 40
    dev.free(buf)
    with pytest.raises(CacheError):
        dev.free(buf)
    assert dev.allocated_bytes == 0


def test_sizes_are_in_elements_and_a_copy_must_fit(dev):
    bufs = f, u, i, g = dev.zeros(3), dev.alloc_u8(5), dev.htod_i32([7, -8]), dev.uninit(3)
    assert [b.nbytes for b in bufs] == [12, 5, 8, 12] and dev.allocated_bytes == 37 and dev.free_bytes() == BIG - 37
    assert i.tolist() == [7, -8] and i.dtype == np.int32
    dev.set_i32_one(i, 9)
    g[:] = 1, 2, 3
    dev.copy_into(f, 1, g, 2)
    assert f.tolist() == [0, 1, 2] and i[0] == 9
    clone = dev.clone_dtod(f)
    f[:] = 0
    assert clone.tolist() == [0, 1, 2]
    for dst, off, src, n in [(f, 2, g, 2), (f, -1, g, 1), (f, 0, g, 4), (f, 0, u, 1), (f, 1, g, -1)]:
        with pytest.raises(CacheError):
            dev.copy_into(dst, off, src, n)
    assert f.tolist() == [0, 0, 0]
    for buf in (*bufs, clone):
        dev.free(buf)


def test_a_budget_holds_to_the_byte():
    device = CpuDev(100)
    with pytest.raises(CapacityExceeded, match="101"):
        device.alloc_u8(101)
    buf = device.alloc_u8(100)
    with pytest.raises(CapacityExceeded):
        device.alloc_u8(1)
    device.free(buf)
    device.free(device.zeros(25))
    with pytest.raises(ConfigError):
        CpuDev(0)
