"""What the memory of every device has in common: buffers counted to the byte, and an arena cut into slabs, one a session.

A device says how bytes are had, wiped, copied and written: `CpuDev` over NumPy, `CudaDev` on a GPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..cache import Buffer
from ..cache.sizing import SLAB_ALIGN, round_up
from ..errors import CacheError, CapacityExceeded, ConfigError
from .backend import Backend


class Memory(ABC):
    """Memory as a `KvDev`: what a device and a slab share. `allocations` counts the buffers handed out."""

    def __init__(self) -> None:
        self.allocations = 0
        self._sizes: dict[int, int] = {}
        self._held = 0

    @abstractmethod
    def free_bytes(self) -> int:
        """Bytes that can still be allocated here."""

    @abstractmethod
    def _piece(self, size: int) -> Buffer:
        """`size` zero bytes, which are free."""

    @abstractmethod
    def _copy(self, dst: Buffer, src: Buffer) -> None:
        """Copies between buffers of one size and dtype."""

    @abstractmethod
    def _write(self, buf: Buffer, values: Sequence[int]) -> None:
        """Writes an i32 buffer whole."""

    def zeros(self, n: int) -> Buffer:
        """`n` f32 zeros.

        Raises:
            CapacityExceeded: there are not that many bytes (this and every other allocation).
        """
        return self._new(n, np.float32)

    def uninit(self, n: int) -> Buffer:
        """`n` f32; fresh memory is zero here."""
        return self._new(n, np.float32)

    def alloc_u8(self, n: int) -> Buffer:
        """`n` bytes."""
        return self._new(n, np.uint8)

    def htod_i32(self, values: Sequence[int]) -> Buffer:
        """An i32 buffer holding `values`."""
        buf = self._new(len(values), np.int32)
        self._write(buf, values)
        return buf

    def clone_dtod(self, src: Buffer) -> Buffer:
        """A new buffer with the bytes of `src`."""
        buf = self._new(len(src), src.dtype)
        self._copy(buf, src)
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
        self._copy(dst[off : off + length], src[:length])

    def copy_all(self, copies: Sequence[tuple[Buffer, Buffer]]) -> None:
        """Copies each `(dst, src)`, buffers of one size and dtype that do not overlap."""
        for dst, src in copies:
            self._copy(dst, src)

    def set_i32_one(self, d: Buffer, value: int) -> None:
        """Sets the single i32 of `d` in place."""
        self._write(d, (value,))

    def free(self, buf: Buffer) -> None:
        """Gives the bytes of `buf` back.

        Raises:
            CacheError: the buffer is not from here, or was freed before.
        """
        size = self._sizes.pop(id(buf), None)
        if size is None:
            raise CacheError(f"a buffer of {buf.nbytes} bytes is not this device's, or was freed before")
        self._held -= size

    def _new(self, n: int, dtype: DTypeLike) -> Buffer:
        size = n * np.dtype(dtype).itemsize
        if n < 0 or size > self.free_bytes():
            raise CapacityExceeded(
                f"an allocation of {size} bytes where {self.free_bytes()} are free; "
                "close sessions, shorten the context or use more stages"
            )
        buf = self._piece(size).view(dtype)
        self._sizes[id(buf)] = size
        self._held += size
        self.allocations += 1
        return buf


class ArenaDev(Memory):
    """A device: buffers one by one, up to `budget_bytes`, and beside them the slabs of an arena, once one is reserved.

    Args:
        budget_bytes: most bytes of single buffers.
        granularity: bytes; slabs are whole multiples of it, a power of two.

    Raises:
        ConfigError: `budget_bytes` is less than 1, or the granularity is no power of two.
    """

    def __init__(self, budget_bytes: int, granularity: int) -> None:
        super().__init__()
        if budget_bytes < 1:
            raise ConfigError(f"a device budget of {budget_bytes} bytes: it must be at least 1")
        if granularity < 1 or granularity & (granularity - 1):
            raise ConfigError(f"a granularity of {granularity} bytes: it must be a power of two")
        self.budget_bytes = budget_bytes
        self.granularity = granularity
        self.arena_bytes = 0
        self.slab_bytes = 0
        self.peak_bytes = 0
        self._slabs: list[tuple[int, int]] = []
        self._arena: Buffer | None = None

    @property
    @abstractmethod
    def backend(self) -> Backend:
        """The array operations on this device."""

    @property
    @abstractmethod
    def label(self) -> str:
        """What it is, beside its name."""

    @abstractmethod
    def spare_bytes(self) -> int:
        """Bytes that whoever runs here could still have, whatever this device's budget."""

    def lost(self, error: BaseException) -> bool:
        """Whether an error says that the device can do nothing more in this process."""
        return False

    @abstractmethod
    def fetch(self, buf: Buffer) -> NDArray[np.uint8]:
        """The bytes of a u8 buffer on the host."""

    @abstractmethod
    def store(self, buf: Buffer, given: NDArray[np.uint8]) -> None:
        """Writes bytes of the host to a u8 buffer of their number."""

    @abstractmethod
    def export(self, buf: Buffer) -> Any:
        """What has `__dlpack__` for a buffer of this device or of its slabs, a plane or a state: another library reads and
        writes the same memory by it, behind what was asked of the device until then. The device does not wait for that one."""

    @abstractmethod
    def _map(self, size: int) -> Buffer:
        """`size` zero bytes for an arena.

        Raises:
            CapacityExceeded: they cannot be had.
        """

    @abstractmethod
    def _wipe(self, offset: int, size: int) -> None:
        """Has bytes of the arena, at least one, read as zeros again."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes handed out and not given back, in slabs and single buffers."""
        return self.slab_bytes + self._held

    def free_bytes(self) -> int:
        """What single buffers have left of the budget."""
        return self.budget_bytes - self._held

    def reserve(self, size: int) -> None:
        """Sets `size` bytes aside for slabs, once.

        Raises:
            CapacityExceeded: they cannot be had.
            CacheError: an arena was reserved before.
        """
        if self._arena is not None:
            raise CacheError(f"this device has reserved its arena of {self.arena_bytes} bytes already")
        self._arena = self._map(size)
        self.arena_bytes = size
        self.peak_bytes = self._held

    def slab(self, offset: int, size: int) -> Slab:
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
        return Slab(self, self._arena[offset : offset + size], offset)

    def give_back(self, offset: int, size: int) -> None:
        """Takes a slab's bytes back."""
        if self._arena is None or not size:
            return
        self.wipe(offset, size)
        del self._slabs[bisect_left(self._slabs, (offset, size))]
        self.slab_bytes -= size

    def keep_only(self, slabs: Iterable[Slab]) -> None:
        """Takes back every slab but these, and counts anew: for when an interrupt has cut a change short."""
        kept = sorted((slab.offset, slab.size) for slab in slabs if slab.size)
        for offset, size in set(self._slabs) - set(kept):
            self.wipe(offset, size)
        self._slabs = kept
        self.slab_bytes = sum(size for _, size in kept)

    def wipe(self, offset: int, size: int) -> None:
        """Has bytes of the arena read as zeros again."""
        if self._arena is not None and size:
            self._wipe(offset, size)

    def close(self) -> None:
        """Lets go of the arena."""
        self._arena = None


class Slab(Memory):
    """A session's piece of a device's arena, in which its buffers lie one after another, each rounded up to `SLAB_ALIGN`.

    What is freed is not used again before the slab as a whole is closed.
    """

    def __init__(self, dev: ArenaDev, memory: Buffer, offset: int) -> None:
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

    def _piece(self, size: int) -> Buffer:
        start = self.used
        self.used += round_up(size, SLAB_ALIGN)
        return self._memory[start : start + size]

    def copy_all(self, copies: Sequence[tuple[Buffer, Buffer]]) -> None:
        """As a device does."""
        self._dev.copy_all(copies)

    def _copy(self, dst: Buffer, src: Buffer) -> None:
        self._dev._copy(dst, src)

    def _write(self, buf: Buffer, values: Sequence[int]) -> None:
        self._dev._write(buf, values)
