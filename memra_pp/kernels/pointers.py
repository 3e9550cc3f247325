"""Arrays at an address, inside kernels: what many sessions' buffers are to a kernel that takes them all in one call.

Nothing is checked here: whoever passes addresses has seen that the arrays are there, as long as said, and stay.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.np.numpy_support import carray

from ._arrays import F32Array, U8Array
from ._ir import F32, I8
from ._jit import intrinsic, kernel


@kernel
def bytes_at(address: int, size: int) -> U8Array:
    """The `size` bytes at an address."""
    array: U8Array = carray(_byte_pointer(address), size)
    return array


@kernel
def floats_at(address: int, size: int) -> F32Array:
    """The `size` f32 at an address."""
    array: F32Array = carray(_float_pointer(address), size)
    return array


@intrinsic
def _byte_pointer(typing: Any, address: Any) -> Any:
    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.inttoptr(args[0], I8.as_pointer())

    return types.CPointer(types.uint8)(types.intp), build  # type: ignore[no-untyped-call]


@intrinsic
def _float_pointer(typing: Any, address: Any) -> Any:
    def build(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        return builder.inttoptr(args[0], F32.as_pointer())

    return types.CPointer(types.float32)(types.intp), build  # type: ignore[no-untyped-call]
