"""`CpuDev`: the cache's device over NumPy, counting every byte, with the threads its kernels run on."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from ..cache import Buffer
from ..cache.sizing import round_up
from ..errors import CapacityExceeded, ConfigError
from ._arrays import U8Array, aligned_zeros
from .backend import Backend
from .memory import ArenaDev
from .threads import Threads

MAP_NORESERVE = 0x4000
"""Linux's flag (asm-generic/mman.h) for memory that counts only once it is touched; Python 3.11 has no name for it."""


NO_LIMIT = 1 << 62


class CpuDev(ArenaDev):
    """Host memory. The operating system backs an arena as it is touched.

    Args:
        budget_bytes: most bytes of single buffers (default: what the machine has available).
        threads: threads that kernels run on.
        granularity: bytes; slabs are whole multiples of it, a power of two.

    Raises:
        ConfigError: `budget_bytes` or `threads` is less than 1, or the granularity is no power of two.
    """

    def __init__(self, budget_bytes: int | None = None, threads: int = 1, granularity: int = 1) -> None:
        super().__init__(available_bytes() if budget_bytes is None else budget_bytes, granularity)
        self.threads = Threads(threads)
        self._mapped: mmap.mmap | None = None

    @cached_property
    def backend(self) -> Backend:
        """The array operations on this device."""
        from .cpu_backend import CpuBackend  # needs numba, which a device's memory does not

        return CpuBackend(self.threads)

    @property
    def label(self) -> str:
        """How many threads its kernels run on."""
        return f"x{self.threads.n}"

    def spare_bytes(self) -> int:
        """What the machine has available."""
        return available_bytes()

    def fetch(self, buf: Buffer) -> U8Array:
        """A copy."""
        return np.array(buf)

    def store(self, buf: Buffer, given: U8Array) -> None:
        """Copies."""
        buf[:] = given

    def export(self, buf: Buffer) -> Buffer:
        """The buffer itself: what was asked for is done."""
        return buf

    def close(self) -> None:
        """Ends the device's threads, and lets go of the arena."""
        self.threads.close()
        super().close()
        self._mapped = None

    def _piece(self, size: int) -> U8Array:
        self.peak_bytes = max(self.peak_bytes, self._held + size)
        return aligned_zeros(-(-size // 4)).view(np.uint8)[:size]

    def _copy(self, dst: Buffer, src: Buffer) -> None:
        np.copyto(dst, src)

    def _write(self, buf: Buffer, values: Sequence[int]) -> None:
        buf[:] = values

    def _map(self, size: int) -> U8Array:
        try:
            self._mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        except (OSError, OverflowError, ValueError) as error:
            raise CapacityExceeded(
                f"an arena of {size} bytes cannot be mapped ({error}): pass a smaller budget_bytes"
            ) from error
        return np.frombuffer(self._mapped, np.uint8)

    def _wipe(self, offset: int, size: int) -> None:
        """Whole pages return to the operating system, which hands them out as zeros."""
        if self._arena is None or self._mapped is None:
            return
        end = offset + size
        first, last = round_up(offset, mmap.PAGESIZE), end // mmap.PAGESIZE * mmap.PAGESIZE
        edges = [(offset, first), (last, end)] if first < last else [(offset, end)]
        if first < last:
            self._mapped.madvise(mmap.MADV_DONTNEED, first, last - first)
        for start, stop in edges:
            self._arena[start:stop] = 0


def available_bytes() -> int:
    """Memory the machine can still give without swapping (`MemAvailable` of proc(5)), or this process's control group, if that
    is less; in bytes."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return min(int(line.split()[1]) * 1024, _group_bytes())
    raise ConfigError("/proc/meminfo names no MemAvailable: pass budget_bytes")


def _group_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """What a control group (version 2, as a container sees its own) has left under its limit; the page cache can be had too."""
    try:
        limit, used = ((root / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        stat = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
        return NO_LIMIT if limit == "max" else max(0, int(limit) - int(used) + int(stat.get("inactive_file", 0)))
    except (OSError, ValueError):
        return NO_LIMIT
