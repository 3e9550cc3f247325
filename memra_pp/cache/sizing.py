"""The one source of every byte: what each layer allocates, and the byte functions that admission and the planner ask.

`layer_layout` says what a layer holds. The allocator walks it, and every size below is a sum over it, so that what is
charged and what is allocated cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

from ..config import KvPlan, LayerPlan, ModelConfig, RecurrentPlan
from ..config.fence import stage_layers
from ..errors import ConfigError
from .formats import BLOCK, BLOCK_BYTES, KvPolicy, resolved
from .ring import swa_ring_rows

Dtype = Literal["u8", "f32", "i32"]
Recurrent = Literal["replay", "states"]
Kind = Literal["k", "v", "length", "recurrent", "snapshot", "padding"]
"""What a session's bytes are for; `padding` is what its buffers and their slab are rounded up by."""

ITEM_BYTES: dict[Dtype, int] = {"u8": 1, "f32": 4, "i32": 4}

TAIL_PAD = 8
"""Bytes behind the last row of a plane, so that a kernel may read whole words."""


SLAB_ALIGN = 256
"""Bytes that each buffer of a slab is rounded up to: the alignment of CUDA's own allocations, four cache lines."""


class Allocation(NamedTuple):
    """One buffer: its name, the layer it belongs to, and its size in elements of `dtype`."""

    name: str
    layer: int
    dtype: Dtype
    elements: int

    @property
    def bytes(self) -> int:
        """Bytes before any rounding."""
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def kind(self) -> Kind:
        """What they are for."""
        return KINDS[self.name]


KINDS: dict[str, Kind] = {
    "k": "k",
    "v": "v",
    "len_d": "length",
    "conv_state": "recurrent",
    "ssm_state": "recurrent",
    "ssm_state_alt": "recurrent",
    "snapshot.conv_state": "snapshot",
    "snapshot.ssm_state": "snapshot",
}
"""The kind of every allocation, by its name."""


class KvLayout(NamedTuple):
    """An attention layer's planes: formats, bytes a token, and rows, which a ring bounds when `ring_window` is set."""

    k_fmt: str
    v_fmt: str
    k_tok_bytes: int
    v_tok_bytes: int
    rows: int
    ring_window: int | None

    @property
    def tok_bytes(self) -> int:
        """Bytes of one token, K and V."""
        return self.k_tok_bytes + self.v_tok_bytes


def kv_layout(plan: KvPlan, max_ctx: int, policy: KvPolicy) -> KvLayout:
    """The planes of an attention layer for a context of `max_ctx` tokens."""
    k_fmt, v_fmt = policy.formats(plan)
    k_tok_bytes = plan.kv_dim_k // BLOCK * BLOCK_BYTES[k_fmt]
    v_tok_bytes = plan.kv_dim_v // BLOCK * BLOCK_BYTES[v_fmt]
    window = plan.window if policy.ringed(plan) else None
    rows = max_ctx if window is None else swa_ring_rows(window, max_ctx)
    return KvLayout(k_fmt, v_fmt, k_tok_bytes, v_tok_bytes, rows, window)


def layer_layout(plan: LayerPlan, layer: int, max_ctx: int, policy: KvPolicy) -> list[Allocation]:
    """Every buffer of one layer, in the order they are allocated. A shared-KV layer has none."""
    match plan:
        case KvPlan():
            kv = kv_layout(plan, max_ctx, policy)
            return [
                Allocation("k", layer, "u8", kv.rows * kv.k_tok_bytes + TAIL_PAD),
                Allocation("v", layer, "u8", kv.rows * kv.v_tok_bytes + TAIL_PAD),
                Allocation("len_d", layer, "i32", 1),
            ]
        case RecurrentPlan():
            return [
                Allocation("conv_state", layer, "f32", plan.conv_width * (plan.conv_kernel - 1)),
                Allocation("ssm_state", layer, "f32", plan.state_width),
                Allocation("ssm_state_alt", layer, "f32", plan.state_width),
            ]
        case _:
            return []


def snapshot_layout(plan: LayerPlan, layer: int) -> list[Allocation]:
    """The buffers one snapshot holds for one layer: copies of conv and SSM state, nothing for attention."""
    if not isinstance(plan, RecurrentPlan):
        return []
    return [
        Allocation("snapshot.conv_state", layer, "f32", plan.conv_width * (plan.conv_kernel - 1)),
        Allocation("snapshot.ssm_state", layer, "f32", plan.state_width),
    ]


def slice_layout(
    cfg: ModelConfig, layers: range, max_ctx: int, policy: KvPolicy | None = None, state_copies: int = 0
) -> list[Allocation]:
    """Every buffer of a cache slice, and of `state_copies` copies of its recurrent state."""
    policy = resolved(policy)
    cache = [a for il, plan in _plans(cfg, layers) for a in layer_layout(plan, il, checked_ctx(max_ctx), policy)]
    return cache + [a for _ in range(state_copies) for il, plan in _plans(cfg, layers) for a in snapshot_layout(plan, il)]


