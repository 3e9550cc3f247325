"""Block formats, appends, rebases and copies of the CUDA backend, executed on the CPU: the bytes of the CPU kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from memra_pp.cache import Cache, KvPolicy
from memra_pp.cache.formats import BLOCK_BYTES, LARGEST
from memra_pp.config import KvPlan, ModelConfig, RecurrentPlan
from memra_pp.errors import CacheError, CapacityExceeded
from memra_pp.kernels import CpuDev, blocks
from memra_pp.kernels.addresses import layer_row
from memra_pp.kernels.append import append_rows
from memra_pp.kernels.batches import KvBatch
from memra_pp.kernels.codes import FORMAT_CODES
from memra_pp.kernels.cuda.backend import CudaBackend
from memra_pp.kernels.cuda.device import CudaDev
from memra_pp.kernels.cuda.gpu import Gpu
from memra_pp.kernels.spans import Spans

WINDOW = 64
RINGED = ModelConfig("toy", 2, 32, 40, 9000, (KvPlan(2, 64, 32, window=WINDOW, ring="reader"), KvPlan(2, 64, 32)))
HYBRID = ModelConfig("toy", 3, 32, 40, 256, (KvPlan(1, 32, 32), RecurrentPlan(5, 4, 77), RecurrentPlan(5, 4, 77)))


def edge_values() -> np.ndarray[Any, Any]:
    """Blocks of all that is hard: zeros of both signs, subnormals, infinities, NaN, ties, extremes, one large value."""
    random = np.random.default_rng(3)
    rows = [
        np.zeros(32),
        np.full(32, -0.0),
        np.tile([0.0, -0.0], 16),
        np.tile([-0.0, 0.0], 16),
        np.full(32, 1e-45),
        np.full(32, np.inf),
        np.full(32, -np.inf),
        np.tile([np.inf, -1.0], 16),
        np.tile([np.nan, 1.0], 16),
        np.full(32, 3.4e38),
        np.arange(32) - 15.5,
        np.arange(32) / 2,
        np.tile([127, 0.5, 2.5, -0.5], 8),
        np.tile([448, 449, 464, 465, 2**-6, 2**-9, 2**-10, 3 * 2**-10], 4),
        np.tile([65504, -65504], 16),
        np.tile([5e-39, -3e-39], 16),
        *(random.standard_normal(32) * 10.0**power for power in range(-42, 38, 2)),
        *random.standard_normal((200, 32)),
    ]
    with np.errstate(over="ignore"):
        return np.array(rows).astype(np.float32)


@pytest.mark.parametrize("fmt", BLOCK_BYTES)
def test_blocks_have_the_bytes_of_the_cpu_and_read_back_alike(gpu: Gpu, fmt: str) -> None:
    x = edge_values()
    with np.errstate(all="ignore"):
        expected = blocks.quantize(fmt, x)
    packed = gpu.empty((expected.size,), np.uint8)
    count, code = np.int64(len(x)), np.int32(FORMAT_CODES[fmt])
    gpu.launch("quantise", (-(-len(x) // 8),), (256,), [code, gpu.upload(x), packed, count])
    np.testing.assert_array_equal(gpu.download(packed), expected.reshape(-1))
    unpacked = gpu.empty(x.shape, np.float32)
    gpu.launch("dequantise", (-(-len(x) // 8),), (256,), [code, packed, unpacked, count])
    out = gpu.download(unpacked)
    read = blocks.dequantize(fmt, expected).reshape(x.shape)
    np.testing.assert_array_equal(out, read)
    np.testing.assert_array_equal(np.signbit(out[~np.isnan(out)]), np.signbit(read[~np.isnan(read)]))


def planes(cache: Cache, gpu: Gpu | None = None) -> list[list[int]]:
    """All that a cache's K/V layers hold; of one on a GPU if that is given."""
    buffers = [buffer for layer in cache.kv if layer is not None for buffer in layer.buffers()]
    return [(buffer if gpu is None else gpu.download(buffer)).tolist() for buffer in buffers]


