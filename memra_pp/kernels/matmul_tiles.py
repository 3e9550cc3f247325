"""The compiled body of `matmul`: tiles of rows by outputs over panels of weights, f32, bf16 or q8_0.

A panel is 64 outputs, along K: f32 `[depth, 64]`, the bits of bf16 as u16 `[depth, 64]`, or i8 `[depth, 64]` with f16 scales
`[depth / 32, 64]`. A weight of the last is `d * q`, exact in f32 (11 bits times 8), so all give the bits that their f32 values
do. Each kernel is compiled for each: there are scales only for q8_0, and else None.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types

from ._arrays import F32Array
from ._ir import F16, F32, I8, I16, I32, pointer
from ._jit import Lanes, intrinsic, kernel
from .panels import CHAIN, PANEL
from .simd import Vector, fma, load, load_spread, splat, store

FEW = 48
"""Most rows that bf16 and q8_0 weights are unpacked for as they are used, by each tile anew; for more, a panel is unpacked
once, into f32 that stays in the cache."""

WIDE = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
TWO, FOUR, SIX = (64, 64, 64) if WIDE else (32, 16, 16)
"""Outputs of a tile of so many rows, a panel's for one row. Six rows of accumulators fill the registers (24 of 32 with
AVX-512, 12 of 16 with AVX2); of fewer rows, as many outputs as keep two fused multiply-add units busy."""


@kernel
def multiply(
    x: F32Array, rows: int, n_in: int, panels: Any, scales: Any, depth: int, out: F32Array, n_out: int, lo: int, hi: int
) -> None:
    """Outputs of panels `[lo, hi)` for every row; a panel stays in the cache while the rows pass."""
    if panels.itemsize < 4 and rows > FEW:
        unpacked = np.empty(depth * PANEL + 16, np.float32)
        aligned = -unpacked.ctypes.data // 4 % 16
        for index in range(lo, hi):
            _unpack(panels, scales, index * depth * PANEL, depth, unpacked, aligned)
            _panel(x, rows, n_in, unpacked, None, aligned, out, n_out, index)
        return
    for index in range(lo, hi):
        _panel(x, rows, n_in, panels, scales, index * depth * PANEL, out, n_out, index)


@kernel
def _unpack(panels: Any, scales: Any, at: int, depth: int, out: F32Array, to: int) -> None:
    """The f32 `[depth, 64]` of the panel at `at`, to element `to` of `out` on."""
    for lane in range(0, PANEL, TWO):
        for start in range(0, depth, CHAIN):
            scale = _load_scales(scales, (at + start * PANEL) // CHAIN + lane, TWO)
            for k in range(start, min(start + CHAIN, depth)):
                store(out, to + k * PANEL + lane, _load_weights(panels, at + k * PANEL + lane, scale, TWO))


@kernel
def _panel(x: F32Array, rows: int, n_in: int, panels: Any, scales: Any, at: int, out: F32Array, n_out: int, index: int) -> None:
    """Outputs of the panel at `at`, the `index`-th; one that ends past the last output goes through rows of its own."""
    first = index * PANEL
    width = min(PANEL, n_out - first)
    target, to, stride = (out, first, n_out) if width == PANEL else (np.empty(rows * PANEL, np.float32), 0, PANEL)
    row = 0
    while row < rows:
        left, x_at, start = rows - row, row * n_in, to + row * stride
        if left >= 6 and left != 8:  # 8 rows go as 4 and 4, which leaves more registers to unpack q8_0 in.
            for lane in range(0, PANEL, SIX):
                _six_rows(x, x_at, n_in, panels, scales, at, lane, target, start + lane, stride)
            row += 6
        elif left >= 4:
            for lane in range(0, PANEL, FOUR):
                _four_rows(x, x_at, n_in, panels, scales, at, lane, target, start + lane, stride)
            row += 4
        elif left >= 2:
            for lane in range(0, PANEL, TWO):
                _two_rows(x, x_at, n_in, panels, scales, at, lane, target, start + lane, stride)
            row += 2
        else:
            _one_row(x, x_at, n_in, panels, scales, at, target, start)
            row += 1
    if width < PANEL:
        for row in range(rows):
            for lane in range(width):
                out[row * n_out + first + lane] = target[row * PANEL + lane]


@kernel
def _one_row(x: F32Array, x_at: int, depth: int, panels: Any, scales: Any, at: int, out: F32Array, to: int) -> None:
    for start in range(0, depth, CHAIN):
        total = splat(np.float32(0), PANEL)
        scale = _load_scales(scales, (at + start * PANEL) // CHAIN, PANEL)
        for k in range(start, min(start + CHAIN, depth)):
            total = fma(load_spread(x, x_at + k, PANEL), _load_weights(panels, at + k * PANEL, scale, PANEL), total)
        _add(out, to, total, start, PANEL)


@kernel
def _two_rows(
    x: F32Array, x_at: int, depth: int, panels: Any, scales: Any, at: int, lane: int, out: F32Array, to: int, stride: int
) -> None:
    for start in range(0, depth, CHAIN):
        row0 = row1 = splat(np.float32(0), TWO)
        scale = _load_scales(scales, (at + start * PANEL) // CHAIN + lane, TWO)
        for k in range(start, min(start + CHAIN, depth)):
            weights = _load_weights(panels, at + k * PANEL + lane, scale, TWO)
            row0 = fma(load_spread(x, x_at + k, TWO), weights, row0)
            row1 = fma(load_spread(x, x_at + depth + k, TWO), weights, row1)
        _add(out, to, row0, start, TWO)
        _add(out, to + stride, row1, start, TWO)


@kernel
def _four_rows(
    x: F32Array, x_at: int, depth: int, panels: Any, scales: Any, at: int, lane: int, out: F32Array, to: int, stride: int
) -> None:
    for start in range(0, depth, CHAIN):
        row0 = row1 = row2 = row3 = splat(np.float32(0), FOUR)
        scale = _load_scales(scales, (at + start * PANEL) // CHAIN + lane, FOUR)
        for k in range(start, min(start + CHAIN, depth)):
            weights, at_k = _load_weights(panels, at + k * PANEL + lane, scale, FOUR), x_at + k
            row0 = fma(load_spread(x, at_k, FOUR), weights, row0)
            row1 = fma(load_spread(x, at_k + depth, FOUR), weights, row1)
            row2 = fma(load_spread(x, at_k + 2 * depth, FOUR), weights, row2)
            row3 = fma(load_spread(x, at_k + 3 * depth, FOUR), weights, row3)
        _add(out, to, row0, start, FOUR)
        _add(out, to + stride, row1, start, FOUR)
        _add(out, to + 2 * stride, row2, start, FOUR)
        _add(out, to + 3 * stride, row3, start, FOUR)


@kernel
def _six_rows(
    x: F32Array, x_at: int, depth: int, panels: Any, scales: Any, at: int, lane: int, out: F32Array, to: int, stride: int
) -> None:
    for start in range(0, depth, CHAIN):
        row0 = row1 = row2 = row3 = row4 = row5 = splat(np.float32(0), SIX)
        scale = _load_scales(scales, (at + start * PANEL) // CHAIN + lane, SIX)
        for k in range(start, min(start + CHAIN, depth)):
            weights, at_k = _load_weights(panels, at + k * PANEL + lane, scale, SIX), x_at + k
            row0 = fma(load_spread(x, at_k, SIX), weights, row0)
            row1 = fma(load_spread(x, at_k + depth, SIX), weights, row1)
            row2 = fma(load_spread(x, at_k + 2 * depth, SIX), weights, row2)
            row3 = fma(load_spread(x, at_k + 3 * depth, SIX), weights, row3)
            row4 = fma(load_spread(x, at_k + 4 * depth, SIX), weights, row4)
            row5 = fma(load_spread(x, at_k + 5 * depth, SIX), weights, row5)
        _add(out, to, row0, start, SIX)
        _add(out, to + stride, row1, start, SIX)
        _add(out, to + 2 * stride, row2, start, SIX)
        _add(out, to + 3 * stride, row3, start, SIX)
        _add(out, to + 4 * stride, row4, start, SIX)
        _add(out, to + 5 * stride, row5, start, SIX)


@kernel
def _add(out: F32Array, to: int, chain: Lanes, start: int, lanes: int) -> None:
    """Adds a chain's sum to its outputs; the first chain is the sum so far."""
    store(out, to, chain if start == 0 else load(out, to, lanes) + chain)


