"""Scalar bit work that NumPy's vocabulary lacks inside a kernel: f16 in bytes, bits of an f32, trailing zeros."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from ._ir import F16, F32, F64, I1, I16, I32, I64, pointer
from ._jit import intrinsic


@intrinsic
def load_half(typing: Any, array: Any, at: Any) -> Any:
    """The little-endian f16 at byte `at` of a u8 array, as f32."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        half = builder.load(pointer(context, builder, array, args, F16), align=1)
        return builder.fpext(half, F32)

    return types.float32(array, types.intp), build


@intrinsic
def store_half(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """Writes an f32 as f16, rounded to nearest even, to bytes `at` and `at + 1`; every NaN as 0x7e00."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        bits = builder.bitcast(builder.fptrunc(args[2], F16), I16)
        bits = builder.select(builder.fcmp_unordered("uno", args[2], args[2]), ir.Constant(I16, 0x7E00), bits)
        builder.store(bits, pointer(context, builder, array, args[:2], I16), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), build


@intrinsic
def load_word(typing: Any, array: Any, at: Any) -> Any:
    """The little-endian u32 at byte `at` of a u8 array."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.load(pointer(context, builder, array, args, I32), align=1)

    return types.uint32(array, types.intp), build


@intrinsic
def store_word(typing: Any, array: Any, at: Any, value: Any) -> Any:
    """Writes a u32, little-endian, from byte `at` of a u8 array on."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        builder.store(args[2], pointer(context, builder, array, args[:2], I32), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint32), build


@intrinsic
def f32_of_bits(typing: Any, bits: Any) -> Any:
    """The f32 whose bits are `bits`."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], F32)

    return types.float32(types.int32), build


@intrinsic
def f64_bits(typing: Any, value: Any) -> Any:
    """The bits of an f64, as i64."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], I64)

    return types.int64(types.float64), build


@intrinsic
def f64_of_bits(typing: Any, bits: Any) -> Any:
    """The f64 whose bits are `bits`."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.bitcast(args[0], F64)

    return types.float64(types.int64), build


@intrinsic
def lowest_set(typing: Any, mask: Any) -> Any:
    """The index of the lowest set bit of a u32 that is not 0."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.zext(builder.cttz(args[0], ir.Constant(I1, 1)), I64)

    return types.int64(types.uint32), build
