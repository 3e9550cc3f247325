"""`Q8Matrix`: weights for `matmul` that stay in ggml's q8_0, a quarter of their f32."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ._arrays import U8Array, aligned_zeros
from .panels import CHAIN, PANEL, Q8_0
from .threads import Threads


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
    def pack(cls, blocks: U8Array, threads: Threads) -> Q8Matrix:
        """Packs u8 `blocks [n_out, n_in / 32 * 34]`, a row of weights a row.

        Raises:
            InputError: `blocks` is empty, or not rows of whole blocks in C order.
        """
        shape = blocks.shape
        whole = blocks.dtype == np.uint8 and blocks.ndim == 2 and blocks.size and shape[1] % Q8_0.itemsize == 0
        if not whole or not blocks.flags.c_contiguous:
            raise InputError(
                f"blocks are {blocks.dtype} {shape} with strides {blocks.strides}; q8_0 is C-contiguous uint8"
                f" [n_out, n_in / {CHAIN} * {Q8_0.itemsize}], neither dimension 0"
            )
        n_out, n_in = shape[0], shape[1] // Q8_0.itemsize * CHAIN
        count = -(-n_out // PANEL)
        panels = aligned_zeros(count, n_in, PANEL // 4).view(np.int8)
        scales = aligned_zeros(count, n_in // CHAIN, PANEL // 2).view(np.float16)
        threads.run(_pack, count, 1, blocks.view(Q8_0), panels.reshape(count, -1, CHAIN, PANEL), scales)
        return cls(panels, scales, n_out, n_in)


def _pack(blocks: NDArray[Any], panels: NDArray[np.int8], scales: NDArray[np.float16], lo: int, hi: int) -> None:
    """Writes panels `[lo, hi)`, which are `[n_in / 32, 32, 64]` each."""
    for panel in range(lo, hi):
        rows = blocks[panel * PANEL : (panel + 1) * PANEL]
        panels[panel, :, :, : len(rows)] = rows["q"].transpose(1, 2, 0)
        scales[panel, :, : len(rows)] = rows["d"].T