def round_up(n: int, unit: int) -> int:
    """`n`, rounded up to a multiple of `unit`."""
    return -(-n // unit) * unit


def slab_bytes(layout: Iterable[Allocation], granularity: int = 1) -> int:
    """Bytes of the one slab that holds a layout's buffers, each rounded up to `SLAB_ALIGN`, in whole units of a device."""
    return round_up(sum([round_up(a.bytes, SLAB_ALIGN) for a in layout]), granularity)


def slab_bytes_by_kind(layout: Sequence[Allocation], granularity: int = 1) -> dict[Kind, int]:
    """`slab_bytes` by what they are for; they add up to it."""
    by_kind: dict[Kind, int] = dict.fromkeys(get_args(Kind), 0)
    for a in layout:
        by_kind[a.kind] += a.bytes
    by_kind["padding"] = slab_bytes(layout, granularity) - sum(by_kind.values())
    return by_kind


def state_copies(snapshots: int, recurrent: Recurrent, speculate: int) -> int:
    """Copies of the recurrent state a session holds: one a snapshot, and in `states` mode one more a draft row."""
    return snapshots + (speculate if recurrent == "states" else 0)


def stage_layout(
    cfg: ModelConfig,
    fence: Sequence[int],
    stage: int,
    ctx: int,
    policy: KvPolicy | None = None,
    snapshots: int = 0,
    recurrent: Recurrent = "replay",
    speculate: int = 0,
) -> list[Allocation]:
    """Every buffer that a session of `ctx` tokens allocates on `stage`: what is charged and what is allocated."""
    layers = stage_layers(cfg, fence, stage)
    return slice_layout(cfg, layers, ctx, policy, state_copies(snapshots, recurrent, speculate))


def cache_bytes_per_token_for_layers(cfg: ModelConfig, lo: int, hi: int, *, policy: KvPolicy | None = None) -> int:
    """Context-linear bytes of one token over layers `[lo, hi)`, ringed layers included."""
    return sum(kv.tok_bytes for kv in _kv_layouts(cfg, lo, hi, policy))


def cache_bytes_per_token(cfg: ModelConfig, *, policy: KvPolicy | None = None) -> int:
    """Context-linear bytes of one token over the whole model."""
    return cache_bytes_per_token_for_layers(cfg, 0, cfg.n_layer, policy=policy)


def cache_ring_bytes_per_token_for_layers(cfg: ModelConfig, lo: int, hi: int, *, policy: KvPolicy | None = None) -> int:
    """The part of `cache_bytes_per_token_for_layers` whose row count a ring caps."""
    return sum(kv.tok_bytes for kv in _kv_layouts(cfg, lo, hi, policy) if kv.ring_window is not None)


def cache_ring_bytes_per_token(cfg: ModelConfig, *, policy: KvPolicy | None = None) -> int:
    """The part of `cache_bytes_per_token` whose row count a ring caps."""
    return cache_ring_bytes_per_token_for_layers(cfg, 0, cfg.n_layer, policy=policy)


def cache_ring_row_cap(cfg: ModelConfig, *, policy: KvPolicy | None = None) -> int:
    """The largest row count a ring can have at any context, 0 with no ring."""
    windows = [kv.ring_window for kv in _kv_layouts(cfg, 0, cfg.n_layer, policy) if kv.ring_window is not None]
    return swa_ring_rows(max(windows), _UNBOUNDED) if windows else 0


def cache_fixed_bytes_for_layers(cfg: ModelConfig, lo: int, hi: int, *, policy: KvPolicy | None = None) -> int:
    """Bytes over `[lo, hi)` that no context changes: pads and lengths of attention layers, all of recurrent ones."""
    one_token = sum(a.bytes for a in slice_layout(cfg, checked_layers(cfg, lo, hi), 1, policy))
    return one_token - cache_bytes_per_token_for_layers(cfg, lo, hi, policy=policy)


def cache_snapshot_bytes_for_layers(cfg: ModelConfig, lo: int, hi: int, *, policy: KvPolicy | None = None) -> int:
    """Bytes of one snapshot over `[lo, hi)`."""
    return sum(a.bytes for il, plan in _plans(cfg, checked_layers(cfg, lo, hi)) for a in snapshot_layout(plan, il))


def cache_states_bytes_for_layers(cfg: ModelConfig, lo: int, hi: int, rows: int, *, policy: KvPolicy | None = None) -> int:
    """Bytes of `rows` kept recurrent states over `[lo, hi)` (`rows` = k + 1 in a `states` round of k drafts)."""
    return rows * cache_snapshot_bytes_for_layers(cfg, lo, hi, policy=policy)


def cache_allocated_bytes_for_layers(
    cfg: ModelConfig, lo: int, hi: int, max_ctx: int, *, policy: KvPolicy | None = None
) -> int:
    """Bytes that a cache slice over `[lo, hi)` allocates for `max_ctx` tokens, before any rounding."""
    return sum(a.bytes for a in slice_layout(cfg, checked_layers(cfg, lo, hi), max_ctx, policy))


_UNBOUNDED = 1 << 62


def checked_layers(cfg: ModelConfig, lo: int, hi: int) -> range:
    """Layers `[lo, hi)`.

    Raises:
        ConfigError: they are not in the model, or `lo` is past `hi`.
    """
    if not 0 <= lo <= hi <= cfg.n_layer:
        raise ConfigError(f"layers [{lo}, {hi}): the model has layers 0 to {cfg.n_layer}, and lo may not be past hi")
    return range(lo, hi)


def checked_ctx(max_ctx: int) -> int:
    """A context's rows; ConfigError below 1."""
    if max_ctx < 1:
        raise ConfigError(f"a context of {max_ctx} tokens: it must be at least 1")
    return max_ctx


def _plans(cfg: ModelConfig, layers: range) -> Iterator[tuple[int, LayerPlan]]:
    return ((il, cfg.layers[il]) for il in layers)


def _kv_layouts(cfg: ModelConfig, lo: int, hi: int, policy: KvPolicy | None) -> Iterator[KvLayout]:
    policy = resolved(policy)
    plans = (plan for _, plan in _plans(cfg, checked_layers(cfg, lo, hi)))
    return (kv_layout(plan, 1, policy) for plan in plans if isinstance(plan, KvPlan))
