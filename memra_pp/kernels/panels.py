"""How weights lie for a product, on a CPU and on a GPU: panels of outputs, along K."""

from __future__ import annotations

import numpy as np

from ..errors import InputError

PANEL = 64
"""Outputs a panel: one step along K reads 256 contiguous bytes of f32 weights."""
CHAIN = 32
"""Products summed in one chain before it is added to the output: a block of q8_0, so that a chain has one scale."""
DEPTH_UNIT = 8
"""K is padded with zeros to a multiple of this."""
Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", (CHAIN,))])
"""32 weights of a row, `d * q` each (`block_q8_0` of ggml-common.h, 34 bytes)."""
BF16 = np.dtype("<u2")
"""A bf16, as its bits: NumPy knows none."""
PLAIN = np.dtype("<f4"), BF16
"""Weights that lie in panels as they are."""


def panels_of(row0: int, rows: int, n_out: int) -> tuple[int, int]:
    """The first panel that outputs `[row0, row0 + rows)` touch, and how many do.

    Raises:
        InputError: they are not all among `n_out` outputs.
    """
    if row0 < 0 or row0 + rows > n_out:
        raise InputError(f"rows [{row0}, {row0 + rows}) are outside the matrix's [0, {n_out})")
    first = row0 // PANEL
    return first, -(-(row0 + rows) // PANEL) - first if rows else 0


def lanes_of(panel: int, row0: int, rows: int) -> tuple[slice, slice]:
    """Which lanes of a panel are among outputs `[row0, row0 + rows)`, and which of these they are."""
    first, last = max(row0, panel * PANEL), min(row0 + rows, (panel + 1) * PANEL)
    return slice(first - panel * PANEL, last - panel * PANEL), slice(first - row0, last - row0)
