"""`y = x @ w.T` with bits that do not depend on the number of rows, nor on threads.

Each output element is a sum, first to last, of chains of `CHAIN` fused multiply-adds over K, each from 0: roundings grow
with the length of a chain and their number, not with K. Lanes run over outputs and tiles over rows, so neither touches
that order: a row gives the same bits alone, in a batch or in a longer chunk.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np

from ..errors import InputError
from ._arrays import F32Array, aligned_zeros
from ._jit import kernel
from .simd import LANES, fma, load, load_spread, splat, store, transpose
from .threads import Threads

PANEL = 64
"""Outputs a panel: one step along K reads 256 contiguous bytes of weights."""
CHAIN = 32
"""Products summed in one chain before it is added to the output."""
DEPTH_UNIT = 8
"""K is padded with zeros to a multiple of this."""
SHARE = 1 << 18
"""Products that are worth waking a thread for: some 50 microseconds of work."""

WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
OUTPUTS = 64 if WIDE else 16
"""Outputs of a tile: six rows of accumulators fill the registers (24 of 32 with AVX-512, 12 of 16 with AVX2)."""


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


def matmul(x: F32Array, packed: PackedMatrix, threads: Threads, out: F32Array | None = None) -> F32Array:
    """`x @ w.T` for f32, C-contiguous `x [rows, n_in]`: f32 `[rows, n_out]`, in `out` if given.

    Raises:
        InputError: a dtype, shape or memory order is wrong; `out` is untouched.
    """
    if x.dtype != np.float32 or x.ndim != 2 or x.shape[1] != packed.n_in or not x.flags.c_contiguous:
        raise InputError(
            f"x is {x.dtype} {x.shape} with strides {x.strides}; it must be C-contiguous float32 [rows, {packed.n_in}]"
        )
    shape = (len(x), packed.n_out)
    if out is None:
        out = np.empty(shape, np.float32)
    elif out.dtype != np.float32 or out.shape != shape or not out.flags.c_contiguous:
        raise InputError(f"out is {out.dtype} {out.shape} with strides {out.strides}; it must be C-contiguous float32 {shape}")
    if len(x):
        panels = packed.panels
        depth = panels.shape[1]
        grain = max(1, SHARE // (depth * PANEL * len(x)))
        threads.run(_multiply, len(panels), grain, x.reshape(-1), len(x), packed.n_in, panels.reshape(-1), depth, out)
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


@kernel
def _multiply(x: F32Array, rows: int, n_in: int, panels: F32Array, depth: int, out: F32Array, lo: int, hi: int) -> None:
    """Outputs of panels `[lo, hi)` for every row; a panel stays in the cache while the rows pass."""
    n_out = out.shape[1]
    whole = out.reshape(-1)
    tile = np.empty(6 * PANEL, np.float32)
    for index in range(lo, hi):
        at, to = index * depth * PANEL, index * PANEL
        width = min(PANEL, n_out - to)
        row = 0
        while row < rows:
            step = 6 if rows - row >= 6 else (2 if rows - row >= 2 else 1)
            # A panel that ends past the last output goes through a tile of its own.
            target, target_at, stride = (whole, row * n_out + to, n_out) if width == PANEL else (tile, 0, PANEL)
            for lane in range(0, PANEL, OUTPUTS):
                if step == 6:
                    _six_rows(x, row * n_in, n_in, panels, at + lane, target, target_at + lane, stride)
                elif step == 2:
                    _two_rows(x, row * n_in, n_in, panels, at + lane, target, target_at + lane, stride)
                else:
                    _one_row(x, row * n_in, n_in, panels, at + lane, target, target_at + lane)
            if width < PANEL:
                for r in range(step):
                    for lane in range(width):
                        out[row + r, to + lane] = tile[r * PANEL + lane]
            row += step


@kernel
def _one_row(x: F32Array, x_at: int, depth: int, panels: F32Array, at: int, out: F32Array, to: int) -> None:
    for start in range(0, depth, CHAIN):
        total = splat(np.float32(0), OUTPUTS)
        for k in range(start, min(start + CHAIN, depth)):
            total = fma(load_spread(x, x_at + k, OUTPUTS), load(panels, at + k * PANEL, OUTPUTS), total)
        _add(out, to, total, start)


@kernel
def _two_rows(x: F32Array, x_at: int, depth: int, panels: F32Array, at: int, out: F32Array, to: int, stride: int) -> None:
    for start in range(0, depth, CHAIN):
        first = second = splat(np.float32(0), OUTPUTS)
        for k in range(start, min(start + CHAIN, depth)):
            weights = load(panels, at + k * PANEL, OUTPUTS)
            first = fma(load_spread(x, x_at + k, OUTPUTS), weights, first)
            second = fma(load_spread(x, x_at + depth + k, OUTPUTS), weights, second)
        _add(out, to, first, start)
        _add(out, to + stride, second, start)


@kernel
def _six_rows(x: F32Array, x_at: int, depth: int, panels: F32Array, at: int, out: F32Array, to: int, stride: int) -> None:
    for start in range(0, depth, CHAIN):
        row0 = row1 = row2 = row3 = row4 = row5 = splat(np.float32(0), OUTPUTS)
        for k in range(start, min(start + CHAIN, depth)):
            weights, at_k = load(panels, at + k * PANEL, OUTPUTS), x_at + k
            row0 = fma(load_spread(x, at_k, OUTPUTS), weights, row0)
            row1 = fma(load_spread(x, at_k + depth, OUTPUTS), weights, row1)
            row2 = fma(load_spread(x, at_k + 2 * depth, OUTPUTS), weights, row2)
            row3 = fma(load_spread(x, at_k + 3 * depth, OUTPUTS), weights, row3)
            row4 = fma(load_spread(x, at_k + 4 * depth, OUTPUTS), weights, row4)
            row5 = fma(load_spread(x, at_k + 5 * depth, OUTPUTS), weights, row5)
        _add(out, to, row0, start)
        _add(out, to + stride, row1, start)
        _add(out, to + 2 * stride, row2, start)
        _add(out, to + 3 * stride, row3, start)
        _add(out, to + 4 * stride, row4, start)
        _add(out, to + 5 * stride, row5, start)


@kernel
def _add(out: F32Array, to: int, chain: Any, start: int) -> None:
    """Adds a chain's sum to its outputs; the first chain is the sum so far."""
    store(out, to, chain if start == 0 else load(out, to, OUTPUTS) + chain)
