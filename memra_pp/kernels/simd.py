"""Vectors of f32 and i32 for the CPU kernels: values that LLVM keeps in SIMD registers.

A kernel written with them says which lane adds what in which order, so its bits do not depend on what the optimiser
makes of a loop. `+ - * & | ^ << >>` work lane by lane, with a scalar on either side spread over the lanes. Indices are
elements of a C-contiguous 1-D array and are not checked.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.typing.templates import AbstractTemplate, infer_global
from numba.extending import lower_builtin, models, register_model

from ._ir import F32, I1, I8, I32, call, pointer
from ._jit import intrinsic

LANES = 16
"""Lanes of a vector: one AVX-512 register, two of AVX2."""


class Vector(types.Type):
    """The numba type of `lanes` values of `element` (`float32` or `int32`)."""

    def __init__(self, element: types.Type, lanes: int) -> None:
        self.element, self.lanes = element, lanes
        super().__init__(name=f"Vector({element} x {lanes})")

    @property
    def llvm(self) -> ir.VectorType:
        """The LLVM type of the value."""
        return ir.VectorType(F32 if self.element == types.float32 else I32, self.lanes)


F32x16, I32x16 = Vector(types.float32, LANES), Vector(types.int32, LANES)


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: Vector) -> None:
        super().__init__(manager, vector, vector.llvm)  # type: ignore[no-untyped-call]


def _spread(context: Any, builder: ir.IRBuilder, value: ir.Value, kind: types.Type, vector: Vector) -> ir.Value:
    """`value` as a `vector`: itself, or a scalar converted to the element type and copied into every lane."""
    if isinstance(kind, Vector):
        return value
    scalar = context.cast(builder, value, kind, vector.element)
    first = builder.insert_element(ir.Constant(vector.llvm, ir.Undefined), scalar, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, vector.lanes), None)
    return builder.shuffle_vector(first, ir.Constant(vector.llvm, ir.Undefined), zeros)


def _define_operator(function: Callable[..., Any], of_floats: str | None, of_ints: str) -> None:
    @infer_global(function)  # type: ignore[no-untyped-call]
    class _Typing(AbstractTemplate):
        def generic(self, args: tuple[types.Type, ...], kws: dict[str, types.Type]) -> Any:
            vectors = {kind for kind in args if isinstance(kind, Vector)}
            scalars = [kind for kind in args if not isinstance(kind, Vector)]
            if len(args) == 2 and len(vectors) == 1 and all(isinstance(kind, types.Number) for kind in scalars):
                return vectors.pop()(*args)
            return None

    def lower(context: Any, builder: ir.IRBuilder, signature: Any, args: tuple[ir.Value, ir.Value]) -> ir.Value:
        vector = signature.return_type
        left, right = (_spread(context, builder, value, kind, vector) for value, kind in zip(args, signature.args, strict=True))
        name = of_floats if vector.element == types.float32 else of_ints
        return getattr(builder, str(name))(left, right)

    for kinds in ((Vector, Vector), (Vector, types.Number), (types.Number, Vector)):
        lower_builtin(function, *kinds)(lower)  # type: ignore[no-untyped-call]


_define_operator(operator.add, "fadd", "add")
_define_operator(operator.sub, "fsub", "sub")
_define_operator(operator.mul, "fmul", "mul")
_define_operator(operator.and_, None, "and_")
_define_operator(operator.or_, None, "or_")
_define_operator(operator.xor, None, "xor")
_define_operator(operator.lshift, None, "shl")
_define_operator(operator.rshift, None, "lshr")


@intrinsic
def load(typing: Any, array: Any, at: Any, lanes: Any) -> Any:
    """`lanes` f32 (a constant) that start at element `at`."""
    vector = Vector(types.float32, lanes.literal_value)

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.load(pointer(context, builder, array, args[:2], vector.llvm), align=4)

    return vector(array, types.intp, lanes), build


@intrinsic
def store(typing: Any, array: Any, at: Any, vector: Any) -> Any:
    """Writes the f32 of `vector` from element `at` on."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        builder.store(args[2], pointer(context, builder, array, args[:2], vector.llvm), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), build