@intrinsic
def _load_scales(typing: Any, scales: Any, at: Any, lanes: Any) -> Any:
    """`lanes` f16 (a constant) from element `at` on, as f32; None of None."""
    if isinstance(scales, types.NoneType):
        return types.none(scales, types.intp, lanes), lambda context, builder, signature, args: context.get_dummy_value()
    vector = Vector(types.float32, lanes.literal_value)

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        halves = pointer(context, builder, scales, args[:2], ir.VectorType(F16, vector.lanes))
        return builder.fpext(builder.load(halves, align=2), vector.llvm)

    return vector(scales, types.intp, lanes), build


@intrinsic
def _load_weights(typing: Any, panels: Any, at: Any, scale: Any, lanes: Any) -> Any:
    """`lanes` weights (a constant) from element `at` on: f32 as they are, u16 as the upper half of one, i8 times the scales."""
    vector = Vector(types.float32, lanes.literal_value)
    element = {types.float32: F32, types.uint16: I16, types.int8: I8}[panels.dtype]

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        at_weights = pointer(context, builder, panels, args[:2], ir.VectorType(element, vector.lanes))
        weights = builder.load(at_weights, align=panels.dtype.bitwidth // 8)
        if element == F32:
            return weights
        if element == I8:
            return builder.fmul(builder.sitofp(weights, vector.llvm), args[2])
        words = ir.VectorType(I32, vector.lanes)
        return builder.bitcast(builder.shl(builder.zext(weights, words), ir.Constant(words, [16] * vector.lanes)), vector.llvm)

    return vector(panels, types.intp, scale, lanes), build
