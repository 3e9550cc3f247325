"""LLVM pieces that the vector and scalar operations share."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))


def pointer(context: Any, builder: ir.IRBuilder, kind: Any, values: tuple[ir.Value, ir.Value], to: ir.Type) -> ir.Value:
    """The address of an element, `values` being an array of type `kind` and an index, as a pointer to `to`."""
    array, index = values
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), to.as_pointer())


def call(builder: ir.IRBuilder, name: str, *args: ir.Value) -> ir.Value:
    """A call of LLVM's own operation `name`, overloaded on the type of its arguments."""
    kind = args[0].type
    element, prefix = (kind.element, f"v{kind.count}") if isinstance(kind, ir.VectorType) else (kind, "")
    suffix = {F32: "f32", F64: "f64", I32: "i32"}[element]
    function_type = ir.FunctionType(kind, [arg.type for arg in args])
    full_name = f"llvm.{name}.{prefix}{suffix}"
    function = builder.module.globals.get(full_name) or ir.Function(builder.module, function_type, full_name)
    return builder.call(function, args)
