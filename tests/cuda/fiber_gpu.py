"""`FiberGpu`: a `Gpu` whose memory is the host's and whose kernels are executed on the CPU by fibers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from on_cpu import Kernels

from memra_pp.kernels.cuda.gpu import DeviceArray, Gpu, Size

ALIGNED = 256
GARBAGE = 0xCD


class FiberGpu(Gpu):
    """Fresh arrays hold garbage. `launched` counts the launches of each kernel, `order` is that of its threads."""

    name = "a GPU of fibers"

    def __init__(self, kernels: Kernels, order: int = 0, free: int = 1 << 30) -> None:
        self.kernels, self.order, self.free = kernels, order, free
        self.launched: dict[str, int] = {}

    def free_bytes(self) -> int:
        return self.free

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        room = np.full(size + ALIGNED, GARBAGE, np.uint8)
        skip = -room.ctypes.data % ALIGNED
        return room[skip : skip + size].view(dtype).reshape(shape)

    def upload(self, array: np.ndarray[Any, Any]) -> DeviceArray:
        out = self.empty(array.shape, array.dtype)
        out[...] = array
        return out

    def download(self, array: DeviceArray) -> np.ndarray[Any, Any]:
        return np.array(array)

    def clear(self, array: DeviceArray) -> None:
        array[...] = 0

    def copy(self, dst: DeviceArray, src: DeviceArray) -> None:
        assert dst.shape == src.shape and dst.dtype == src.dtype
        dst[...] = src

    def address(self, array: DeviceArray) -> int:
        return int(array.ctypes.data)

    def launch(self, kernel: str, grid: Size, block: Size, args: Sequence[Any], shared: int = 0) -> None:
        self.launched[kernel] = self.launched.get(kernel, 0) + 1
        self.kernels.launch(kernel, grid, block, args, shared, self.order)

    def close(self) -> None:
        pass
