"""`append`: the one way rows enter K/V layers. Plan, move, write, commit: nobody else touches a ring's base."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..cache import KvLayer
from ._arrays import F32Array
from .batches import KvBatch
from .places import cannot_keep, check_rows, commit_bases, place_of
from .spans import Spans

try:
    from .append_numba import store_rows
except ImportError:
    from .append_numpy import store_rows


def append(layer: KvLayer, pos: int, k: NDArray[np.float32], v: NDArray[np.float32], retain_from: int) -> None:
    """Quantises rows into the layer's planes at absolute row `pos`, keeping every row from `retain_from` on.

    Args:
        layer: the attention layer, on a CPU device.
        pos: absolute row of the first new one.
        k, v: f32 `[rows, kv_dim_k]` and `[rows, kv_dim_v]`, C-contiguous.
        retain_from: the first absolute row a ring must keep; a flat layer keeps all.

    Raises:
        InputError: the shapes disagree, or `pos` is negative; nothing has changed.
        CacheError: a value is NaN, or larger than the format keeps; it names layer and position. Nothing has changed.
        RingLapped, CacheError: the ring cannot keep what is asked; nothing has changed.
        CapacityExceeded: the rows do not fit a flat layer; nothing has changed.
    """
    append_rows(KvBatch.of([layer], Spans((pos,), (len(k) if k.ndim else 0,))), k, v, (retain_from,))


def append_rows(batch: KvBatch, k: F32Array, v: F32Array, retain_from: Sequence[int]) -> None:
    """`append` for one layer of every session of a batch, all or nothing.

    `k`, `v` are f32 `[rows, kv_dim_k]` and `[rows, kv_dim_v]` with the sessions' rows one after another as `batch.spans`
    says; `retain_from` is a row a session.

    Raises:
        InputError, CacheError, RingLapped, CapacityExceeded: as `append`, of any session; nothing has changed in any.
    """
    layers, spans = batch.layers, batch.spans
    first = layers[0]
    check_rows("K", k, spans.total, first.kv_dim_k, first.index)
    check_rows("V", v, spans.total, first.kv_dim_v, first.index)
    places = [place_of(*each) for each in zip(layers, spans.pos, spans.rows, retain_from, strict=True)]
    refused = store_rows(k, v, batch.planes, spans.table, np.array(places, np.int64))
    if refused >= 0:
        raise cannot_keep(batch, refused, str(np.concatenate([k.reshape(-1), v.reshape(-1)])[refused]))
    commit_bases(layers, places)
    for layer, end in zip(layers, spans.ends, strict=True):
        if end > layer.len:
            layer.set_len(end)
