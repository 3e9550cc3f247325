"""`y = x @ w.T` with bits that do not depend on the number of rows, nor on threads.

Each output element is a sum, first to last, of chains of `CHAIN` fused multiply-adds over K, each from 0: roundings grow
with the length of a chain and their number, not with K. Lanes run over outputs and tiles over rows, so neither touches
that order: a row gives the same bits alone, in a batch or in a longer chunk.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from ..errors import InputError
from ._arrays import F32Array, aligned_zeros
from ._jit import kernel
from .matmul_q8 import Q8Matrix
from .matmul_tiles import multiply
from .panels import DEPTH_UNIT, PANEL
from .simd import LANES, transpose
from .threads import Threads

SHARE = 1 << 18
"""Products that are worth waking a thread for: some 50 microseconds of work."""


class PackedMatrix:
    """Weights `[n_out, n_in]` as panels, f32 `[ceil(n_out / 64), ceil8(n_in), 64]`, zeros where nothing is.

    Attributes:
        panels: the array.
        n_out, n_in: rows and columns of the weights as given.
    """

    def __init__(self, panels: F32Array, n_out: int, n_in: int) -> None:
        self.panels, self.n_out, self.n_in = panels, n_out, n_in

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return self.panels.nbytes

    @property
    def operands(self) -> tuple[F32Array, None]:
        """Panels and no scales, as `multiply` takes them."""
        return self.panels.reshape(-1), None

    @classmethod
    def empty(cls, n_out: int, n_in: int) -> PackedMatrix:
        """A matrix of zeros, to be filled piece by piece.

        Raises:
            InputError: a dimension is less than 1.
        """
        if n_out < 1 or n_in < 1:
            raise InputError(f"PackedMatrix.empty({n_out}, {n_in}): both dimensions must be at least 1")
        depth = -(-n_in // DEPTH_UNIT) * DEPTH_UNIT
        return cls(aligned_zeros(-(-n_out // PANEL), depth, PANEL), n_out, n_in)

    @classmethod
    def pack(cls, w: F32Array, threads: Threads) -> PackedMatrix:
        """Packs f32 `w [n_out, n_in]`.

        Raises:
            InputError: `w` is not a f32 matrix.
        """
        if w.ndim != 2:
            raise InputError(f"w has shape {w.shape}; a weight matrix is [n_out, n_in]; reshape it")
        packed = cls.empty(*w.shape)
        packed.fill(0, w, threads)
        return packed

    def fill(self, row0: int, w_rows: F32Array, threads: Threads) -> None:
        """Packs f32 `w_rows [r, n_in]` as outputs `[row0, row0 + r)`.

        Raises:
            InputError: dtype, width or rows do not fit; nothing was written.
        """
        if w_rows.dtype != np.float32 or w_rows.ndim != 2 or w_rows.shape[1] != self.n_in:
            raise InputError(f"w_rows is {w_rows.dtype} {w_rows.shape}; it must be float32 [rows, {self.n_in}]")
        if row0 < 0 or row0 + len(w_rows) > self.n_out:
            raise InputError(f"rows [{row0}, {row0 + len(w_rows)}) are outside the matrix's [0, {self.n_out})")
        if len(w_rows):
            first, last = row0 // PANEL, (row0 + len(w_rows) - 1) // PANEL
            flat = np.ascontiguousarray(w_rows).reshape(-1)
            depth = self.panels.shape[1]
            threads.run(_fill, last + 1 - first, 1, self.panels.reshape(-1), depth, flat, self.n_in, row0)


Matrix: TypeAlias = PackedMatrix | Q8Matrix
"""What `matmul` multiplies by."""


def matmul(x: F32Array, matrix: Matrix, threads: Threads, out: F32Array | None = None) -> F32Array:
    """`x @ w.T` for f32, C-contiguous `x [rows, n_in]`: f32 `[rows, n_out]`, in `out` if given.

    Raises:
        InputError: a dtype, shape or memory order is wrong; `out` is untouched.
    """
    if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != matrix.n_in or not x.flags.c_contiguous:
        raise InputError(
            f"x is {x.dtype} {x.shape} with strides {x.strides}; it must be C-contiguous float32 [rows, {matrix.n_in}]"
        )
    shape = (len(x), matrix.n_out)
    if out is None:
        out = np.empty(shape, np.float32)
    elif out.dtype != np.float32 or out.shape != shape or not out.flags.c_contiguous:
        raise InputError(f"out is {out.dtype} {out.shape} with strides {out.strides}; it must be C-contiguous float32 {shape}")
    if len(x):
        count, depth = matrix.panels.shape[:2]
        grain = max(1, SHARE // (depth * PANEL * len(x)))
        rows = x.reshape(-1), len(x), matrix.n_in
        threads.run(multiply, count, grain, *rows, *matrix.operands, depth, out.reshape(-1), matrix.n_out)
    return out


@kernel
def _fill(panels: F32Array, depth: int, w_rows: F32Array, n_in: int, row0: int, lo: int, hi: int) -> None:
    """Writes the `lo`-th to `hi`-th of the panels that `w_rows` touches, in squares of `LANES` where they fit."""
    end = row0 + w_rows.size // n_in
    for panel in range(row0 // PANEL + lo, row0 // PANEL + hi):
        row, last = max(row0, panel * PANEL), min(end, (panel + 1) * PANEL)
        while row < last:
            at, to = (row - row0) * n_in, panel * depth * PANEL + row % PANEL
            if last - row >= LANES:
                for k in range(0, n_in - LANES + 1, LANES):
                    transpose(w_rows, at + k, n_in, panels, to + k * PANEL, PANEL)
                for k in range(n_in // LANES * LANES, n_in):
                    for r in range(LANES):
                        panels[to + k * PANEL + r] = w_rows[at + r * n_in + k]
                row += LANES
            else:
                for k in range(n_in):
                    panels[to + k * PANEL] = w_rows[at + k]
                row += 1
