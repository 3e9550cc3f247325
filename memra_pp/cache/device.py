"""`KvDev`: what a cache asks of a device. Kernels and block formats are the device's business, bytes are the cache's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

Buffer: TypeAlias = Any
"""A one-dimensional array on the device: a NumPy or CuPy array of u8, f32 or i32."""


class KvDev(Protocol):
    """A device that holds cache buffers. Sizes are in elements; every op is ordered on the device's one worker stream."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes handed out and not freed, to the byte."""

    @property
    def granularity(self) -> int:
        """The device's own allocation unit in bytes."""

    def free_bytes(self) -> int:
        """Bytes that can still be allocated."""

    def zeros(self, n: int) -> Buffer:
        """`n` f32 zeros."""

    def uninit(self, n: int) -> Buffer:
        """`n` f32 of any value."""

    def alloc_u8(self, n: int) -> Buffer:
        """`n` bytes."""

    def htod_i32(self, values: Sequence[int]) -> Buffer:
        """An i32 buffer holding `values`."""

    def clone_dtod(self, src: Buffer) -> Buffer:
        """A new buffer with the bytes of `src`."""

    def copy_into(self, dst: Buffer, off: int, src: Buffer, length: int) -> None:
        """Copies `length` elements of `src` to `dst[off:]`; the two do not overlap."""

    def copy_all(self, copies: Sequence[tuple[Buffer, Buffer]]) -> None:
        """Copies each `(dst, src)`, buffers of one size that do not overlap: all of a snapshot at once."""

    def set_i32_one(self, d: Buffer, value: int) -> None:
        """Sets the single i32 of `d` in place: its address never changes."""

    def free(self, buf: Buffer) -> None:
        """Gives the bytes of `buf` back."""
