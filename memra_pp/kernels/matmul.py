"""`y = x @ w.T` with bits that do not depend on the number of rows, nor on threads.

Each output element is a sum, first to last, of chains of `CHAIN` fused multiply-adds over K, each from 0: roundings grow
with the length of a chain and their number, not with K. Lanes run over outputs and tiles over rows, so neither touches
that order: a row gives the same bits alone, in a batch or in a longer chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ..errors import InputError
from ._arrays import F32Array, aligned_zeros
from ._jit import kernel
from .matmul_q8 import Q8Matrix
from .matmul_tiles import multiply
from .panels import DEPTH_UNIT, PANEL, PLAIN, Q8_0, lanes_of, panels_of
from .simd import LANES, transpose
from .threads import Threads

Panels: TypeAlias = NDArray[np.float32] | NDArray[np.uint16]
SHARE = 1 << 18
"""Products that are worth waking a thread for: some 50 microseconds of work."""


class PackedMatrix:
    """Weights `[n_out, n_in]` as panels `[ceil(n_out / 64), ceil8(n_in), 64]`, zeros where nothing is: f32, or bf16 as its bits
    in u16, half of that. Products with bf16 have the very bits of those with the f32 values.

    Attributes:
        panels: the array.
        n_out, n_in: rows and columns of the weights as given.
    """

    def __init__(self, panels: Panels, n_out: int, n_in: int) -> None:
        self.panels, self.n_out, self.n_in = panels, n_out, n_in

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return self.panels.nbytes

    @property
    def operands(self) -> tuple[Panels, None]:
        """Panels and no scales, as `multiply` takes them."""
        return self.panels.reshape(-1), None

    @classmethod
    def empty(cls, n_out: int, n_in: int, dtype: DTypeLike = np.float32) -> PackedMatrix:
        """A matrix of zeros, to be filled piece by piece: f32, or u16 for bf16.

        Raises:
            InputError: a dimension is less than 1, or another dtype.
        """
        if n_out < 1 or n_in < 1 or np.dtype(dtype) not in PLAIN:
            raise InputError(
                f"PackedMatrix.empty({n_out}, {n_in}, {np.dtype(dtype)}): both dimensions must be at least 1, and weights"
                " float32, or uint16 for bf16"
            )
        depth = -(-n_in // DEPTH_UNIT) * DEPTH_UNIT
        words = aligned_zeros(-(-n_out // PANEL), depth, PANEL * np.dtype(dtype).itemsize // 4)
        return cls(words.view(dtype), n_out, n_in)

    @classmethod
    def pack(cls, w: Panels, threads: Threads) -> PackedMatrix:
        """Packs `w [n_out, n_in]`, f32, or the bits of bf16 in u16.

        Raises:
            InputError: `w` is no matrix of either.
        """
        if w.ndim != 2:
            raise InputError(f"w has shape {w.shape}; a weight matrix is [n_out, n_in]; reshape it")
        packed = cls.empty(w.shape[0], w.shape[1], w.dtype)
        packed.fill(0, w, threads)
        return packed

    def fill(self, row0: int, w_rows: Panels, threads: Threads) -> None:
        """Packs `w_rows [r, n_in]`, of the dtype of the panels, as outputs `[row0, row0 + r)`.

        Raises:
            InputError: dtype, width or rows do not fit; nothing was written.
        """
        dtype = self.panels.dtype
        if w_rows.dtype != dtype or w_rows.ndim != 2 or w_rows.shape[1] != self.n_in:
            raise InputError(f"w_rows is {w_rows.dtype} {w_rows.shape}; it must be {dtype} [rows, {self.n_in}]")
        first, count = panels_of(row0, len(w_rows), self.n_out)
        if dtype == np.float32:
            flat = np.ascontiguousarray(w_rows).reshape(-1)
            threads.run(_fill, count, 1, self.panels.reshape(-1), self.panels.shape[1], flat, self.n_in, row0)
        else:
            threads.run(_fill_bits, count, 1, self.panels, w_rows, row0, first)


Matrix: TypeAlias = PackedMatrix | Q8Matrix
"""What `matmul` multiplies by."""


def pack(n_out: int, n_in: int, parts: Iterable[NDArray[Any]], threads: Threads) -> Matrix:
    """A matrix of parts, one below another: see `Backend.pack`.

    Raises:
        InputError: as there.
    """
    matrix: Matrix | None = None
    row = 0
    for part in parts:
        if matrix is None:
            matrix = Q8Matrix.empty(n_out, n_in) if part.dtype == Q8_0 else PackedMatrix.empty(n_out, n_in, part.dtype)
        matrix.fill(row, part, threads)
        row += len(part)
    if matrix is None or row != n_out:
        raise InputError(f"the parts of a matrix have {row} rows together; they must have {n_out}")
    return matrix


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


def _fill_bits(panels: Panels, w_rows: Panels, row0: int, first: int, lo: int, hi: int) -> None:
    """Writes the `lo`-th to `hi`-th of the panels that `w_rows` touches."""
    for panel in range(first + lo, first + hi):
        lanes, rows = lanes_of(panel, row0, len(w_rows))
        panels[panel, : w_rows.shape[1], lanes] = w_rows[rows].T


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