def pair(cfg: ModelConfig, gpu: Gpu, ctx: int, policy: KvPolicy) -> tuple[Cache, Cache]:
    """A cache on either device."""
    return Cache.new(CpuDev(), cfg, ctx, policy=policy), Cache.new(CudaDev(gpu), cfg, ctx, policy=policy)


@pytest.mark.parametrize("policy", [KvPolicy(), KvPolicy(k="fp8", v="q4_0"), KvPolicy(k="f32", v="f32")], ids=str)
def test_appends_to_sessions_at_rows_of_their_own_have_the_bytes_of_the_cpu(gpu: Gpu, policy: KvPolicy) -> None:
    random, backend = np.random.default_rng(1), CudaBackend(gpu)
    caches = [pair(RINGED, gpu, ctx, policy) for ctx in (40, 300, 20)]
    for rows in ((3, 17, 1), (0, 1, 5), (9, 40, 0)):
        for il in range(2):
            k, v = (random.standard_normal((sum(rows), dim)).astype(np.float32) for dim in (128, 64))
            for on, appended in ((0, append_rows), (1, backend.append_rows)):
                layers = [both[on].kv[il] for both in caches]
                batch = KvBatch.of(layers, Spans([both[on].pos for both in caches], rows))  # type: ignore[arg-type]
                retain = [both[on].retain_from(layer) for both, layer in zip(caches, layers, strict=True)]  # type: ignore
                appended(batch, k if on == 0 else gpu.upload(k), v if on == 0 else gpu.upload(v), retain)
        for both in caches:
            for cache in both:
                cache.pos += rows[caches.index(both)]
    for cpu, cuda in caches:
        assert planes(cpu) == planes(cuda, gpu)
        assert [layer.len for layer in cpu.kv if layer] == [layer.len for layer in cuda.kv if layer]


@pytest.mark.parametrize("first", [4000, 4150])
def test_a_ring_moves_its_rows_as_the_cpu_does(gpu: Gpu, first: int) -> None:
    random, backend = np.random.default_rng(2), CudaBackend(gpu)
    cpu, cuda = pair(RINGED, gpu, 8000, KvPolicy(ring="all"))
    cpu.kv[1] = cuda.kv[1] = None
    for rows in (first, 300, 300):
        k, v = (random.standard_normal((rows, dim)).astype(np.float32) for dim in (128, 64))
        for cache, appended in ((cpu, append_rows), (cuda, backend.append_rows)):
            layer = cache.kv[0]
            assert layer is not None
            batch = KvBatch.of([layer], Spans((cache.pos,), (rows,)))
            arrays = (k, v) if cache is cpu else (gpu.upload(k), gpu.upload(v))
            appended(batch, *arrays, [cache.retain_from(layer)])
            cache.pos += rows
        assert cpu.kv[0].base == cuda.kv[0].base  # type: ignore[union-attr]
    assert cuda.kv[0].base > 0 and planes(cpu) == planes(cuda, gpu)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("row_blocks", "source", "keep"), [((4, 2), 3, 50), ((4, 2), 32, 31), ((4, 2), 7, 0), ((1, 1), 1, 999)]
)
def test_held_rows_move_to_the_front_though_the_ranges_overlap(gpu: Gpu, row_blocks: Any, source: int, keep: int) -> None:
    random, codes = np.random.default_rng(4), [FORMAT_CODES[fmt] for fmt in ("q8_0", "q5_1")]
    sizes = [blocks_a_row * size for blocks_a_row, size in zip(row_blocks, (34, 24), strict=True)]
    before = [random.integers(0, 256, (source + keep) * size, np.uint8) for size in sizes]
    moved = [gpu.upload(plane) for plane in before]
    table = np.array([[*map(gpu.address, moved), *codes]], np.int64)
    places = np.array([[0, source, keep, 0]], np.int64)
    kept = gpu.upload(np.full(1, 2**64 - 1, np.uint64))
    args = [gpu.upload(table), gpu.upload(places), *(np.int32(n) for n in row_blocks), kept]
    gpu.launch("rebase_rows", (3, 1, 2), (256,), args)
    for plane, size, old in zip(map(gpu.download, moved), sizes, before, strict=True):
        np.testing.assert_array_equal(plane[: keep * size], old[source * size :])
        np.testing.assert_array_equal(plane[max(keep, 0) * size :], old[keep * size :])