@intrinsic
def transpose(typing: Any, source: Any, at: Any, stride: Any, target: Any, to: Any, target_stride: Any) -> Any:
    """Copies a 16 x 16 square of f32, rows `stride` elements apart, as its transpose with rows `target_stride` apart."""
    vector = F32x16.llvm

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        def row(kind: Any, place: tuple[ir.Value, ir.Value, ir.Value], index: int) -> ir.Value:
            array, start, step = place
            element = builder.add(start, builder.mul(step, ir.Constant(step.type, index)))
            return pointer(context, builder, kind, (array, element), vector)

        rows = [builder.load(row(source, args[:3], index), align=4) for index in range(LANES)]
        span = LANES // 2
        while span:
            # Swaps the upper right and lower left quarters of every square of 2 * span lanes and rows.
            kept = [lane if not lane & span else lane + LANES - span for lane in range(LANES)]
            moved = [lane + span if not lane & span else lane + LANES for lane in range(LANES)]
            for upper in (index for index in range(LANES) if not index & span):
                pair = rows[upper], rows[upper + span]
                for index, mask in ((upper, kept), (upper + span, moved)):
                    rows[index] = builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(I32, LANES), mask))
            span //= 2
        for index, values in enumerate(rows):
            builder.store(values, row(target, args[3:], index), align=4)
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, target, types.intp, types.intp), build


@intrinsic
def load_bytes(typing: Any, array: Any, at: Any) -> Any:
    """16 u8 as i32 from 0 to 255."""
    return _byte_load(array, "zext")


@intrinsic
def load_signed_bytes(typing: Any, array: Any, at: Any) -> Any:
    """16 i8 held in a u8 array, as i32 from -128 to 127."""
    return _byte_load(array, "sext")


def _byte_load(array: Any, extend: str) -> Any:
    narrow = ir.VectorType(I8, LANES)

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        raw = builder.load(pointer(context, builder, array, args, narrow), align=1)
        return getattr(builder, extend)(raw, I32x16.llvm)

    return I32x16(array, types.intp), build


@intrinsic
def store_bytes(typing: Any, array: Any, at: Any, vector: Any) -> Any:
    """Writes the low byte of each i32 lane to a u8 array from element `at` on."""
    narrow = ir.VectorType(I8, LANES)

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        target = pointer(context, builder, array, args[:2], narrow)
        builder.store(builder.trunc(args[2], narrow), target, align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, I32x16), build


@intrinsic
def splat(typing: Any, value: Any, lanes: Any) -> Any:
    """The f32 `value` in each of `lanes` lanes (a constant)."""
    vector = Vector(types.float32, lanes.literal_value)

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _spread(context, builder, args[0], types.float32, vector)

    return vector(types.float32, lanes), build


@intrinsic
def load_spread(typing: Any, array: Any, at: Any, lanes: Any) -> Any:
    """The f32 at element `at` in each of `lanes` lanes (a constant)."""
    vector = Vector(types.float32, lanes.literal_value)

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value = builder.load(pointer(context, builder, array, args[:2], F32))
        return _spread(context, builder, value, types.float32, vector)

    return vector(array, types.intp, lanes), build


@intrinsic
def fma(typing: Any, left: Any, right: Any, addend: Any) -> Any:
    """`left * right + addend` with one rounding, of scalars (f32 or f64) or lane by lane; `left` may be a scalar."""
    kind = addend

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        first = _spread(context, builder, args[0], left, kind) if isinstance(kind, Vector) else args[0]
        return call(builder, "fma", first, args[1], args[2])

    scalar_left = types.float32 if isinstance(kind, Vector) else kind
    return kind(left if isinstance(left, Vector) else scalar_left, kind, kind), build


@intrinsic
def larger(typing: Any, left: Any, right: Any) -> Any:
    """The larger in each lane, `right` where they are equal or either is a NaN."""
    return left(left, left), _picker(left, ">")


@intrinsic
def smaller(typing: Any, left: Any, right: Any) -> Any:
    """The smaller in each lane, `right` where they are equal or either is a NaN."""
    return left(left, left), _picker(left, "<")


def _picker(vector: Vector, order: str) -> Callable[..., ir.Value]:
    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _pick(builder, order, *args)

    return build


def _pick(builder: ir.IRBuilder, order: str, left: ir.Value, right: ir.Value) -> ir.Value:
    compare = builder.fcmp_ordered if left.type.element == F32 else builder.icmp_signed
    return builder.select(compare(order, left, right), left, right)


