"""`append`: the one way rows enter a K/V layer. Plan, move, write, commit: nobody else touches a ring's base."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..cache import Buffer, Contiguous, KvLayer, KvRingAppend, Rebase
from ..cache.formats import LARGEST
from ..errors import CacheError, CapacityExceeded, InputError
from .blocks import quantize_into


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
    _check(layer, "K", k, layer.kv_dim_k, layer.layout.k_fmt, pos)
    _check(layer, "V", v, layer.kv_dim_v, layer.layout.v_fmt, pos)
    rows = len(k)
    if len(v) != rows or pos < 0:
        raise InputError(
            f"layer {layer.index}: {rows} rows of K and {len(v)} of V at row {pos}: equal counts, at row 0 or later"
        )
    plan = _plan(layer, pos, rows, retain_from)
    if isinstance(plan, Rebase):
        _move(layer.k, plan, layer.k_tok_bytes)
        _move(layer.v, plan, layer.v_tok_bytes)
    _write(layer.k, layer.layout.k_fmt, plan.write_row, layer.k_tok_bytes, k)
    _write(layer.v, layer.layout.v_fmt, plan.write_row, layer.v_tok_bytes, v)
    if isinstance(plan, Rebase) and layer.ring is not None:
        layer.ring.apply_rebase(plan.new_base)
    layer.set_len(max(layer.len, pos + rows))


def _plan(layer: KvLayer, pos: int, rows: int, retain_from: int) -> KvRingAppend:
    if layer.ring is not None:
        return layer.ring.append_plan(pos, retain_from, rows)
    if pos + rows > layer.layout.rows:
        raise CapacityExceeded(f"rows [{pos}, {pos + rows}) do not fit in planes of {layer.layout.rows} rows")
    return Contiguous(write_row=pos)


def _move(plane: Buffer, plan: Rebase, tok_bytes: int) -> None:
    start, size = plan.src_row * tok_bytes, plan.keep_rows * tok_bytes
    plane[:size] = plane[start : start + size]


def _write(plane: Buffer, fmt: str, row: int, tok_bytes: int, x: NDArray[np.float32]) -> None:
    quantize_into(fmt, x, plane[row * tok_bytes : (row + len(x)) * tok_bytes])


def _check(layer: KvLayer, name: str, x: NDArray[np.float32], width: int, fmt: str, pos: int) -> None:
    if x.ndim != 2 or x.shape[1] != width or x.dtype != np.float32 or not x.flags.c_contiguous:
        raise InputError(
            f"{name} rows are {x.dtype} {x.shape} with strides {x.strides}: "
            f"layer {layer.index} takes C-contiguous f32 [rows, {width}]"
        )
    bad = ~(np.abs(x) <= LARGEST[fmt])
    if bad.any():
        row = int(np.argwhere(bad)[0][0])
        raise CacheError(
            f"layer {layer.index}: {name} holds {x[row][bad[row]][0]} at position {pos + row}, which {fmt} cannot keep: "
            "look for an overflow in the layers before"
        )
