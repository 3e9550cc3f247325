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
from collections.abc import Callable
from functools import partial

import numpy as np
from _report import Report, parser
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
    options = parser(__doc__)
    options.add_argument("mib", type=int, nargs="?", default=MIB, help=f"of f32 (default: {MIB})")
    args = options.parse_args()
    library = ggml()
    elements = (1 if args.quick else args.mib) << 18
    x = aligned_empty(elements)
    np.random.default_rng(0).standard_normal(dtype=np.float32, out=x)
    copy, back = aligned_empty(elements), aligned_empty(elements)
    report = Report(f"GB/s of f32, {x.nbytes >> 20} MiB, one thread, backend {blocks.backend()}")
    for fmt in ("q8_0", "q5_1", "q4_0", "fp8"):
        packed = np.empty(elements // 32 * BLOCK_BYTES[fmt], np.uint8)
        theirs = np.empty_like(packed)
        copying = partial(np.copyto, copy, x)
        packing = partial(blocks.quantize_into, fmt, x, packed)
        reading = partial(blocks.dequantize_into, fmt, packed, back)
        copied, packed_at, read_at = rates(elements, copying, packing, reading)
        report.add(f"quantise {fmt}", packed_at, "GB/s", peer="copy", peer_value=copied)
        if fmt != "fp8":
            quantiser = peer(library, f"quantize_row_{fmt}_ref", x, theirs, elements)
            ours, ggml_packed_at = rates(elements, packing, quantiser)
            if not np.array_equal(packed, theirs):
                raise SystemExit(f"{fmt}: bytes differ from ggml's")
            report.add(f"quantise {fmt}", ours, "GB/s", peer="ggml", peer_value=ggml_packed_at)
        report.add(f"dequantise {fmt}", read_at, "GB/s", peer="copy", peer_value=copied)
        if fmt != "fp8":
            dequantiser = peer(library, f"dequantize_row_{fmt}", packed, back, elements)
            ours, ggml_read_at = rates(elements, reading, dequantiser)
            report.add(f"dequantise {fmt}", ours, "GB/s", peer="ggml", peer_value=ggml_read_at)
    report.give_out(args)


def rates(elements: int, *calls: Callable[[], object]) -> list[float]:
    """GB/s of f32 of each call."""
    return [elements * 4 / seconds / 1e9 for seconds in medians(*calls, rounds=31)]


if __name__ == "__main__":
    main()
