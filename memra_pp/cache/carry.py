"""What of a session is carried to other stages: the rows that may still be read, and the recurrent state, layer by layer.

It depends on the model, the policy, the context and the position alone, so that who asks and who answers agree. Layers behind
the trunk (MTP/NextN blocks) are not carried.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from ..config import KvPlan, ModelConfig, RecurrentPlan
from ..errors import CacheError
from .cache import Cache
from .device import Buffer
from .formats import KvPolicy
from .ring import KvRing
from .sizing import KvLayout, kv_layout

Kind: TypeAlias = Literal["k", "v", "conv", "ssm"]


class Part(NamedTuple):
    """`bytes` of one layer: K or V rows from row `start` on, or a recurrent layer's conv or SSM state."""

    layer: int
    kind: Kind
    start: int
    bytes: int


def parts(cfg: ModelConfig, ctx: int, policy: KvPolicy, pos: int) -> list[Part]:
    """Everything of a session of `ctx` rows that stands at `pos`, in order of layers."""
    out: list[Part] = []
    for il, plan in enumerate(cfg.layers[: cfg.n_trunk]):
        if isinstance(plan, KvPlan):
            layout = kv_layout(plan, ctx, policy)
            start = first_row(layout, pos)
            out.append(Part(il, "k", start, (pos - start) * layout.k_tok_bytes))
            out.append(Part(il, "v", start, (pos - start) * layout.v_tok_bytes))
        elif isinstance(plan, RecurrentPlan):
            out.append(Part(il, "conv", 0, 4 * plan.conv_width * (plan.conv_kernel - 1)))
            out.append(Part(il, "ssm", 0, 4 * plan.state_width))
    return out


def first_row(layout: KvLayout, pos: int) -> int:
    """The first absolute row that a reader at `pos` may see: of a ring, its view's."""
    return 0 if layout.ring_window is None else KvRing(layout.rows, layout.ring_window).view_start(pos)


def buffer_of(cache: Cache, part: Part) -> Buffer:
    """The bytes of a part on its device, a u8 view.

    Raises:
        CacheError: the cache has no such layer, or not those rows.
    """
    state, kv = cache.recur[part.layer], cache.kv[part.layer]
    if part.kind in ("conv", "ssm") and state is not None:
        buffer: Buffer = (state.conv_state if part.kind == "conv" else state.ssm_state).view(np.uint8)
    elif part.kind in ("k", "v") and kv is not None:
        plane, size = (kv.k, kv.k_tok_bytes) if part.kind == "k" else (kv.v, kv.v_tok_bytes)
        rows = kv.physical_rows(part.start, part.start + part.bytes // size)
        buffer = plane[rows.start * size : rows.stop * size]
    else:
        raise CacheError(f"layer {part.layer} has no {part.kind} here")
    if len(buffer) != part.bytes:
        raise CacheError(f"layer {part.layer}: {part.kind} has {len(buffer)} bytes, not {part.bytes}")
    return buffer


def seat(cache: Cache, pos: int) -> None:
    """Has an empty cache stand at `pos`, its rows and state to be filled in."""
    cache.plan.seat(pos)
    for il, layer in enumerate(cache.kv):
        if layer is not None and il < cache.cfg.n_trunk:
            layer.set_len(pos)
        elif layer is not None and layer.ring is not None:
            layer.ring.base = 0
