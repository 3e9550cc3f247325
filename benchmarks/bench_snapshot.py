"""Snapshot and rollback of a stage's recurrent state, beside `np.copyto` of the same bytes twice.

The stage is 16 layers of Qwen3.5-27B, 12 of them recurrent. Prints medians of interleaved pairs, their ratio, and what the
device allocated over all rounds after the first.
"""

from __future__ import annotations

import numpy as np
from _timing import medians

from memra_pp.cache import Cache, KvPolicy, cache_snapshot_bytes_for_layers
from memra_pp.config import KvPlan, ModelConfig, RecurrentPlan
from memra_pp.kernels import CpuDev

LAYERS, EVERY, ROUNDS = 16, 4, 201
DELTA_NET = RecurrentPlan(conv_width=2 * 16 * 128 + 48 * 128, conv_kernel=4, state_width=48 * 128 * 128)
ATTENTION = KvPlan(n_head_kv=4, head_dim_k=256, head_dim_v=256)


def main() -> None:
    """Takes turns and prints the table."""
    plans = tuple(ATTENTION if (il + 1) % EVERY == 0 else DELTA_NET for il in range(LAYERS))
    cfg = ModelConfig("qwen3_5", LAYERS, 5120, 248320, 4096, plans)
    size = cache_snapshot_bytes_for_layers(cfg, 0, LAYERS)
    device = CpuDev()
    source, there, back = (np.ones(size // 4, np.float32) for _ in range(3))
    with Cache.new(device, cfg, 4096, policy=KvPolicy()) as cache, cache.snapshot() as snap:
        allocated = device.allocations

        def round_trip() -> None:
            cache.snapshot_into(snap)
            cache.rollback(snap, 0)

        def copies() -> None:
            np.copyto(there, source)
            np.copyto(back, there)

        ours, theirs = medians(round_trip, copies, rounds=ROUNDS)
        print(f"  {size / 1e6:.1f} MB of state, {ROUNDS} interleaved pairs")
        print(f"  snapshot + rollback  {ours * 1e3:6.2f} ms")
        print(f"  np.copyto, twice     {theirs * 1e3:6.2f} ms")
        print(f"  ratio {ours / theirs:.3f}")
        print(f"  allocations after the first round: {device.allocations - allocated}")


if __name__ == "__main__":
    main()
