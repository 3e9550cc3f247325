"""Attention on a GPU: keys shared out by splits of fixed absolute rows, and their results merged.

Any number of rows goes the same way, so a row's bits depend on its query, its position and the stored rows alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...cache.formats import BLOCK, BLOCK_BYTES
from ...errors import InputError
from .._arrays import I64Array
from ..batches import KvBatch
from ..shapes import AttentionSpec
from ..spans import BLOCK_POS, BLOCK_ROWS, BLOCK_START
from .gpu import DeviceArray, Gpu

SPLIT = 256
"""Keys of a split, which begins on a multiple of it."""
VECTORS = (1, 2, 4, 8, 16)
"""Query vectors, rows times heads, that the kernels serve with one reading of the stored rows."""
MOST_DIM = 512
EXTRA = 4
"""Numbers that a split's result has beside the sums: its peak, its total and two that only pad."""
THREADS, COMBINE_THREADS = 128, 256
MOST_RESULTS = 64 << 20
"""Bytes of results that wait to be merged: rows are taken in pieces of so many, or one block of rows."""


def launch(gpu: Gpu, q: DeviceArray, batch: KvBatch, spec: AttentionSpec, out: DeviceArray) -> None:
    """Softmax attention of `q`, f32 `[rows, n_head, head_dim_k]`, to each session's stored rows, into `out`, `[rows, n_head *
    head_dim_v]`.

    Raises:
        InputError: heads are wider than the kernels take, or rows are read that the planes do not hold.
    """
    n_head, window = q.shape[1], spec.window or 0
    _check(batch, spec)
    group = n_head // spec.n_head_kv
    heads = min(group, VECTORS[-1])
    height = max(1, min(VECTORS[-1] // heads, max(batch.spans.rows)))
    vectors = min(n for n in VECTORS if n >= height * heads)
    parts = -(-group // heads)
    dims = [np.int32(n) for n in (heads, n_head, spec.n_head_kv, spec.head_dim_k, spec.head_dim_v, window)]
    layer_bases = np.array([layer.base for layer in batch.layers], np.int64)
    for blocks, splits in _pieces(batch, spec, height, 4 * n_head * (spec.head_dim_v + EXTRA)):
        row, end = int(blocks[0, BLOCK_START]), int(blocks[-1, BLOCK_START] + blocks[-1, BLOCK_ROWS])
        blocks[:, BLOCK_START] -= row
        planes, bases, table = gpu.upload_tables(batch.planes, layer_bases, blocks)
        results = gpu.empty((end - row, n_head, splits, spec.head_dim_v + EXTRA), np.float32)
        args = [q[row:end], planes, bases, table, *dims, np.float32(spec.scale), results]
        grid = (spec.n_head_kv * parts, splits, len(blocks))
        gpu.launch(f"attend_split_{vectors}", grid, (THREADS,), args, _shared(batch, spec, vectors))
        args = [results, table, np.int32(n_head), np.int32(spec.head_dim_v), np.int32(window), np.int32(splits), out[row:end]]
        gpu.launch("attend_combine", (n_head, height, len(blocks)), (COMBINE_THREADS,), args)


def _pieces(batch: KvBatch, spec: AttentionSpec, height: int, split_bytes: int) -> Iterator[tuple[I64Array, int]]:
    """Blocks of rows, a copy, whose results take about `MOST_RESULTS` bytes, and the most splits that one of them touches."""
    table, _ = batch.spans.blocks(height, spec.window)
    first = np.maximum(table[:, BLOCK_POS] - spec.window + 1, 0) if spec.window else np.zeros(len(table), np.int64)
    splits = (table[:, BLOCK_POS] + table[:, BLOCK_ROWS] - 1) // SPLIT - first // SPLIT + 1
    start = 0
    while start < len(table):
        most = np.maximum.accumulate(splits[start:])
        rows = np.cumsum(table[start:, BLOCK_ROWS])
        count = max(1, int(np.searchsorted(most * rows * split_bytes, MOST_RESULTS, side="right")))
        yield table[start : start + count].copy(), int(most[count - 1])
        start += count


def _shared(batch: KvBatch, spec: AttentionSpec, vectors: int) -> int:
    """Bytes of shared memory: the vectors and what is known of them, and two tiles of stored rows as they are."""
    layouts = [layer.layout for layer in batch.layers]
    k_room = max(_room(spec.head_dim_k, layout.k_fmt) for layout in layouts)
    v_room = max(_room(spec.head_dim_v, layout.v_fmt) for layout in layouts)
    return 4 * vectors * (spec.head_dim_k + spec.head_dim_v + 168) + 64 * (k_room + v_room)


def _room(dim: int, fmt: str) -> int:
    """Bytes that a head's part of a stored row takes when copied in words of 16 bytes: odd many, so that rows lie apart."""
    return 16 * ((dim // BLOCK * BLOCK_BYTES[fmt] + 29) // 16 | 1)


def _check(batch: KvBatch, spec: AttentionSpec) -> None:
    if max(spec.head_dim_k, spec.head_dim_v) > MOST_DIM:
        raise InputError(f"{spec}: this kernel takes heads of at most {MOST_DIM} elements")
    for layer, first, end in zip(batch.layers, batch.spans.first_keys(spec.window), batch.spans.ends, strict=True):
        if not (layer.base <= first and end - layer.base <= layer.layout.rows):
            raise InputError(
                f"rows {first} to {end - 1} are read, and the planes hold {layer.layout.rows} from row {layer.base} on: "
                "store the rows first, keep more of them, or re-prime"
            )
