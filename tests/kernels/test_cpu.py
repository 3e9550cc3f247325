"""`CpuDev`'s arena: slabs apart from one another, zero when they are handed out, and given back to the system whole."""

from __future__ import annotations

import mmap
import resource

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_pp.cache import Cache, KvPolicy, slab_bytes
from memra_pp.cache.sizing import SLAB_ALIGN, slice_layout
from memra_pp.config import KvPlan, ModelConfig, RecurrentPlan
from memra_pp.errors import CacheError, CapacityExceeded, ConfigError
from memra_pp.kernels import CpuDev
from memra_pp.kernels.cpu import _group_bytes, available_bytes

PAGE = mmap.PAGESIZE
CFG = ModelConfig("toy", 2, 32, 40, 256, (KvPlan(1, 32, 32), RecurrentPlan(5, 4, 77)))


@pytest.fixture
def dev():
    made = CpuDev(1 << 20)
    made.reserve(64 * PAGE)
    return made


def resident() -> int:
    with open("/proc/self/statm") as fields:
        return int(fields.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize(("offset", "size"), [(0, 5 * PAGE), (3 * PAGE, PAGE), (256, 512), (PAGE - 256, PAGE + 512), (0, 0)])
def test_a_slab_is_zero_whoever_had_its_bytes_before_and_its_neighbours_keep_theirs(dev, offset, size):
    below, above = dev.slab(0, offset), dev.slab(offset + size, 64 * PAGE - offset - size)
    for neighbour in (below, above):
        neighbour.alloc_u8(neighbour.size)[:] = 7
    for _ in range(2):
        slab = dev.slab(offset, size)
        assert slab.free_bytes() == size
        buf = slab.alloc_u8(size)
        assert not buf.any()
        buf[:] = 9
        slab.close()
        slab.close()
    assert dev.allocated_bytes == 64 * PAGE - size
    assert all((n._memory == 7).all() for n in (below, above))


def test_buffers_of_a_slab_start_aligned_and_end_with_it(dev):
    slab = dev.slab(256, 4 * SLAB_ALIGN)
    bufs = [slab.zeros(1), slab.alloc_u8(257), slab.htod_i32([1, 2])]
    assert [buf.ctypes.data % SLAB_ALIGN for buf in bufs] == [0, 0, 0]
    assert slab.used == 4 * SLAB_ALIGN and slab.free_bytes() == 0 and slab.allocated_bytes == 4 + 257 + 8
    with pytest.raises(CapacityExceeded, match="1 bytes where 0 are free"):
        slab.alloc_u8(1)
    clone_of = dev.slab(PAGE, PAGE)
    assert clone_of.clone_dtod(bufs[2]).tolist() == [1, 2] and clone_of.allocations == 1
    slab.free(bufs[0])
    assert slab.allocated_bytes == 265 and slab.free_bytes() == 0
    for wrong in (bufs[0], np.zeros(1, np.uint8)):
        with pytest.raises(CacheError, match="freed before"):
            slab.free(wrong)


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 1), (PAGE - 1, 2), (PAGE, PAGE), (0, 64 * PAGE), (2 * PAGE - 1, 1), (-1, 1), (64 * PAGE, 1), (0, -1)],
)
def test_a_slab_that_overlaps_or_leaves_the_arena_is_refused_and_takes_nothing(dev, offset, size):
    dev.slab(0, PAGE // 2), dev.slab(PAGE, PAGE)
    before = dev.allocated_bytes
    with pytest.raises(CapacityExceeded, match="slab"):
        dev.slab(offset, size)
    assert dev.allocated_bytes == before and dev.slab(PAGE // 2, PAGE // 2).size == PAGE // 2


def test_slabs_that_nobody_owns_are_taken_back_and_read_as_zeros(dev):
    kept, lost = dev.slab(0, PAGE), dev.slab(PAGE, 2 * PAGE + 256)
    for slab in (kept, lost):
        slab.alloc_u8(slab.size)[:] = 7
    dev.keep_only([kept])
    assert dev.slab_bytes == PAGE and (kept._memory == 7).all()
    assert not dev.slab(PAGE, 2 * PAGE + 256).alloc_u8(2 * PAGE + 256).any()


def test_slabs_are_whole_units_of_the_device():
    dev = CpuDev(1, granularity=512)
    dev.reserve(4096)
    for offset, size in ((256, 512), (0, 256), (0, 513)):
        with pytest.raises(CapacityExceeded):
            dev.slab(offset, size)
    dev.slab(512, 1024)


@pytest.mark.parametrize("granularity", [0, -1, 3, 100])
def test_a_granularity_is_a_power_of_two(granularity):
    with pytest.raises(ConfigError, match="power of two"):
        CpuDev(1, granularity=granularity)


def test_an_arena_is_reserved_once_and_one_that_cannot_be_is_an_error(dev):
    with pytest.raises(CacheError, match="already"):
        dev.reserve(PAGE)
    with pytest.raises(CapacityExceeded, match="smaller budget_bytes"):
        CpuDev(1).reserve(1 << 62)
    with pytest.raises(CapacityExceeded):
        CpuDev(1).slab(0, 1)


def test_single_buffers_and_slabs_are_counted_apart(dev):
    buf = dev.zeros(100)
    dev.slab(0, PAGE)
    assert (dev.allocated_bytes, dev.slab_bytes, dev.peak_bytes) == (400 + PAGE, PAGE, 400)
    assert dev.free_bytes() == (1 << 20) - 400
    dev.free(buf)
    assert (dev.allocated_bytes, dev.peak_bytes) == (PAGE, 400)


def test_reserving_touches_no_memory_and_a_closed_slab_gives_its_own_back():
    dev, size, before = CpuDev(), 256 << 20, resident()
    dev.reserve(1 << 40)
    slab = dev.slab(1 << 30, size)
    assert resident() - before < size // 8
    buf = slab.alloc_u8(size)
    buf[:: PAGE // 2] = 1
    assert resident() - before > size // 2
    slab.close()
    assert resident() - before < size // 8


@given(
    shape=st.tuples(st.integers(1, 200), st.integers(0, 3)), policy=st.sampled_from([KvPolicy(), KvPolicy(k="f32", v="f32")])
)
@settings(max_examples=50, deadline=None)
def test_a_cache_fills_its_slab_exactly(shape, policy):
    ctx, snapshots = shape
    layout = slice_layout(CFG, range(2), ctx, policy, snapshots)
    dev = CpuDev(1)
    dev.reserve(1 << 24)
    slab = dev.slab(512, slab_bytes(layout))
    cache = Cache.new_ppn_slice(slab, 0, 2, CFG, ctx, policy=policy)
    for _ in range(snapshots):
        cache.new_snapshot()
    assert slab.free_bytes() == 0 and slab.allocated_bytes == sum(a.bytes for a in layout)
    cache.close()
    assert slab.allocated_bytes == 0
    short = CpuDev(1)
    short.reserve(1 << 24)
    with pytest.raises(CapacityExceeded):
        Cache.new_ppn_slice(
            short.slab(0, slab_bytes(slice_layout(CFG, range(2), ctx, policy)) - 256), 0, 2, CFG, ctx, policy=policy
        )


@pytest.mark.parametrize(
    ("files", "bytes_left"),
    [
        ({}, 1 << 62),
        ({"memory.max": "max\n", "memory.current": "5\n", "memory.stat": "inactive_file 3\n"}, 1 << 62),
        ({"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 1\ninactive_file 30\n"}, 330),
        ({"memory.max": "1000\n", "memory.current": "1700\n", "memory.stat": ""}, 0),
        ({"memory.max": "what\n", "memory.current": "1\n", "memory.stat": ""}, 1 << 62),
        ({"memory.max": "1000\n", "memory.current": "x\n", "memory.stat": ""}, 1 << 62),
    ],
)
def test_a_container_s_limit_counts(tmp_path, files, bytes_left):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert _group_bytes(tmp_path) == bytes_left
    assert 0 < available_bytes() < 1 << 62
