"""`Q8Matrix`: weights for `matmul` that stay in ggml's q8_0, a quarter of their f32."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ._arrays import aligned_zeros
from .panels import CHAIN, PANEL, Q8_0, lanes_of, panels_of
from .threads import Threads

Blocks: TypeAlias = NDArray[Any]
"""Of the dtype `Q8_0`."""


class Q8Matrix:
    """Weights `[n_out, n_in]` as panels, i8 `[ceil(n_out / 64), n_in, 64]`, and f16 `[ceil(n_out / 64), n_in / 32, 64]`.

    A product has the very bits of that with `PackedMatrix` of the dequantised weights. Zeros are where nothing is.

    Attributes:
        panels, scales: the two arrays.
        n_out, n_in: rows and columns of the weights as given.
    """

    def __init__(self, panels: NDArray[np.int8], scales: NDArray[np.float16], n_out: int, n_in: int) -> None:
        self.panels, self.scales, self.n_out, self.n_in = panels, scales, n_out, n_in

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return self.panels.nbytes + self.scales.nbytes

    @property
    def operands(self) -> tuple[NDArray[np.int8], NDArray[np.uint16]]:
        """Panels and scales as `multiply` takes them: numba knows no f16."""
        return self.panels.reshape(-1), self.scales.reshape(-1).view(np.uint16)

    @classmethod
    def empty(cls, n_out: int, n_in: int) -> Q8Matrix:
        """A matrix of zeros, to be filled piece by piece.

        Raises:
            InputError: `n_out` is less than 1, or `n_in` not one whole block or more.
        """
        if n_out < 1 or n_in < 1 or n_in % CHAIN:
            raise InputError(f"Q8Matrix.empty({n_out}, {n_in}): at least 1 output, of a multiple of {CHAIN} inputs")
        count = -(-n_out // PANEL)
        panels = aligned_zeros(count, n_in, PANEL // 4).view(np.int8)
        scales = aligned_zeros(count, n_in // CHAIN, PANEL // 2).view(np.float16)
        return cls(panels, scales, n_out, n_in)

    @classmethod
    def pack(cls, blocks: Blocks, threads: Threads) -> Q8Matrix:
        """Packs blocks, `Q8_0 [n_out, n_in / 32]`.

        Raises:
            InputError: they are no matrix of blocks.
        """
        if blocks.ndim != 2:
            raise InputError(f"blocks have shape {blocks.shape}; those of a matrix are [n_out, n_in / {CHAIN}]")
        matrix = cls.empty(len(blocks), blocks.shape[1] * CHAIN)
        matrix.fill(0, blocks, threads)
        return matrix

    def fill(self, row0: int, blocks: Blocks, threads: Threads) -> None:
        """Packs `Q8_0 [r, n_in / 32]` as outputs `[row0, row0 + r)`.

        Raises:
            InputError: dtype, width or rows do not fit; nothing was written.
        """
        width = self.n_in // CHAIN
        if blocks.dtype != Q8_0 or blocks.ndim != 2 or blocks.shape[1] != width:
            raise InputError(f"blocks are {blocks.dtype} {blocks.shape}; they must be {Q8_0} [rows, {width}]")
        first, count = panels_of(row0, len(blocks), self.n_out)
        threads.run(_fill, count, 1, self.panels.reshape(-1, width, CHAIN, PANEL), self.scales, blocks, row0, first)


def _fill(
    panels: NDArray[np.int8], scales: NDArray[np.float16], blocks: Blocks, row0: int, first: int, lo: int, hi: int
) -> None:
    """Writes the `lo`-th to `hi`-th of the panels that `blocks` touch, `[n_in / 32, 32, 64]` each."""
    for panel in range(first + lo, first + hi):
        lanes, rows = lanes_of(panel, row0, len(blocks))
        panels[panel, :, :, lanes] = blocks["q"][rows].transpose(1, 2, 0)
        scales[panel, :, lanes] = blocks["d"][rows].T
