"""Snapshot and rollback of a stage's recurrent state, beside `np.copyto` of the same bytes twice.

The stage is 16 layers of Qwen3.5-27B, 12 of them recurrent. Medians of interleaved pairs, and how often the device allocated
anything in all rounds after the first.
"""

from __future__ import annotations

import numpy as np
from _report import Report, parser
from _timing import medians

from memra_pp.cache import Cache, KvPolicy, cache_snapshot_bytes_for_layers
from memra_pp.config import KvPlan, ModelConfig, RecurrentPlan
from memra_pp.kernels import CpuDev

LAYERS, EVERY, ROUNDS = 16, 4, 201
DELTA_NET = RecurrentPlan(conv_width=2 * 16 * 128 + 48 * 128, conv_kernel=4, state_width=48 * 128 * 128)
ATTENTION = KvPlan(n_head_kv=4, head_dim_k=256, head_dim_v=256)


def main() -> None:
    args = parser(__doc__).parse_args()
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

        ours, theirs = medians(round_trip, copies, rounds=5 if args.quick else ROUNDS)
        allocations = device.allocations - allocated
    report = Report(f"{size / 1e6:.1f} MB of state")
    report.add("snapshot and rollback", 1e3 * ours, "ms", peer="np.copyto, twice", peer_value=1e3 * theirs)
    report.add("allocations after the first round", allocations, "", at_most=0)
    report.give_out(args)


if __name__ == "__main__":
    main()
