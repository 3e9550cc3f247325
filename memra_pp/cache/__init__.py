"""The cache of one session: formats, rings, sizes, layers, snapshots. No Ray, no CuPy, no numba."""

from ..config.fence import stage_layers
from .cache import Cache, CacheSnapshot
from .device import Buffer, KvDev
from .formats import (
    KV_FP8_FORCE,
    KvPolicy,
    gkv_on,
    kv_blk_bytes,
    kv_cache_formats,
    kv_fp8_on,
    swa_ring_on,
    wkv_on,
)
from .layers import KvLayer, RecurLayer
from .plan import CachePlan, SnapshotMark
from .ring import PRIME_CHUNK_MAX_TOKENS, Contiguous, KvRing, KvRingAppend, Rebase, swa_ring_rows
from .sizing import (
    Allocation,
    cache_allocated_bytes_for_layers,
    cache_bytes_per_token,
    cache_bytes_per_token_for_layers,
    cache_fixed_bytes_for_layers,
    cache_ring_bytes_per_token,
    cache_ring_bytes_per_token_for_layers,
    cache_ring_row_cap,
    cache_snapshot_bytes_for_layers,
    cache_states_bytes_for_layers,
    slab_bytes,
    slab_bytes_by_kind,
    slice_layout,
    stage_layout,
)
from .taps import DflashTapSink

__all__ = [
    "KV_FP8_FORCE",
    "PRIME_CHUNK_MAX_TOKENS",
    "Allocation",
    "Buffer",
    "Cache",
    "CachePlan",
    "CacheSnapshot",
    "Contiguous",
    "DflashTapSink",
    "KvDev",
    "KvLayer",
    "KvPolicy",
    "KvRing",
    "KvRingAppend",
    "Rebase",
    "RecurLayer",
    "SnapshotMark",
    "cache_allocated_bytes_for_layers",
    "cache_bytes_per_token",
    "cache_bytes_per_token_for_layers",
    "cache_fixed_bytes_for_layers",
    "cache_ring_bytes_per_token",
    "cache_ring_bytes_per_token_for_layers",
    "cache_ring_row_cap",
    "cache_snapshot_bytes_for_layers",
    "cache_states_bytes_for_layers",
    "gkv_on",
    "kv_blk_bytes",
    "kv_cache_formats",
    "kv_fp8_on",
    "slab_bytes",
    "slab_bytes_by_kind",
    "slice_layout",
    "stage_layers",
    "stage_layout",
    "swa_ring_on",
    "swa_ring_rows",
    "wkv_on",
]
