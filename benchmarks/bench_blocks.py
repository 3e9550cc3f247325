"""K/V block formats beside ggml's own functions and a plain copy: GB/s of f32, one thread, 16 MiB of f32 (L2 is less).

The peer is `libggml-python` (the `bench` extra); it has no e4m3.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Callable

import numpy as np
from _timing import medians, one_thread_process

from memra_pp.cache.formats import BLOCK_BYTES
from memra_pp.kernels import blocks

ELEMENTS = 1 << 22


def ggml() -> ctypes.CDLL:
    """The library inside the installed distribution."""
    files = importlib.metadata.files("libggml-python") or []
    path = next(file for file in files if file.name == "libggml-base.so")
    return ctypes.CDLL(str(path.locate()))


def peer(library: ctypes.CDLL, name: str, source: np.ndarray, target: np.ndarray) -> Callable[[], object]:
    """A call of ggml's `name(source, target, elements)`."""
    function = getattr(library, name)
    arguments = (ctypes.c_void_p(source.ctypes.data), ctypes.c_void_p(target.ctypes.data), ctypes.c_int64(ELEMENTS))
    return lambda: function(*arguments)


def main() -> None:
    one_thread_process()
    library = ggml()
    x = np.random.default_rng(0).standard_normal(ELEMENTS, dtype=np.float32)
    copy, back = np.empty_like(x), np.empty_like(x)
    print(f"backend {blocks.backend()}; GB/s of f32, {x.nbytes >> 20} MiB, one thread")
    print("format    copy  quantize  ggml  x copy  x ggml   dequantize  ggml  x ggml")
    for fmt in ("q8_0", "q5_1", "q4_0", "fp8"):
        packed = np.empty(ELEMENTS // 32 * BLOCK_BYTES[fmt], np.uint8)
        calls: list[Callable[[], object]] = [
            lambda: np.copyto(copy, x),
            lambda fmt=fmt, packed=packed: blocks.quantize_into(fmt, x, packed),
            lambda fmt=fmt, packed=packed: blocks.dequantize_into(fmt, packed, back),
        ]
        if fmt != "fp8":
            theirs = np.empty_like(packed)
            calls.append(peer(library, f"quantize_row_{fmt}_ref", x, theirs))
            calls.append(peer(library, f"dequantize_row_{fmt}", packed, back))
        copied, packing, reading, *ggml_rates = (x.nbytes / seconds / 1e9 for seconds in medians(*calls, rounds=31))
        line = f"{fmt:6} {copied:7.1f} {packing:9.1f}"
        if ggml_rates:
            theirs_packing, theirs_reading = ggml_rates
            assert np.array_equal(packed, theirs), f"{fmt}: bytes differ from ggml's"
            line += f" {theirs_packing:5.1f} {packing / copied:7.2f} {packing / theirs_packing:7.2f}"
            line += f" {reading:12.1f} {theirs_reading:5.1f} {reading / theirs_reading:7.2f}"
        else:
            line += f" {'-':>5} {packing / copied:7.2f} {'-':>7} {reading:12.1f} {'-':>5} {'-':>7}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