@pytest.mark.parametrize(("name", "row", "column"), [("K", 0, 0), ("V", 4, 63), ("K", 6, 127)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_cannot_be_kept_is_named_and_nothing_of_its_layer_is_written(
    gpu: Gpu, name: str, row: int, column: int, value: float
) -> None:
    backend = CudaBackend(gpu)
    caches = [Cache.new(CudaDev(gpu), RINGED, 40, policy=KvPolicy()) for _ in range(2)]
    before = [planes(cache, gpu)[:2] for cache in caches]
    rows = {"K": np.ones((7, 128), np.float32), "V": np.ones((7, 64), np.float32)}
    rows[name][row, column] = value
    batch = KvBatch.of([cache.kv[0] for cache in caches], Spans((5, 0), (3, 4)))  # type: ignore[misc]
    backend.append_rows(batch, gpu.upload(rows["K"]), gpu.upload(rows["V"]), [0, 0])
    assert [planes(cache, gpu)[:2] for cache in caches] == before
    with pytest.raises(CacheError, match=rf"layer 0: {name} .* position {5 + row if row < 3 else row - 3}, which q"):
        backend.download(gpu.upload(np.zeros(1, np.float32)))
    backend.download(gpu.upload(np.zeros(1, np.float32)))
    assert np.isfinite(LARGEST["q8_0"])


def test_a_snapshot_and_a_restore_are_one_launch_each(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    dev = CudaDev(gpu)
    cache = Cache.new(dev, HYBRID, 64, policy=KvPolicy())
    states = [buffer for layer in cache.recur if layer is not None for buffer in (layer.conv_state, layer.ssm_state)]
    held = [np.arange(len(state), dtype=np.float32) + 100 * i for i, state in enumerate(states)]
    for state, values in zip(states, held, strict=True):
        gpu.copy(state, gpu.upload(values))
    snap, launched = cache.new_snapshot(), []
    launch = gpu.launch
    monkeypatch.setattr(gpu, "launch", lambda kernel, *args: (launched.append(kernel), launch(kernel, *args)))
    cache.snapshot_into(snap)
    for state in states:
        gpu.clear(state)
    cache.rollback(snap, 0)
    assert launched == ["copy_many"] * 2
    assert [gpu.download(state).tolist() for state in states] == [values.tolist() for values in held]


def test_a_device_counts_bytes_and_says_what_is_missing(gpu: Gpu) -> None:
    dev = CudaDev(gpu, budget_bytes=1000, granularity=256)
    dev.reserve(4096)
    slab = dev.slab(512, 1024)
    buf = slab.zeros(10)
    assert dev.allocated_bytes == 1024 and not gpu.download(buf).any()
    gpu.copy(buf, gpu.upload(np.full(10, 7, np.float32)))
    slab.close()
    assert dev.allocated_bytes == 0 and not gpu.download(dev.slab(512, 1024).alloc_u8(1024)).any()
    with pytest.raises(CapacityExceeded, match="an allocation of 1004 bytes where 1000 are free"):
        dev.zeros(251)


def test_the_kernels_tables_are_those_of_the_cpu(gpu: Gpu) -> None:
    cache = Cache.new(CudaDev(gpu), RINGED, 40, policy=KvPolicy())
    layer = cache.kv[0]
    assert layer is not None
    assert layer_row(layer) == (gpu.address(layer.k), gpu.address(layer.v), 0, 1)
