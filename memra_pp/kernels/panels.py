"""How weights lie for a product, on a CPU and on a GPU: panels of outputs, along K."""

from __future__ import annotations

import numpy as np

PANEL = 64
"""Outputs a panel: one step along K reads 256 contiguous bytes of f32 weights."""
CHAIN = 32
"""Products summed in one chain before it is added to the output: a block of q8_0, so that a chain has one scale."""
DEPTH_UNIT = 8
"""K is padded with zeros to a multiple of this."""
Q8_0 = np.dtype([("d", "<f2"), ("q", "i1", (CHAIN,))])
"""32 weights of a row, `d * q` each (`block_q8_0` of ggml-common.h, 34 bytes)."""
