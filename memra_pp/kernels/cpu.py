"""`CpuDev`: the cache's device over NumPy, counting every byte, with the threads its kernels run on; and `CpuSlab`: the one
piece of its arena in which a session keeps all of its buffers."""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..cache import Buffer
from ..cache.sizing import SLAB_ALIGN, round_up
from ..errors import CacheError, CapacityExceeded, ConfigError
from ._arrays import U8Array, aligned_zeros
from .threads import Threads

MAP_NORESERVE = 0x4000
"""Linux's flag (asm-generic/mman.h) for memory that counts only once it is touched; Python 3.11 has no name for it."""


NO_LIMIT = 1 << 62


class CpuMemory(ABC):
    """Host memory as a `KvDev`: what a device and a slab share. `allocations` counts the buffers handed out."""

    def __init__(self) -> None:
        self.allocations = 0
        self._sizes: dict[int, int] = {}
        self._held = 0

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes that can still be allocated here."""

    @abstractmethod
    def _piece(self, size: int) -> U8Array:
        """`size` zero bytes, which are free."""

    def zeros(self, n: int) -> Buffer:
        """`n` f32 zeros.

        Raises:
            CapacityExceeded: there are not that many bytes (this and every other allocation).
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
            CacheError: the buffer is not from here, or was freed before.
        """
        size = self._sizes.pop(id(buf), None)
        if size is None:
            raise CacheError(f"a buffer of {buf.nbytes} bytes is not this device's, or was freed before")
        self._held -= size

    def _new(self, n: int, dtype: DTypeLike) -> NDArray[np.generic]:
        size = n * np.dtype(dtype).itemsize
        if n < 0 or size > self.free_bytes():
            raise CapacityExceeded(
                f"an allocation of {size} bytes where {self.free_bytes()} are free; "
                "close sessions, shorten the context or use more stages"
            )
        buf: NDArray[np.generic] = self._piece(size).view(dtype)
        self._sizes[id(buf)] = size
        self._held += size
        self.allocations += 1
        return buf


class CpuDev(CpuMemory):
    """Host memory: buffers one by one, up to `budget_bytes`, and beside them the slabs of an arena, once one is reserved.

    Args:
        budget_bytes: most bytes of single buffers (default: what the machine has available).
        threads: threads that kernels run on.
        granularity: bytes; slabs are whole multiples of it, a power of two.

    Raises:
        ConfigError: `budget_bytes` or `threads` is less than 1, or the granularity is no power of two.
    """

    def __init__(self, budget_bytes: int | None = None, threads: int = 1, granularity: int = 1) -> None:
        super().__init__()
        budget = available_bytes() if budget_bytes is None else budget_bytes
        if budget < 1:
            raise ConfigError(f"a device budget of {budget} bytes: it must be at least 1")
        if granularity < 1 or granularity & (granularity - 1):
            raise ConfigError(f"a granularity of {granularity} bytes: it must be a power of two")
        self.budget_bytes = budget
        self.granularity = granularity
        self.threads = Threads(threads)
        self.arena_bytes = 0
        self.slab_bytes = 0
        self.peak_bytes = 0
        self._slabs: list[tuple[int, int]] = []
        self._arena: mmap.mmap | None = None
        self._memory: U8Array = np.empty(0, np.uint8)

    @property
    def allocated_bytes(self) -> int:
        """Bytes handed out and not given back, in slabs and single buffers."""
        return self.slab_bytes + self._held

    def free_bytes(self) -> int:
        """What single buffers have left of the budget."""
        return self.budget_bytes - self._held

    def reserve(self, size: int) -> None:
        """Sets `size` bytes aside for slabs, once. The operating system backs them as they are touched.

        Raises:
            CapacityExceeded: so much address space cannot be had.
            CacheError: an arena was reserved before.
        """
        if self._arena is not None:
            raise CacheError(f"this device has reserved its arena of {self.arena_bytes} bytes already")
        try:
            self._arena = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        except (OSError, OverflowError, ValueError) as error:
            raise CapacityExceeded(
                f"an arena of {size} bytes cannot be mapped ({error}): pass a smaller budget_bytes"
            ) from error
        self._memory = np.frombuffer(self._arena, np.uint8)
        self.arena_bytes = size
        self.peak_bytes = self._held

    def slab(self, offset: int, size: int) -> CpuSlab:
        """The bytes `[offset, offset + size)` of the arena, for one session; zeros.

        Raises:
            CapacityExceeded: they are not in the arena, not whole multiples of the granularity, or taken.
        """
        at = bisect_left(self._slabs, (offset, 0))
        before, after = self._slabs[max(0, at - 1) : at], self._slabs[at : at + 1]
        free = all(a + n <= offset for a, n in before) and all(offset + size <= a for a, _ in after)
        whole = not (offset % self.granularity or size % self.granularity)
        if self._arena is None or not (0 <= offset <= offset + size <= self.arena_bytes and whole and free):
            raise CapacityExceeded(
                f"a slab of {size} bytes at {offset} of an arena of {self.arena_bytes}, granularity {self.granularity}: "
                "it is outside, not a multiple, or overlaps another; this is a bug"
            )
        if size:
            insort(self._slabs, (offset, size))
            self.slab_bytes += size
        return CpuSlab(self, self._memory[offset : offset + size], offset)

    def give_back(self, offset: int, size: int) -> None:
        """Takes a slab's bytes back."""
        if self._arena is None or not size:
            return
        self.wipe(offset, size)
        del self._slabs[bisect_left(self._slabs, (offset, size))]
        self.slab_bytes -= size

    def keep_only(self, slabs: Iterable[CpuSlab]) -> None:
        """Takes back every slab but these, and counts anew: for when an interrupt has cut a change short."""
        kept = sorted((slab.offset, slab.size) for slab in slabs if slab.size)
        for offset, size in set(self._slabs) - set(kept):
            self.wipe(offset, size)
        self._slabs = kept
        self.slab_bytes = sum(size for _, size in kept)

    def wipe(self, offset: int, size: int) -> None:
        """Has bytes of the arena read as zeros again; whole pages return to the operating system."""
        if self._arena is None or not size:
            return
        end = offset + size
        first, last = round_up(offset, mmap.PAGESIZE), end // mmap.PAGESIZE * mmap.PAGESIZE
        edges = [(offset, first), (last, end)] if first < last else [(offset, end)]
        if first < last:
            self._arena.madvise(mmap.MADV_DONTNEED, first, last - first)
        for start, stop in edges:
            self._memory[start:stop] = 0

    def close(self) -> None:
        """Ends the device's threads, and lets go of the arena."""
        self.threads.close()
        self._arena, self._memory = None, self._memory[:0].copy()

    def _piece(self, size: int) -> U8Array:
        self.peak_bytes = max(self.peak_bytes, self._held + size)
        return aligned_zeros(-(-size // 4)).view(np.uint8)[:size]


class CpuSlab(CpuMemory):
    """A session's piece of a device's arena, in which its buffers lie one after another, each rounded up to `SLAB_ALIGN`.

    What is freed is not used again before the slab as a whole is closed.
    """

    def __init__(self, dev: CpuDev, memory: U8Array, offset: int) -> None:
        super().__init__()
        self.granularity = dev.granularity
        self.offset, self.size, self.used = offset, len(memory), 0
        self._dev, self._memory = dev, memory
        self._open = True

    @property
    def allocated_bytes(self) -> int:
        """Bytes handed out and not freed, before rounding."""
        return self._held

    def free_bytes(self) -> int:
        """Bytes behind the last buffer."""
        return self.size - self.used

    def clear(self) -> None:
        """Empties the slab: all of it is free again, and zero."""
        self._sizes, self._held, self.used = {}, 0, 0
        self._dev.wipe(self.offset, self.size)

    def close(self) -> None:
        """Gives the slab back to its device, with all that lies in it; closing twice is fine."""
        if self._open:
            self._dev.give_back(self.offset, self.size)
            self._open = False

    def _piece(self, size: int) -> U8Array:
        start = self.used
        self.used += round_up(size, SLAB_ALIGN)
        return self._memory[start : start + size]


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
