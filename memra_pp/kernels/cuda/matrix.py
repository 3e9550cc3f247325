"""Weights on a GPU: the CPU's panels, f32 or q8_0 (`matmul.PackedMatrix`, `matmul_q8.Q8Matrix`), packed by NumPy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..panels import CHAIN, DEPTH_UNIT, PANEL, Q8_0
from .gpu import DeviceArray, Gpu

GROUP, FEW = 8, 32
"""Most rows that a block of `matmul_*_1` to `_8` takes, and most in all: groups share the weights that they read through the
cache. For more, tiles of 64 rows."""
QUADS = PANEL // 4
FILLED = 264
"""Blocks that keep a large GPU busy, two for each of 132 multiprocessors: with fewer, a panel is shared by more blocks."""


@dataclass(frozen=True)
class DeviceMatrix:
    """Weights `[n_out, n_in]` as panels `[ceil(n_out / 64), depth, 64]`, f32, or i8 with f16 `scales`."""

    panels: DeviceArray
    scales: DeviceArray | None
    n_out: int
    n_in: int

    @property
    def nbytes(self) -> int:
        """Bytes held, padding included."""
        return int(self.panels.nbytes + (0 if self.scales is None else self.scales.nbytes))

    @property
    def depth(self) -> int:
        """Elements of a panel along K."""
        return int(self.panels.shape[1])


def pack(gpu: Gpu, n_out: int, n_in: int, parts: Iterable[NDArray[np.float32]]) -> DeviceMatrix:
    """A matrix of f32 parts, one below another. No more than a part and a panel is held on the host.

    Raises:
        InputError: the parts are not `n_out` rows of `n_in`.
        CapacityExceeded: the device has not that many bytes.
    """
    count, depth = -(-n_out // PANEL), -(-n_in // DEPTH_UNIT) * DEPTH_UNIT
    panels = gpu.empty((count, depth, PANEL), np.float32)
    waiting = np.empty((0, n_in), np.float32)
    done = rows = 0
    for part in parts:
        if part.ndim != 2 or part.shape[1] != n_in:
            raise InputError(f"a part of a matrix is {part.shape}; it must be [rows, {n_in}]")
        waiting, rows = np.concatenate([waiting, part]), rows + len(part)
        whole = len(waiting) // PANEL
        if whole:
            gpu.copy(panels[done : done + whole], gpu.upload(_panels(waiting[: whole * PANEL], depth)))
            done, waiting = done + whole, waiting[whole * PANEL :]
    if len(waiting):
        gpu.copy(panels[done : done + 1], gpu.upload(_panels(waiting, depth)))
    if rows != n_out:
        raise InputError(f"the parts of a matrix have {rows} rows together; they must have {n_out}")
    return DeviceMatrix(panels, None, n_out, n_in)


def pack_q8_0(gpu: Gpu, blocks: NDArray[np.uint8]) -> DeviceMatrix:
    """A matrix of q8_0 blocks, u8 `[n_out, n_in / 32 * 34]`.

    Raises:
        InputError: they are not rows of whole blocks.
        CapacityExceeded: the device has not that many bytes.
    """
    if blocks.dtype != np.uint8 or blocks.ndim != 2 or not blocks.size or blocks.shape[1] % Q8_0.itemsize:
        raise InputError(f"blocks are {blocks.dtype} {blocks.shape}; q8_0 is uint8 [n_out, n_in / {CHAIN} * {Q8_0.itemsize}]")
    n_out, n_in = len(blocks), blocks.shape[1] // Q8_0.itemsize * CHAIN
    count = -(-n_out // PANEL)
    panels, scales = gpu.empty((count, n_in, PANEL), np.int8), gpu.empty((count, n_in // CHAIN, PANEL), np.float16)
    for at in range(count):
        rows = np.ascontiguousarray(blocks[at * PANEL : (at + 1) * PANEL]).view(Q8_0)
        gpu.copy(panels[at : at + 1], gpu.upload(_panels(rows["q"].reshape(len(rows), n_in), n_in)))
        gpu.copy(scales[at : at + 1], gpu.upload(_panels(rows["d"], n_in // CHAIN)))
    return DeviceMatrix(panels, scales, n_out, n_in)


def launch_matmul(gpu: Gpu, x: DeviceArray, matrix: DeviceMatrix, out: DeviceArray) -> None:
    """`out = x @ w.T` for f32 `x [rows, n_in]`, at least one row.

    Raises:
        InputError: `x` is of another shape.
    """
    if x.ndim != 2 or x.shape[1] != matrix.n_in:
        raise InputError(f"x is {x.dtype} {x.shape}; it must be float32 [rows, {matrix.n_in}]")
    rows, panels = len(x), matrix.panels.shape[0]
    kind, weights = ("f32", [matrix.panels]) if matrix.scales is None else ("q8", [matrix.panels, matrix.scales])
    args: list[Any] = [x, np.int64(rows), np.int32(matrix.n_in), *weights, np.int32(matrix.depth), out, np.int32(matrix.n_out)]
    if rows > FEW:
        gpu.launch(f"matmul_{kind}_tiles", (-(-rows // 64), panels), (QUADS, 8), args, 4 * 64 * (CHAIN + 36))
        return
    together = min(GROUP, 1 << (rows - 1).bit_length())
    quads = next((quads for quads in (QUADS, QUADS // 2) if panels * QUADS // quads >= FILLED), QUADS // 4)
    slots = (128 if together == GROUP else 256) // quads
    grid = (-(-rows // together), panels * QUADS // quads)
    gpu.launch(f"matmul_{kind}_{together}", grid, (quads, slots), args, 4 * together * slots * (CHAIN + 4 * quads))


def _panels(rows: NDArray[Any], depth: int) -> NDArray[Any]:
    """Rows `[r, width]` as panels `[ceil(r / 64), depth, 64]`, zeros where nothing is."""
    count = -(-len(rows) // PANEL)
    padded = np.zeros((count * PANEL, depth), rows.dtype)
    padded[: len(rows), : rows.shape[1]] = rows
    return np.ascontiguousarray(padded.reshape(count, PANEL, depth).transpose(0, 2, 1))
