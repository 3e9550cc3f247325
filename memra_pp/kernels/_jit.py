"""How every CPU kernel is compiled: the only gate to numba's decorators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import numba
from numba.extending import intrinsic as numba_intrinsic

Lanes: TypeAlias = Any
"""A vector of `simd` inside a kernel."""
Function = TypeVar("Function", bound=Callable[..., Any])

_SOURCES = sorted((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in Path(__file__).parent.glob("*.py"))


def kernel(function: Function) -> Function:
    """Compiles `function` on first use and keeps the machine code on disk.

    It runs without the GIL and with IEEE arithmetic: nothing is reassociated and no product is fused with a sum unless
    the source says `fma`, so equal inputs give equal bits wherever the compiler put the loop.
    """
    compiled = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    # numba drops kept code when the function's own file changes; ours holds code of the other kernel files too.
    index: Any = getattr(getattr(compiled, "_cache", None), "_cache_file", None)
    if index is not None:
        index._source_stamp = _SOURCES
    return cast(Function, compiled)


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """An operation that a kernel calls and LLVM sees as the instructions that `function` builds."""
    return cast("Callable[..., Any]", numba_intrinsic(prefer_literal=True)(function))
