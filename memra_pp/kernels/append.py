"""`append`: the one way rows enter K/V layers. Plan, move, write, commit: nobody else touches a ring's base."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..cache import Contiguous, KvLayer, Rebase
from ..errors import CacheError, CapacityExceeded, InputError
from ._arrays import F32Array
from .batches import KvBatch
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
    _check_rows("K", k, spans.total, first.kv_dim_k, first.index)
    _check_rows("V", v, spans.total, first.kv_dim_v, first.index)
    places = [_place(*each) for each in zip(layers, spans.pos, spans.rows, retain_from, strict=True)]
    refused = store_rows(k, v, batch.planes, spans.table, np.array(places, np.int64))
    if refused >= 0:
        raise _cannot_keep(batch, k, v, refused)
    for layer, place, end in zip(layers, places, spans.ends, strict=True):
        if layer.ring is not None:
            layer.ring.apply_rebase(place.base)
        if end > layer.len:
            layer.set_len(end)


class _Place(NamedTuple):
    """Where a session's rows go: `keep` rows from physical row `source` on are moved to row 0, which then holds row `base`,
    and the new ones follow at `write`."""

    write: int
    source: int
    keep: int
    base: int


def _place(layer: KvLayer, pos: int, rows: int, retain_from: int) -> _Place:
    if layer.ring is None:
        if pos + rows > layer.layout.rows:
            raise CapacityExceeded(f"rows [{pos}, {pos + rows}) do not fit in planes of {layer.layout.rows} rows")
        return _Place(pos, 0, 0, 0)
    match layer.ring.append_plan(pos, retain_from, rows):
        case Contiguous(write_row):
            return _Place(write_row, 0, 0, layer.ring.base)
        case Rebase(src_row, keep_rows, new_base, write_row):
            return _Place(write_row, src_row, keep_rows, new_base)


def _check_rows(name: str, x: F32Array, rows: int, width: int, index: int) -> None:
    if x.dtype != np.float32 or x.shape != (rows, width) or not x.flags.c_contiguous:
        raise InputError(
            f"{name} rows are {x.dtype} {x.shape} with strides {x.strides}: "
            f"layer {index} takes C-contiguous f32 [{rows}, {width}]"
        )


def _cannot_keep(batch: KvBatch, k: F32Array, v: F32Array, at: int) -> CacheError:
    """What is wrong with the value at index `at` of `k`'s and then `v`'s values."""
    name, x, at = ("K", k, at) if at < k.size else ("V", v, at - k.size)
    row = at // x.shape[1]
    session = int(np.searchsorted(batch.spans.table[:, 0], row, side="right")) - 1
    layer, start = batch.layers[session], int(batch.spans.table[session, 0])
    fmt = layer.layout.k_fmt if name == "K" else layer.layout.v_fmt
    return CacheError(
        f"layer {layer.index}: {name} holds {x.reshape(-1)[at]} at position {batch.spans.pos[session] + row - start}, "
        f"which {fmt} cannot keep: look for an overflow in the layers before"
    )
