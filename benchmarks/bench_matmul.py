"""Batch-invariant products beside NumPy's on the same weights: ms, one thread, medians of interleaved calls.

NumPy is given `w` in both layouts and the faster one counts. Weights are made in place, so the large shape needs 2 GB.
"""

from __future__ import annotations

import numpy as np
from _timing import medians, one_thread_process

from memra_pp.kernels.matmul import PackedMatrix, matmul
from memra_pp.kernels.threads import Threads

SHAPES = [(5120, 5120), (2048, 640), (262144, 640)]
ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 64, 256)


def main() -> None:
    one_thread_process()
    rng = np.random.default_rng(0)
    print("outputs  inputs  rows    ours ms   numpy ms   numpy / ours   GMAC/s")
    with Threads(1) as threads:
        for n_out, n_in in SHAPES:
            w = rng.standard_normal((n_out, n_in), dtype=np.float32)
            w_transposed = np.ascontiguousarray(w.T)
            packed = PackedMatrix.pack(w, threads)
            for rows in ROWS:
                x = rng.standard_normal((rows, n_in), dtype=np.float32)
                y, theirs = np.empty((rows, n_out), np.float32), np.empty((rows, n_out), np.float32)
                calls = (
                    lambda x=x, y=y, packed=packed: matmul(x, packed, threads, y),
                    lambda x=x, w=w, theirs=theirs: np.matmul(x, w.T, out=theirs),
                    lambda x=x, w_transposed=w_transposed, theirs=theirs: np.matmul(x, w_transposed, out=theirs),
                )
                work = rows * n_out * n_in
                ours, *numpy = (seconds * 1e3 for seconds in medians(*calls, rounds=3 if work > 4e9 else 9))
                print(
                    f"{n_out:7} {n_in:7} {rows:5} {ours:10.2f} {min(numpy):10.2f} {min(numpy) / ours:14.2f}"
                    f" {work / ours / 1e6:8.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
