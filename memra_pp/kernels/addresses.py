"""Where arrays lie: the numbers that a kernel of many sessions takes instead of their arrays."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import DTypeLike

from ..cache import Cache, KvLayer, RecurLayer
from ..cache.formats import BLOCK, BLOCK_BYTES
from ..errors import ConfigError, InputError
from ._arrays import I64Array, U8Array
from .codes import FORMAT_CODES

K_AT, V_AT, K_CODE, V_CODE = range(4)
"""Columns of a K/V layer's row: the addresses of its planes, and the codes of their formats."""


def address_of(name: str, array: Any, dtype: DTypeLike) -> int:
    """The address of a C-contiguous 1-D array, in the memory of whatever device it is on.

    Raises:
        InputError: it is not one, or of another dtype.
    """
    if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous:
        raise InputError(
            f"{name} is {array.dtype} {array.shape} with strides {array.strides}; "
            f"it must be a C-contiguous 1-D {np.dtype(dtype)} array"
        )
    if isinstance(array, np.ndarray):
        return array.ctypes.data
    return int(array.__cuda_array_interface__["data"][0])


def plane_row(k: U8Array, v: U8Array, k_fmt: str, v_fmt: str) -> tuple[int, int, int, int]:
    """The `K_AT, V_AT, K_CODE, V_CODE` of a pair of planes.

    Raises:
        ConfigError: a format that there is not.
        InputError: a plane is not a C-contiguous 1-D array of bytes.
    """
    for name, fmt in (("k_fmt", k_fmt), ("v_fmt", v_fmt)):
        if fmt not in FORMAT_CODES:
            raise ConfigError(f"{name}={fmt!r} is not a K/V block format; use one of {', '.join(FORMAT_CODES)}")
    at = address_of("k_plane", k, np.uint8), address_of("v_plane", v, np.uint8)
    return *at, FORMAT_CODES[k_fmt], FORMAT_CODES[v_fmt]


def layer_row(layer: KvLayer) -> tuple[int, int, int, int]:
    """The `plane_row` of a layer's planes, which hold the rows that its layout, or its ring, says.

    Raises:
        InputError: they do not.
    """
    layout = layer.layout
    rows = layout.rows if layer.ring is None else max(layout.rows, layer.ring.rows)
    for name, plane, dim, fmt in (("K", layer.k, layer.kv_dim_k, layout.k_fmt), ("V", layer.v, layer.kv_dim_v, layout.v_fmt)):
        size = rows * (dim // BLOCK * BLOCK_BYTES[fmt])
        if plane.size < size:
            raise InputError(f"layer {layer.index}: {plane.size} bytes of {name} do not hold {rows} rows, {size} bytes")
    return plane_row(layer.k, layer.v, layout.k_fmt, layout.v_fmt)


def state_row(layer: RecurLayer) -> tuple[int, int, int]:
    """The addresses of a recurrent layer's conv state, its current and its other SSM state.

    Raises:
        InputError: one is not a C-contiguous 1-D array of f32.
    """
    names = "conv_state", "ssm_state", "ssm_state_alt"
    conv, current, other = (address_of(name, getattr(layer, name), np.float32) for name in names)
    return conv, current, other


class CacheAddresses:
    """A cache's buffers in numbers: they never move, and a cache that is closed has no layer left to look up.

    Attributes:
        planes: i64 `[n_layer, 4]`: the `layer_row` of each K/V layer, 0 where there is none.
    """

    def __init__(self, cache: Cache) -> None:
        self.planes: I64Array = np.array([(0,) * 4 if layer is None else layer_row(layer) for layer in cache.kv], np.int64)
        self._at: dict[int, int] = {}
        for layer in cache.recur:
            if layer is not None:
                self._at.update(zip(map(id, layer.buffers()), state_row(layer), strict=True))

    def state_row(self, layer: RecurLayer) -> tuple[int, int, int]:
        """The `state_row` of one of the cache's layers, looked up."""
        at = self._at
        return at[id(layer.conv_state)], at[id(layer.ssm_state)], at[id(layer.ssm_state_alt)]


_known: WeakKeyDictionary[Cache, CacheAddresses] = WeakKeyDictionary()


def addresses_of(cache: Cache) -> CacheAddresses:
    """A cache's addresses, looked up once."""
    known = _known.get(cache)
    if known is None:
        known = _known[cache] = CacheAddresses(cache)
    return known
