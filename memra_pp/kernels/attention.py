"""Attention over the quantised rows of a K/V layer, for the rows of one session or of a batch of them.

A row's output bits depend on its query, its position and the stored rows alone: keys are visited in tiles that lie on
multiples of `TILE` of their *absolute* row, a row takes part only in the tiles it sees, and every sum has one order.
The number of rows and of sessions in the call, the threads (they split sessions, heads and rows) and the ring's base do not
enter.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..cache.formats import BLOCK, BLOCK_BYTES
from ..errors import InputError
from ._arrays import F32Array, I64Array, U8Array
from .addresses import plane_row
from .attention_numba import attend
from .batches import KvBatch
from .shapes import AttentionSpec
from .spans import Spans
from .threads import Threads

VECTORS = 64
"""Query vectors (rows x heads that share a K/V head) served by one reading of the stored rows."""
SHARE = 1 << 17
"""Products that are worth waking a thread for: some 50 microseconds of work."""


def attention(
    q: F32Array,
    k_plane: U8Array,
    v_plane: U8Array,
    formats: tuple[str, str],
    spec: AttentionSpec,
    pos: int,
    base: int,
    threads: Threads,
) -> F32Array:
    """Softmax attention of query rows at positions `pos, pos + 1, ...`: f32 `[rows, n_head * head_dim_v]`.

    Args:
        q: f32 `[rows, n_head, head_dim_k]`, rotated, C-contiguous. Head `h` reads K/V head `h // (n_head / n_head_kv)`.
        k_plane, v_plane: u8, 1-D; absolute row `a` starts at byte `(a - base) * bytes of a row`. The rows of these very
            positions are already stored.
        formats: the planes' block formats, names in `BLOCK_BYTES`.
        spec: the layer's shape.
        pos: the absolute position of `q`'s first row.
        base: the absolute row at the start of the planes; 0 unless they are a ring.
        threads: the threads to use.

    Raises:
        ConfigError: a format that there is not.
        InputError: shapes, dtypes or positions disagree with the planes.
    """
    _check_queries(q, spec)
    planes = np.array([plane_row(k_plane, v_plane, *formats)], np.int64)
    spans = Spans((pos,), (len(q),))
    held = min(
        plane.size // (spec.n_head_kv * dim // BLOCK * BLOCK_BYTES[fmt])
        for plane, dim, fmt in zip((k_plane, v_plane), (spec.head_dim_k, spec.head_dim_v), formats, strict=True)
    )
    return _attend(q, planes, (base,), (held,), spans, spec, threads)


def attend_rows(q: F32Array, batch: KvBatch, spec: AttentionSpec, threads: Threads) -> F32Array:
    """`attention` of every session of a batch to its own rows of one layer: f32 `[rows, n_head * head_dim_v]`.

    `q` is f32 `[rows, n_head, head_dim_k]` with the sessions' rows one after another as `batch.spans` says; their K and V
    rows are already stored.

    Raises:
        InputError: shapes, dtypes or positions disagree with what a session holds.
    """
    _check_queries(q, spec)
    spans, plan = batch.spans, batch.layers[0].plan
    shape = spec.n_head_kv, spec.head_dim_k, spec.head_dim_v
    if len(q) != spans.total or (plan.n_head_kv, plan.head_dim_k, plan.head_dim_v) != shape:
        raise InputError(f"q has {len(q)} rows for {spec}; the batch has {spans.total} for {plan}")
    bases, held = [layer.base for layer in batch.layers], [layer.layout.rows for layer in batch.layers]
    return _attend(q, batch.planes, bases, held, spans, spec, threads)


def _attend(
    q: F32Array,
    planes: I64Array,
    bases: Sequence[int],
    held: Sequence[int],
    spans: Spans,
    spec: AttentionSpec,
    threads: Threads,
) -> F32Array:
    """Attention over planes that hold `held[i]` rows from row `bases[i]` on.

    Units are blocks of a session's rows times K/V heads, shared out by their work.
    """
    for base, rows, first, end in zip(bases, held, spans.first_keys(spec.window), spans.ends, strict=True):
        if not (0 <= base <= first and end - base <= rows):
            raise InputError(
                f"rows {first} to {end - 1} are read, and the planes hold {rows} from row {base} on: store the rows first, "
                "keep more of them, or re-prime"
            )
    rows, n_head, _ = q.shape
    out = np.empty((rows, n_head * spec.head_dim_v), np.float32)
    group = n_head // spec.n_head_kv
    height = max(1, min(VECTORS // group, -(-rows // threads.n)))
    blocks, work = spans.blocks(height, spec.window)
    threads.run(
        attend,
        work * spec.n_head_kv,
        max(1, SHARE // (group * (spec.head_dim_k + spec.head_dim_v))),
        q.reshape(-1),
        planes,
        np.array(bases, np.int64),
        blocks,
        (height, n_head, spec.n_head_kv, spec.head_dim_k, spec.head_dim_v),
        spec.window or 0,
        np.float32(spec.scale),
        out.reshape(-1),
    )
    return out


def _check_queries(q: F32Array, spec: AttentionSpec) -> None:
    good = q.dtype == np.float32 and q.ndim == 3 and q.shape[2] == spec.head_dim_k and q.flags.c_contiguous
    if not good or q.shape[1] < 1 or q.shape[1] % spec.n_head_kv:
        raise InputError(
            f"q is {q.dtype} {q.shape} with strides {q.strides}; it must be C-contiguous float32 [rows, n_head,"
            f" {spec.head_dim_k}] with n_head a multiple of {spec.n_head_kv}"
        )
