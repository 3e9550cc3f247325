"""Weights on a GPU: the CPU's panels, f32, bf16 or q8_0 (`matmul.PackedMatrix`, `matmul_q8.Q8Matrix`), packed by NumPy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import InputError
from ..panels import CHAIN, DEPTH_UNIT, PANEL, PLAIN, Q8_0
from .gpu import DeviceArray, Gpu

GROUP, FEW = 8, 32
"""Most rows that a block of `matmul_*_1` to `_8` takes, and most in all: groups share the weights that they read through the
cache. For more, tiles of 64 rows."""
QUADS = PANEL // 4
FILLED = 264
"""Blocks that keep a large GPU busy, two for each of 132 multiprocessors: with fewer, a panel is shared by more blocks."""
KINDS = {**dict(zip(PLAIN, ("f32", "bf16"), strict=True)), np.dtype(np.int8): "q8"}
"""The dtype of panels -> which kernels take them."""


@dataclass(frozen=True)
class DeviceMatrix:
    """Weights `[n_out, n_in]` as panels `[ceil(n_out / 64), depth, 64]`: f32, bf16 as u16, or i8 with f16 `scales`."""

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

    @property
    def kind(self) -> str:
        """Which kernels take it."""
        return KINDS[np.dtype(self.panels.dtype)]

    @classmethod
    def empty(cls, gpu: Gpu, n_out: int, n_in: int, form: np.dtype[Any]) -> DeviceMatrix:
        """Room for a matrix of parts of this dtype. Raises as `pack`."""
        count = -(-n_out // PANEL)
        if form in PLAIN:
            return cls(gpu.empty((count, -(-n_in // DEPTH_UNIT) * DEPTH_UNIT, PANEL), form), None, n_out, n_in)
        if form != Q8_0 or n_in % CHAIN:
            raise InputError(f"a part of a matrix of {n_in} inputs is {form}; it must be float32, uint16 or {Q8_0}")
        panels, scales = gpu.empty((count, n_in, PANEL), np.int8), gpu.empty((count, n_in // CHAIN, PANEL), np.float16)
        return cls(panels, scales, n_out, n_in)

    def put(self, gpu: Gpu, first: int, rows: NDArray[Any]) -> None:
        """Rows of the form it was made for, as the panels from the `first` on."""
        planes = [(self.panels, rows)]
        if self.scales is not None:
            planes = [(self.panels, rows["q"].reshape(len(rows), -1)), (self.scales, rows["d"])]
        for plane, values in planes:
            panels = _panels(values, int(plane.shape[1]))
            gpu.copy(plane[first : first + len(panels)], gpu.upload(panels))


def pack(gpu: Gpu, n_out: int, n_in: int, parts: Iterable[NDArray[Any]]) -> DeviceMatrix:
    """A matrix of parts, one below another: see `Backend.pack`. No more than a part and a panel is held on the host.

    Raises:
        InputError: as there.
        CapacityExceeded: the device has not that many bytes.
    """
    matrix: DeviceMatrix | None = None
    waiting, done, rows = np.empty(0), 0, 0
    for part in parts:
        width = n_in // CHAIN if part.dtype == Q8_0 else n_in
        if matrix is None:
            matrix, waiting = DeviceMatrix.empty(gpu, n_out, n_in, part.dtype), np.empty((0, width), part.dtype)
        if part.ndim != 2 or part.shape[1] != width or part.dtype != waiting.dtype:
            raise InputError(f"a part of a matrix is {part.dtype} {part.shape}; it must be {waiting.dtype} [rows, {width}]")
        rows += len(part)
        if rows > n_out:
            break
        waiting = np.concatenate([waiting, part])
        whole = len(waiting) // PANEL
        if whole:
            matrix.put(gpu, done, waiting[: whole * PANEL])
            done, waiting = done + whole, waiting[whole * PANEL :]
    if matrix is None or rows != n_out:
        raise InputError(f"the parts of a matrix have {rows} rows together; they must have {n_out}")
    if len(waiting):
        matrix.put(gpu, done, waiting)
    return matrix


def launch_matmul(gpu: Gpu, x: DeviceArray, matrix: DeviceMatrix, out: DeviceArray) -> None:
    """`out = x @ w.T` for f32 `x [rows, n_in]`, at least one row.

    Raises:
        InputError: `x` is of another shape.
    """
    if x.ndim != 2 or x.shape[1] != matrix.n_in:
        raise InputError(f"x is {x.dtype} {x.shape}; it must be float32 [rows, {matrix.n_in}]")
    rows, panels = len(x), matrix.panels.shape[0]
    kind, weights = matrix.kind, [matrix.panels] if matrix.scales is None else [matrix.panels, matrix.scales]
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
