"""Batch-invariant products beside NumPy's on the same weights: ms, one thread, medians of interleaved calls.

Ours are of f32 panels, of the same weights in q8_0, to the same bits, and of bf16 ones. NumPy is given f32 `w` in both layouts
and the faster one counts. Weights are made in place, so the large shape needs 3 GB.
"""

from __future__ import annotations

import numpy as np
from _timing import medians, one_thread_process

from memra_pp.kernels.blocks import dequantize, quantize
from memra_pp.kernels.matmul import PackedMatrix, matmul
from memra_pp.kernels.matmul_q8 import Q8Matrix
from memra_pp.kernels.panels import Q8_0
from memra_pp.kernels.threads import Threads

SHAPES = [(5120, 5120), (2048, 640), (262144, 640)]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 64, 256)


def main() -> None:
    one_thread_process()
    rng = np.random.default_rng(0)
    print("outputs  inputs  rows     f32 ms    bf16 ms    q8_0 ms   numpy ms   numpy / f32  numpy / bf16  numpy / q8_0")
    with Threads(1) as threads:
        for n_out, n_in in SHAPES:
            blocks = quantize("q8_0", rng.standard_normal((n_out, n_in), dtype=np.float32))
            w = dequantize("q8_0", blocks)
            w_transposed = np.ascontiguousarray(w.T)
            matrices = (
                PackedMatrix.pack(w, threads),
                PackedMatrix.pack((w.view(np.uint32) >> 16).astype(np.uint16), threads),
                Q8Matrix.pack(blocks.view(Q8_0), threads),
            )
            for rows in ROWS:
                x = rng.standard_normal((rows, n_in), dtype=np.float32)
                y, theirs = (np.empty((rows, n_out), np.float32) for _ in range(2))
                ours = [lambda x=x, y=y, matrix=matrix: matmul(x, matrix, threads, y) for matrix in matrices]
                numpys = (
                    lambda x=x, w=w, theirs=theirs: np.matmul(x, w.T, out=theirs),
                    lambda x=x, w_transposed=w_transposed, theirs=theirs: np.matmul(x, w_transposed, out=theirs),
                )
                work = rows * n_out * n_in
                took = [seconds * 1e3 for seconds in medians(*ours, *numpys, rounds=3 if work > 4e9 else 9)]
                numpy, times = min(took[3:]), took[:3]
                figures = "".join(f"{ms:11.2f}" for ms in (*times, numpy)) + "".join(f"{numpy / ms:14.2f}" for ms in times)
                print(f"{n_out:7} {n_in:7} {rows:5}{figures}", flush=True)


if __name__ == "__main__":
    main()
