"""`HostGpu`: a `Gpu` whose memory is the host's. It has no kernels."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from memra_pp.kernels.cuda.gpu import DeviceArray, Gpu, Size

ALIGNED = 256
GARBAGE = 0xCD


class DeviceGone(Exception):
    """What a poisoned device answers to everything."""


class HostGpu(Gpu):
    """Fresh arrays hold garbage."""

    name = "a GPU of the host's memory"

    def __init__(self, free: int = 1 << 30) -> None:
        self.free = free

    def free_bytes(self) -> int:
        return self.free

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        room = np.full(size + ALIGNED, GARBAGE, np.uint8)
        skip = -room.ctypes.data % ALIGNED
        return room[skip : skip + size].view(dtype).reshape(shape)

    def persistent(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        return self.empty(shape, dtype)

    def share(self, array: DeviceArray) -> bytes:
        return str(self.address(array)).encode()

    def attach(self, handle: bytes, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        """Of this very process."""
        size = math.prod(shape) * np.dtype(dtype).itemsize
        return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(int(handle))).view(dtype).reshape(shape)

    def upload(self, array: np.ndarray[Any, Any]) -> DeviceArray:
        out = self.empty(array.shape, array.dtype)
        out[...] = array
        return out

    def download(self, array: DeviceArray) -> np.ndarray[Any, Any]:
        return np.array(array)

    def clear(self, array: DeviceArray) -> None:
        array[...] = 0

    def wait(self) -> None:
        pass

    def copy(self, dst: DeviceArray, src: DeviceArray) -> None:
        assert dst.shape == src.shape and dst.dtype == src.dtype
        dst[...] = src

    def export(self, array: DeviceArray) -> Any:
        return array

    def lost(self, error: BaseException) -> bool:
        return isinstance(error, DeviceGone)

    def address(self, array: DeviceArray) -> int:
        return int(array.ctypes.data)

    def launch(self, kernel: str, grid: Size, block: Size, args: Sequence[Any], shared: int = 0) -> None:
        raise AssertionError(f"{kernel}: this GPU has no kernels")

    def close(self) -> None:
        pass