@intrinsic
def matches(typing: Any, left: Any, order: Any, right: Any) -> Any:
    """One bit a lane of two i32 vectors, lane 0 lowest: whether `left order right`; `order` is a constant, as "<="."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        sides = (_spread(context, builder, args[i], kind, I32x16) for i, kind in ((0, left), (2, right)))
        lanes = builder.icmp_signed(order.literal_value, *sides)
        return builder.zext(builder.bitcast(lanes, ir.IntType(LANES)), I32)

    return types.uint32(left, order, right), build


@intrinsic
def where(typing: Any, mask: Any, chosen: Any, other: Any) -> Any:
    """Lane by lane `chosen` if its bit of the integer `mask` is set (lane 0 lowest), else `other` (a scalar or not)."""
    vector = chosen if isinstance(chosen, Vector) else other

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        lanes = builder.bitcast(builder.trunc(args[0], ir.IntType(LANES)), ir.VectorType(I1, LANES))
        sides = (_spread(context, builder, args[i], kind, vector) for i, kind in ((1, chosen), (2, other)))
        return builder.select(lanes, *sides)

    return vector(types.uint32, chosen, other), build


def _converter(result: Vector, operation: str) -> Callable[..., Any]:
    def typing(typing: Any, vector: Any) -> Any:
        def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
            return getattr(builder, operation)(args[0], result.llvm)

        return result(vector), build

    return intrinsic(typing)


as_bits = _converter(I32x16, "bitcast")
"""The bits of an f32 vector as i32."""
from_bits = _converter(F32x16, "bitcast")
"""The f32 vector that has these i32 bits."""
to_f32 = _converter(F32x16, "sitofp")
"""The i32 as f32, rounded to nearest even."""
to_i32 = _converter(I32x16, "fptosi")
"""The f32 as i32, rounded towards zero; each must be within i32's range."""


def _halved(
    builder: ir.IRBuilder, left: ir.Value, right: ir.Value, run: int, combine: Callable[[ir.Value, ir.Value], ir.Value]
) -> ir.Value:
    """The lower half of each run of `run` lanes with its upper half; of `left`, then of `right` if it is another."""
    count = left.type.count * (1 if left is right else 2)
    lower = [start + lane for start in range(0, count, run) for lane in range(run // 2)]
    masks = (lower, [lane + run // 2 for lane in lower])
    kind = ir.VectorType(I32, count // 2)
    return combine(*(builder.shuffle_vector(left, right, ir.Constant(kind, mask)) for mask in masks))


def _fold(builder: ir.IRBuilder, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
    """Lane `i` with lane `i + n/2`, then the same with what that gave, down to one lane."""
    while vector.type.count > 1:
        vector = _halved(builder, vector, vector, vector.type.count, combine)
    return builder.extract_element(vector, ir.Constant(I32, 0))


@intrinsic
def sum_lanes(typing: Any, vector: Any) -> Any:
    """The sum of an f32 vector's lanes, always in the same order: halves are added until one lane is left."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _fold(builder, args[0], builder.fadd)

    return types.float32(vector), build


@intrinsic
def sum_lanes_of_four(typing: Any, first: Any, second: Any, third: Any, fourth: Any) -> Any:
    """The `sum_lanes` of four f32 vectors of 16 lanes, to the bit, as the four lanes of one: a third of the work."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        front = _halved(builder, args[0], args[1], LANES, builder.fadd)
        back = _halved(builder, args[2], args[3], LANES, builder.fadd)
        fours = _halved(builder, front, back, LANES // 2, builder.fadd)
        twos = _halved(builder, fours, fours, LANES // 4, builder.fadd)
        return _halved(builder, twos, twos, LANES // 8, builder.fadd)

    return Vector(types.float32, 4)(first, second, third, fourth), build


@intrinsic
def max_lanes(typing: Any, vector: Any) -> Any:
    """The largest lane."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _fold(builder, args[0], lambda left, right: _pick(builder, ">", left, right))

    return vector.element(vector), build


@intrinsic
def min_lanes(typing: Any, vector: Any) -> Any:
    """The smallest lane."""

    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return _fold(builder, args[0], lambda left, right: _pick(builder, "<", left, right))

    return vector.element(vector), build
