"""K/V block formats beside ggml's own functions and a plain copy: GB/s of f32, one thread, 64 MiB of f32 from memory.

Give another size in MiB to see the caches: at 1 (L2) a copy is faster than at 64 and dequantising is 1.1 to 1.4 times
ggml's rate; at 16, where everyone runs at the speed of the shared last-level cache, it ties (0.97 to 0.99).

Copy, quantise and dequantise take turns; then each takes turns with its peer, since a slow call slows the memory of the
next. The peer is `libggml-python` (the `bench` extra); it has no e4m3. Both read back into the same
array, on a cache line as `blocks.dequantize` gives them.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import sys
from collections.abc import Callable
from functools import partial

import numpy as np
from _timing import medians, one_thread_process

from memra_pp.cache.formats import BLOCK_BYTES
from memra_pp.kernels import blocks
from memra_pp.kernels._arrays import aligned_empty

MIB = 64


def ggml() -> ctypes.CDLL:
    """The library inside the installed distribution."""
    files = importlib.metadata.files("libggml-python") or []
    path = next(file for file in files if file.name == "libggml-base.so")
    return ctypes.CDLL(str(path.locate()))


def peer(library: ctypes.CDLL, name: str, source: np.ndarray, target: np.ndarray, elements: int) -> Callable[[], object]:
    """A call of ggml's `name(source, target, elements)`."""
    function = getattr(library, name)
    arguments = (ctypes.c_void_p(source.ctypes.data), ctypes.c_void_p(target.ctypes.data), ctypes.c_int64(elements))
    return lambda: function(*arguments)


def main() -> None:
    one_thread_process()
    library = ggml()
    elements = int(sys.argv[1] if len(sys.argv) > 1 else MIB) << 18
    x = aligned_empty(elements)
    np.random.default_rng(0).standard_normal(dtype=np.float32, out=x)
    copy, back = aligned_empty(elements), aligned_empty(elements)
    print(f"backend {blocks.backend()}; GB/s of f32, {x.nbytes >> 20} MiB, one thread")
    print("format    copy  quantize  x copy   ggml  x ggml   dequantize   ggml  x ggml")
    for fmt in ("q8_0", "q5_1", "q4_0", "fp8"):
        packed = np.empty(elements // 32 * BLOCK_BYTES[fmt], np.uint8)
        theirs = np.empty_like(packed)
        copying = partial(np.copyto, copy, x)
        packing = partial(blocks.quantize_into, fmt, x, packed)
        reading = partial(blocks.dequantize_into, fmt, packed, back)
        copied, packed_at, read_at = rates(elements, copying, packing, reading)
        line = f"{fmt:6} {copied:7.1f} {packed_at:9.1f} {packed_at / copied:7.2f}"
        if fmt != "fp8":
            quantiser = peer(library, f"quantize_row_{fmt}_ref", x, theirs, elements)
            ours, ggml_packed_at = rates(elements, packing, quantiser)
            assert np.array_equal(packed, theirs), f"{fmt}: bytes differ from ggml's"
            line += f" {ggml_packed_at:6.1f} {ours / ggml_packed_at:7.2f}"
            dequantiser = peer(library, f"dequantize_row_{fmt}", packed, back, elements)
            ours, ggml_read_at = rates(elements, reading, dequantiser)
            line += f" {ours:12.1f} {ggml_read_at:6.1f} {ours / ggml_read_at:7.2f}"
        else:
            line += f" {'-':>6} {'-':>7} {read_at:12.1f} {'-':>6} {'-':>7}"
        print(line, flush=True)


def rates(elements: int, *calls: Callable[[], object]) -> list[float]:
    """GB/s of f32 of each call."""
    return [elements * 4 / seconds / 1e9 for seconds in medians(*calls, rounds=31)]


if __name__ == "__main__":
    main()
