"""`CudaDev`: the cache's device on a GPU, counting every byte."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...cache import Buffer
from ..memory import ArenaDev
from .backend import CudaBackend
from .gpu import DeviceArray, Gpu

COPY_BLOCKS = 64
"""Blocks that share one copy of a snapshot's: some megabytes."""


class CudaDev(ArenaDev):
    """A GPU's memory, on the stream of `gpu`.

    Args:
        gpu: the device.
        budget_bytes: most bytes of single buffers (default: what the device has free).
        granularity: bytes; slabs are whole multiples of it, a power of two.

    Raises:
        ConfigError: as `ArenaDev`.
    """

    def __init__(self, gpu: Gpu, budget_bytes: int | None = None, granularity: int = 256) -> None:
        super().__init__(gpu.free_bytes() if budget_bytes is None else budget_bytes, granularity)
        self.gpu = gpu

    @cached_property
    def backend(self) -> CudaBackend:
        """The array operations on this device."""
        return CudaBackend(self.gpu)

    @property
    def label(self) -> str:
        """The GPU's name and UUID."""
        return self.gpu.name

    def spare_bytes(self) -> int:
        """What the GPU has free."""
        return self.gpu.free_bytes()

    def lost(self, error: BaseException) -> bool:
        """See `Gpu.lost`."""
        return self.gpu.lost(error)

    def fetch(self, buf: Buffer) -> NDArray[np.uint8]:
        """The bytes of a buffer, once all before is done."""
        return self.gpu.download(buf)

    def store(self, buf: Buffer, given: NDArray[np.uint8]) -> None:
        """Writes bytes to a buffer."""
        self.gpu.copy(buf, self.gpu.upload(given))

    def export(self, buf: Buffer) -> Any:
        """See `Gpu.export`."""
        return self.gpu.export(buf)

    def copy_all(self, copies: Sequence[tuple[Buffer, Buffer]]) -> None:
        """Copies each `(dst, src)` in one launch."""
        pairs = [(dst, src) for dst, src in copies if len(dst)]
        if pairs:
            address = self.gpu.address
            table = np.array([(address(dst), address(src), dst.nbytes) for dst, src in pairs], np.int64)
            self.gpu.launch("copy_many", (COPY_BLOCKS, len(pairs)), (256,), [self.gpu.upload(table)])

    def close(self) -> None:
        """Lets go of the arena, and of the device."""
        super().close()
        self.gpu.close()

    def _piece(self, size: int) -> DeviceArray:
        self.peak_bytes = max(self.peak_bytes, self._held + size)
        return self._zeros(size)

    def _map(self, size: int) -> DeviceArray:
        return self._zeros(size)

    def _zeros(self, size: int) -> DeviceArray:
        memory = self.gpu.empty((size,), np.uint8)
        if size:
            self.gpu.clear(memory)
        return memory

    def _wipe(self, offset: int, size: int) -> None:
        if self._arena is not None:
            self.gpu.clear(self._arena[offset : offset + size])

    def _copy(self, dst: Buffer, src: Buffer) -> None:
        if len(src):
            self.gpu.copy(dst, src)

    def _write(self, buf: Buffer, values: Sequence[int]) -> None:
        self.gpu.copy(buf, self.gpu.upload(np.array(values, np.int32)))
