"""The forms in which a matrix of weights `[n_out, n_in]` is kept: as narrow as its file has it, where a product then has the
very bits of that with its f32 values.

    f32      `[n_out, n_in]`
    bf16     its bits, u16 `[n_out, n_in]`
    q8_0     `[n_out, n_in / 32]` of `Q8_0`, also for q4_0 and q5_0: their weights too are `d * q`, with a small integer `q`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..kernels.panels import BF16, CHAIN, Q8_0

F32: TypeAlias = NDArray[np.float32]
U8: TypeAlias = NDArray[np.uint8]
Stored: TypeAlias = NDArray[Any]
"""A matrix, or some of its rows, in one of the forms: the dtype says in which."""

_Q4_0 = np.dtype([("d", "<f2"), ("low", "u1", (CHAIN // 2,))])
_Q5_0 = np.dtype([("d", "<f2"), ("high", "<u4"), ("low", "u1", (CHAIN // 2,))])
"""`block_q4_0` and `block_q5_0` of ggml-common.h: the lower four bits of weights `i` and `i + 16` in a byte, the fifth of
weight `i` in bit `i`."""


def viewed(data: U8, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Rows of bytes `[rows, row_bytes]` as rows of `dtype`."""
    return np.ascontiguousarray(data).view(dtype)


def _of_q4_0(data: U8) -> Stored:
    blocks = viewed(data, _Q4_0)
    return _q8_0(blocks["d"], _nibbles(blocks["low"]).view(np.int8) - np.int8(8))


def _of_q5_0(data: U8) -> Stored:
    blocks = viewed(data, _Q5_0)
    fifth = blocks["high"][..., None] >> np.arange(CHAIN, dtype=np.uint32) & 1
    return _q8_0(blocks["d"], (_nibbles(blocks["low"]) | fifth.astype(np.uint8) << 4).view(np.int8) - np.int8(16))


def _nibbles(low: U8) -> U8:
    return np.concatenate([low & 15, low >> 4], axis=-1)


def _q8_0(d: NDArray[np.float16], q: NDArray[np.int8]) -> Stored:
    blocks = np.empty(d.shape, Q8_0)
    blocks["d"], blocks["q"] = d, q
    return blocks


KEPT: Mapping[str, tuple[np.dtype[Any], Callable[[U8], Stored]]] = {
    "BF16": (BF16, lambda data: viewed(data, BF16)),
    "Q8_0": (Q8_0, lambda data: viewed(data, Q8_0)),
    "Q4_0": (Q8_0, _of_q4_0),
    "Q5_0": (Q8_0, _of_q5_0),
}
"""A type in a file -> the form that it is kept in, and what makes rows of it out of stored bytes. Others are kept in f32."""


def kept_bytes(kind: str, shape: Sequence[int]) -> int:
    """Bytes that a tensor of a type takes once it is loaded, padding aside: only matrices are kept narrow."""
    form = KEPT[kind][0] if kind in KEPT and len(shape) == 2 else np.dtype(np.float32)
    return prod(shape) * form.itemsize // (CHAIN if form == Q8_0 else 1)


def inputs_of(part: Stored) -> int:
    """How many weights a row has."""
    return int(part.shape[1]) * (CHAIN if part.dtype == Q8_0 else 1)


def widened(part: Stored) -> F32:
    """The f32 values, `[rows, n_in]`."""
    if part.dtype == BF16:
        return (part.astype(np.uint32) << 16).view(np.float32)
    if part.dtype == Q8_0:
        products: F32 = part["d"][..., None].astype(np.float32) * part["q"].astype(np.float32)
        return products.reshape(len(part), -1)
    return part
