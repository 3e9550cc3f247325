"""Attention over quantised rows: a decode step beside a plain copy of the bytes it reads, and prefill chunks. One thread.

The copy is of the K and V planes' 4096 rows. Prefill rates count the products of scores and of values, two per visible
key, head and element; `x rows` is how much faster a chunk is than its rows one by one.
"""

from __future__ import annotations

import numpy as np
from _timing import medians, one_thread_process

from memra_pp.kernels import blocks
from memra_pp.kernels.attention import AttentionSpec, attention
from memra_pp.kernels.threads import Threads

TOKENS, CHUNK = 4096, 512
SHAPES = [
    (8, 1, 128, "q8_0", "q5_1"),
    (8, 4, 128, "q8_0", "q5_1"),
    (8, 1, 128, "q8_0", "q4_0"),
    (8, 1, 128, "fp8", "fp8"),
    (1, 4, 256, "q8_0", "q5_1"),
]


def main() -> None:
    one_thread_process()
    rng = np.random.default_rng(0)
    print(f"{TOKENS} rows held; prefill of {CHUNK} rows at their end; one thread")
    print("kv heads  group  head  formats      decode ms  copy ms  x copy   prefill ms  GMAC/s  x rows")
    with Threads(1) as threads:
        for n_head_kv, group, dim, k_fmt, v_fmt in SHAPES:
            spec, formats = AttentionSpec(n_head_kv, dim, dim, None, dim**-0.5), (k_fmt, v_fmt)
            k, v = (blocks.quantize(fmt, rng.standard_normal(TOKENS * n_head_kv * dim, dtype=np.float32)) for fmt in formats)
            k_copy, v_copy = np.empty_like(k), np.empty_like(v)
            q = rng.standard_normal((CHUNK, n_head_kv * group, dim), dtype=np.float32)

            def decode(q=q[-1:], k=k, v=v, formats=formats, spec=spec):
                return attention(q, k, v, formats, spec, TOKENS - 1, 0, threads)

            def copy(k=k, v=v, k_copy=k_copy, v_copy=v_copy):
                np.copyto(k_copy, k)
                np.copyto(v_copy, v)

            def prefill(q=q, k=k, v=v, formats=formats, spec=spec):
                return attention(q, k, v, formats, spec, TOKENS - CHUNK, 0, threads)

            decoding, copying = (seconds * 1e3 for seconds in medians(decode, copy, rounds=41))
            chunk = medians(prefill, rounds=3)[0] * 1e3
            macs = CHUNK * (TOKENS - CHUNK / 2) * n_head_kv * group * dim * 2
            print(
                f"{n_head_kv:8} {group:6} {dim:5}  {k_fmt + '/' + v_fmt:11} {decoding:10.2f} {copying:8.2f}"
                f" {decoding / copying:7.2f} {chunk:12.1f} {macs / chunk / 1e6:7.1f} {decoding * CHUNK / chunk:7.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
