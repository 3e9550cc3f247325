"""`CpuDev`: the cache's device over NumPy, counting every byte, with the threads its kernels run on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..cache import Buffer
from ..errors import CacheError, CapacityExceeded, ConfigError
from ._arrays import aligned_zeros
from .threads import Threads


class CpuDev:
    """Host memory as a `KvDev`. `allocations` counts the buffers handed out since it was made.

    Raises:
        ConfigError: `budget_bytes` or `threads` is less than 1.
    """

    granularity = 1

    def __init__(self, budget_bytes: int | None = None, threads: int = 1) -> None:
        budget = available_bytes() if budget_bytes is None else budget_bytes
        if budget < 1:
            raise ConfigError(f"a device budget of {budget} bytes: it must be at least 1")
        self.budget_bytes = budget
        self.threads = Threads(threads)
        self._sizes: dict[int, int] = {}
        self._allocated = 0
        self.allocations = 0

    @property
    def allocated_bytes(self) -> int:
        """Bytes handed out and not freed."""
        return self._allocated

    def free_bytes(self) -> int:
        """What is left of the budget."""
        return self.budget_bytes - self._allocated

    def zeros(self, n: int) -> Buffer:
        """`n` f32 zeros.

        Raises:
            CapacityExceeded: the budget has not that many bytes (this and every other allocation).
        """
        return self._new(n, np.float32)

    def uninit(self, n: int) -> Buffer:
        """`n` f32; the operating system's zero pages are free, so they are zero here."""
        return self._new(n, np.float32)

    def alloc_u8(self, n: int) -> Buffer:
        """`n` bytes."""
        return self._new(n, np.uint8)

    def htod_i32(self, values: Sequence[int]) -> Buffer:
        """An i32 buffer holding `values`."""
        buf = self._new(len(values), np.int32)
        buf[:] = values
        return buf

    def clone_dtod(self, src: Buffer) -> Buffer:
        """A new buffer with the bytes of `src`."""
        buf = self._new(len(src), src.dtype)
        np.copyto(buf, src)
        return buf

    def copy_into(self, dst: Buffer, off: int, src: Buffer, length: int) -> None:
        """Copies `length` elements of `src` to `dst[off:]`.

        Raises:
            CacheError: the range is not in both buffers, or the dtypes differ.
        """
        if not (0 <= off <= off + length <= len(dst)) or length > len(src) or dst.dtype != src.dtype:
            raise CacheError(
                f"a copy of {length} {src.dtype} from {len(src)} to {off} of {len(dst)} {dst.dtype}: it does not fit"
            )
        np.copyto(dst[off : off + length], src[:length])

    def set_i32_one(self, d: Buffer, value: int) -> None:
        """Sets the single i32 of `d` in place."""
        d[0] = value

    def free(self, buf: Buffer) -> None:
        """Gives the bytes of `buf` back.

        Raises:
            CacheError: the buffer is not this device's, or was freed before.
        """
        size = self._sizes.pop(id(buf), None)
        if size is None:
            raise CacheError(f"a buffer of {buf.nbytes} bytes is not this device's, or was freed before")
        self._allocated -= size

    def close(self) -> None:
        """Ends the device's threads."""
        self.threads.close()

    def _new(self, n: int, dtype: DTypeLike) -> NDArray[np.generic]:
        size = n * np.dtype(dtype).itemsize
        if n < 0 or size > self.free_bytes():
            raise CapacityExceeded(
                f"an allocation of {size} bytes: {self.free_bytes()} of {self.budget_bytes} are free; "
                "close sessions, shorten the context or use more stages"
            )
        buf: NDArray[np.generic] = aligned_zeros(-(-size // 4)).view(np.uint8)[:size].view(dtype)
        self._sizes[id(buf)] = size
        self._allocated += size
        self.allocations += 1
        return buf


def available_bytes() -> int:
    """Memory the machine can still give without swapping, in bytes (`MemAvailable` of proc(5))."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo names no MemAvailable: pass budget_bytes")
