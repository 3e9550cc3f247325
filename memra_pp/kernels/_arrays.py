"""The array types of kernels, and arrays that start on a cache line: a vector across two lines costs two accesses."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

F32Array: TypeAlias = NDArray[np.float32]
U8Array: TypeAlias = NDArray[np.uint8]
I64Array: TypeAlias = NDArray[np.int64]

LINE = 64
"""Bytes of a cache line."""


def aligned_empty(*shape: int) -> F32Array:
    """An uninitialised C-contiguous f32 array that starts on a cache line."""
    return _aligned(np.empty(math.prod(shape) + LINE // 4, np.float32), shape)


def aligned_zeros(*shape: int) -> F32Array:
    """A C-contiguous f32 array of zeros that starts on a cache line; memory that is never written is never touched."""
    return _aligned(np.zeros(math.prod(shape) + LINE // 4, np.float32), shape)


def _aligned(room: F32Array, shape: tuple[int, ...]) -> F32Array:
    skip = -room.ctypes.data % LINE // room.itemsize
    return room[skip : skip + math.prod(shape)].reshape(shape)
