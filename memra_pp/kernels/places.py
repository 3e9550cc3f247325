"""Where appended rows go, and what is wrong with rows that cannot be kept: the part of `append` that is the same everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..cache import Contiguous, KvLayer, Rebase
from ..errors import CacheError, CapacityExceeded, InputError
from .batches import KvBatch


class Place(NamedTuple):
    """Where a session's rows go: `keep` rows from physical row `source` on are moved to row 0, which then holds row `base`,
    and the new ones follow at `write`."""

    write: int
    source: int
    keep: int
    base: int


def place_of(layer: KvLayer, pos: int, rows: int, retain_from: int) -> Place:
    """Where `rows` rows at `pos` go, keeping those from `retain_from` on; changes nothing.

    Raises:
        CapacityExceeded: they do not fit a flat layer.
        RingLapped, CacheError: the ring cannot keep what is asked.
    """
    if layer.ring is None:
        if pos + rows > layer.layout.rows:
            raise CapacityExceeded(f"rows [{pos}, {pos + rows}) do not fit in planes of {layer.layout.rows} rows")
        return Place(pos, 0, 0, 0)
    match layer.ring.append_plan(pos, retain_from, rows):
        case Contiguous(write_row):
            return Place(write_row, 0, 0, layer.ring.base)
        case Rebase(src_row, keep_rows, new_base, write_row):
            return Place(write_row, src_row, keep_rows, new_base)


def check_rows(name: str, x: Any, rows: int, width: int, index: int) -> None:
    """Raises InputError unless `x` is C-contiguous f32 `[rows, width]`, on whatever device."""
    if x.dtype != np.float32 or x.shape != (rows, width) or not x.flags.c_contiguous:
        raise InputError(
            f"{name} rows are {x.dtype} {x.shape} with strides {x.strides}: "
            f"layer {index} takes C-contiguous f32 [{rows}, {width}]"
        )


def commit_bases(layers: Sequence[KvLayer], places: Sequence[Place]) -> None:
    """Writes down where the rings of layers begin, once their rows have moved."""
    for layer, place in zip(layers, places, strict=True):
        if layer.ring is not None:
            layer.ring.apply_rebase(place.base)


def cannot_keep(batch: KvBatch, at: int, value: str) -> CacheError:
    """What is wrong with the value at index `at` of the rows of K and then of V."""
    first, total = batch.layers[0], batch.spans.total
    of_k = at < total * first.kv_dim_k
    row = at // first.kv_dim_k if of_k else (at - total * first.kv_dim_k) // first.kv_dim_v
    session = int(np.searchsorted(batch.spans.table[:, 0], row, side="right")) - 1
    layer, start = batch.layers[session], int(batch.spans.table[session, 0])
    name, fmt = ("K", layer.layout.k_fmt) if of_k else ("V", layer.layout.v_fmt)
    return CacheError(
        f"layer {layer.index}: {name} holds {value} at position {batch.spans.pos[session] + row - start}, "
        f"which {fmt} cannot keep: look for an overflow in the layers before"
    )
