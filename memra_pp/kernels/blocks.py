"""K/V block formats: f32 elements to packed bytes and back, in blocks of 32 along the last axis.

The formats are those of `cache.formats.BLOCK_BYTES`. Compiled when numba is there, NumPy otherwise; the bytes are the
same.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..cache.formats import BLOCK, BLOCK_BYTES
from ..errors import ConfigError, InputError
from ._arrays import aligned_empty

log = logging.getLogger(__name__)

try:
    from . import blocks_numba as _backend
except ImportError as missing:
    from . import blocks_numpy as _backend  # type: ignore[no-redef]

    log.warning("numba cannot be imported (%s): NumPy packs K/V blocks, same bytes but slower", missing)

_QUANTIZE = {fmt: getattr(_backend, f"quantize_{fmt}") for fmt in BLOCK_BYTES if fmt != "f32"}
_DEQUANTIZE = {fmt: getattr(_backend, f"dequantize_{fmt}") for fmt in BLOCK_BYTES if fmt != "f32"}


def backend() -> Literal["numba", "numpy"]:
    """Which implementation packs and reads blocks in this process."""
    return "numba" if _backend.__name__.endswith("numba") else "numpy"


def quantize(fmt: str, x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Packs f32 `x [..., n]` to u8 `[..., n / 32 * BLOCK_BYTES[fmt]]`.

    Raises:
        ConfigError: `fmt` is not a block format.
        InputError: `x` is not f32 or its last axis is not whole blocks.
    """
    blocks = _whole_blocks(fmt, "x", x, np.float32, BLOCK)
    packed = np.empty((*x.shape[:-1], blocks * BLOCK_BYTES[fmt]), np.uint8)
    quantize_into(fmt, np.ascontiguousarray(x), packed.reshape(-1))
    return packed


def dequantize(fmt: str, packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Reads u8 `packed [..., n]` back to f32 `[..., n / BLOCK_BYTES[fmt] * 32]`.

    Raises:
        ConfigError: `fmt` is not a block format.
        InputError: `packed` is not u8 or its last axis is not whole blocks.
    """
    blocks = _whole_blocks(fmt, "packed", packed, np.uint8, BLOCK_BYTES.get(fmt, 1))
    values = aligned_empty(*packed.shape[:-1], blocks * BLOCK)
    dequantize_into(fmt, np.ascontiguousarray(packed), values.reshape(-1))
    return values


def quantize_into(fmt: str, x: NDArray[np.float32], out: NDArray[np.uint8]) -> None:
    """Packs C-contiguous f32 `x [..., n]` into `out`, a C-contiguous 1-D u8 array of exactly the packed size.

    Raises:
        ConfigError: `fmt` is not a block format.
        InputError: a dtype, size or memory order is wrong; `out` is untouched.
    """
    _whole_blocks(fmt, "x", x, np.float32, BLOCK)
    blocks = x.size // BLOCK
    _contiguous("x", x)
    _flat("out", out, np.uint8, blocks * BLOCK_BYTES[fmt])
    flat = x.reshape(-1)
    if fmt == "f32":
        out[:] = flat.view(np.uint8)
    else:
        _QUANTIZE[fmt](flat, out, 0, blocks)


def dequantize_into(fmt: str, packed: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
    """Reads C-contiguous u8 `packed [..., n]` into `out`, a C-contiguous 1-D f32 array of exactly the elements' number.

    Raises:
        ConfigError: `fmt` is not a block format.
        InputError: a dtype, size or memory order is wrong; `out` is untouched.
    """
    _whole_blocks(fmt, "packed", packed, np.uint8, BLOCK_BYTES.get(fmt, 1))
    blocks = packed.size // BLOCK_BYTES[fmt]
    _contiguous("packed", packed)
    _flat("out", out, np.float32, blocks * BLOCK)
    flat = packed.reshape(-1)
    if fmt == "f32":
        out.view(np.uint8)[:] = flat
    else:
        _DEQUANTIZE[fmt](flat, 0, out, 0, blocks)


def _whole_blocks(fmt: str, name: str, array: NDArray[Any], dtype: type, unit: int) -> int:
    """Checks `fmt` and that `array` is whole blocks of `unit` items of `dtype`; blocks along the last axis."""
    if fmt not in BLOCK_BYTES:
        raise ConfigError(f"fmt={fmt!r} is not a K/V block format; use one of {', '.join(BLOCK_BYTES)}")
    if array.dtype != dtype:
        wanted = np.dtype(dtype)
        raise InputError(f"{name} has dtype {array.dtype}, {fmt} takes {wanted}; pass {name}.astype({wanted})")
    if array.ndim == 0 or array.shape[-1] % unit:
        raise InputError(
            f"{name} has shape {array.shape}; its last axis must be a multiple of {unit} (whole {fmt} blocks of {BLOCK}"
            " elements); pad or reshape it"
        )
    return int(array.shape[-1]) // unit


def _contiguous(name: str, array: NDArray[Any]) -> None:
    if not array.flags.c_contiguous:
        raise InputError(f"{name} has strides {array.strides}; it must be C-contiguous; pass np.ascontiguousarray({name})")


def _flat(name: str, array: NDArray[Any], dtype: type, size: int) -> None:
    if array.dtype != dtype or array.shape != (size,) or not array.flags.c_contiguous:
        raise InputError(
            f"{name} is {array.dtype} {array.shape} with strides {array.strides}; it must be a C-contiguous"
            f" {np.dtype(dtype)} array of shape ({size},); allocate or slice it so"
        )
