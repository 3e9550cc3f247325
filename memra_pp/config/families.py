"""What each model family keeps in the cache: one rule a family, one table that picks it.

A rule gives the plans of the trunk layers and then of the MTP/NextN blocks. The rules are those of the modelling code
in the transformers library (and, for Step, of the files published with the weights).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from .fields import MAX_HEADS, MAX_LAYERS, MAX_ROWS, Fields
from .model import KvClass, KvPlan, LayerPlan, RecurrentPlan, RingUse, SharedKvPlan

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
BLOCK = 32


def n_trunk(f: Fields) -> int:
    """Layers of the trunk."""
    return f.count("num_hidden_layers", most=MAX_LAYERS)


def n_mtp(f: Fields) -> int:
    """MTP/NextN blocks after the trunk."""
    return f.either("num_nextn_predict_layers", "mtp_num_hidden_layers", least=0, most=MAX_LAYERS, default=0)


def _window(f: Fields) -> int | None:
    return f.count("sliding_window", most=MAX_ROWS) if f.given("sliding_window") else None


def _need_window(f: Fields) -> int:
    return f.count("sliding_window", most=MAX_ROWS)


def _attention(
    f: Fields,
    *,
    heads: int | None = None,
    kv: int | None = None,
    dim: int | None = None,
    kv_class: KvClass = "ordinary",
    window: int | None = None,
    ring: RingUse = "never",
) -> KvPlan:
    """A layer with K and V of `kv` heads x `dim`; by default what the config's plain keys say."""
    heads = f.count("num_attention_heads", most=MAX_HEADS) if heads is None else heads
    kv = f.count("num_key_value_heads", most=MAX_HEADS) if kv is None else kv
    dim = f.count("head_dim", most=MAX_HEADS) if dim is None else dim
    if heads % kv:
        raise f.refuse(f"{heads} attention heads cannot share {kv} K/V heads evenly; K/V heads must divide them")
    if dim % BLOCK:
        raise f.refuse(f"a head size of {dim} is not a multiple of {BLOCK}, so a K/V block would straddle heads")
    return KvPlan(kv, dim, dim, kv_class, window, ring)


def _dense(f: Fields, *, kv: int | None = None, window: int | None = None, ring: RingUse = "never") -> KvPlan:
    """Attention whose head size, where no key says it, is `hidden_size / num_attention_heads`."""
    if f.given("head_dim"):
        return _attention(f, kv=kv, window=window, ring=ring)
    hidden, heads = f.count("hidden_size"), f.count("num_attention_heads", most=MAX_HEADS)
    if hidden % heads:
        raise f.refuse(f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}; give head_dim")
    return _attention(f, kv=kv, dim=hidden // heads, window=window, ring=ring)


def _pattern(
    f: Fields, every: int, names: tuple[str, ...] = ("sliding_window_pattern", "_sliding_window_pattern")
) -> list[str]:
    """`layer_types`, or else full attention in every `every`-th layer (a key in `names` may say another number)."""
    n = n_trunk(f)
    listed = f.kinds("layer_types", n, (SLIDING, FULL))
    every = f.either(*names, most=MAX_LAYERS, default=every)
    return listed or [FULL if (il + 1) % every == 0 else SLIDING for il in range(n)]


def _no_mtp(f: Fields) -> None:
    if n_mtp(f):
        raise f.refuse(f"layer {n_trunk(f)}: {n_mtp(f)} MTP blocks, which no published {f.arch} has: no rule sizes them")


def llama(f: Fields) -> Sequence[LayerPlan]:
    """Every layer sees everything. Without `num_key_value_heads`, each head has its own K and V."""
    kv = f.count("num_key_value_heads", most=MAX_HEADS, default=f.count("num_attention_heads", most=MAX_HEADS))
    return [_dense(f, kv=kv)] * (n_trunk(f) + n_mtp(f))


def mistral(f: Fields) -> Sequence[LayerPlan]:
    """Every trunk layer sees `sliding_window` positions; null: everything. `layer_types` may say which (Ministral)."""
    window, n = _window(f), n_trunk(f)
    kinds = f.kinds("layer_types", n, (SLIDING, FULL)) or [SLIDING if window else FULL] * n
    return _by_kind(f, kinds)


def qwen(f: Fields) -> Sequence[LayerPlan]:
    """Windowed only with `use_sliding_window`: as `layer_types` says, else from layer `max_window_layers` on."""
    n, window = n_trunk(f), _window(f)
    on = f.flag("use_sliding_window") and window is not None
    first = f.count("max_window_layers", least=0, default=28) if on else n
    kinds = f.kinds("layer_types", n, (SLIDING, FULL)) or [SLIDING if il >= first else FULL for il in range(n)]
    if SLIDING in kinds and not on:
        il = kinds.index(SLIDING)
        raise f.refuse(f"layer {il}: layer_types says {SLIDING}, but use_sliding_window or sliding_window is off; fix one")
    return _by_kind(f, kinds)


def _by_kind(f: Fields, kinds: list[str]) -> Sequence[LayerPlan]:
    """Ordinary layers, windowed where `kinds` says so, then full-attention MTP blocks."""
    full = _dense(f)
    sliding = _dense(f, window=_need_window(f), ring="reader") if SLIDING in kinds else full
    return [sliding if kind == SLIDING else full for kind in kinds] + [full] * n_mtp(f)


def gemma3(f: Fields) -> Sequence[LayerPlan]:
    """Every sixth layer is full (or as the pattern or `layer_types` says), the others have a window."""
    _no_mtp(f)
    return _by_kind(f, _pattern(f, every=6))


def gpt_oss(f: Fields) -> Sequence[LayerPlan]:
    """Windowed and full layers take turns, windowed first, unless `layer_types` says otherwise."""
    return _by_kind(f, _pattern(f, every=2, names=("sliding_window_pattern",)))


def gemma4(f: Fields) -> Sequence[LayerPlan]:
    """Windowed layers: `num_key_value_heads` x `head_dim`. Full ones: `global_head_dim`, and with `attention_k_eq_v`
    `num_global_key_value_heads` (V is stored all the same). The last `num_kv_shared_layers` own nothing and read the
    last earlier layer of their kind that does."""
    _no_mtp(f)
    if f.given("per_layer_config"):
        raise f.refuse("per_layer_config is not read; give global_head_dim and num_global_key_value_heads instead")
    kinds = _pattern(f, every=6)
    kinds[-1] = FULL
    kv = f.count("num_key_value_heads", most=MAX_HEADS)
    global_kv = f.count("num_global_key_value_heads", most=MAX_HEADS, default=kv)
    global_dim = f.count("global_head_dim", most=MAX_HEADS, default=f.count("head_dim", most=MAX_HEADS))
    full = _attention(f, kv=global_kv if f.flag("attention_k_eq_v") else kv, dim=global_dim, kv_class="gemma4_global")
    sliding = _attention(f, window=_need_window(f), kv_class="gemma4_window") if SLIDING in kinds else full

    owners = len(kinds) - f.count("num_kv_shared_layers", least=0, most=len(kinds), default=0)
    plans: list[LayerPlan] = [sliding if kind == SLIDING else full for kind in kinds[:owners]]
    for il, kind in enumerate(kinds[owners:], owners):
        if kind not in kinds[:owners]:
            raise f.refuse(
                f"layer {il}: shares K/V ({f.key('num_kv_shared_layers')}={len(kinds) - owners}), but no {kind} layer "
                f"among the {owners} before the shared ones owns any"
            )
        plans.append(SharedKvPlan(owners - 1 - kinds[:owners][::-1].index(kind)))
    return plans


def qwen_hybrid(f: Fields) -> Sequence[LayerPlan]:
    """Full attention as `layer_types` says, else in every `full_attention_interval`-th layer; gated delta nets between,
    with a conv over q, k and v together. MTP blocks are full attention."""
    n = n_trunk(f)
    every = f.count("full_attention_interval", most=MAX_LAYERS, default=4)
    kinds = f.kinds("layer_types", n, (LINEAR, FULL)) or [FULL if (il + 1) % every == 0 else LINEAR for il in range(n)]
    plans: dict[str, LayerPlan] = {}
    if FULL in kinds or n_mtp(f):
        plans[FULL] = _attention(f)
    if LINEAR in kinds:
        plans[LINEAR] = _delta_net(f)
    return [plans[kind] for kind in kinds] + [plans[FULL] for _ in range(n_mtp(f))]


def _delta_net(f: Fields) -> RecurrentPlan:
    n_k = f.count("linear_num_key_heads", most=MAX_HEADS)
    n_v = f.count("linear_num_value_heads", most=MAX_HEADS)
    d_k = f.count("linear_key_head_dim", most=MAX_HEADS)
    d_v = f.count("linear_value_head_dim", most=MAX_HEADS)
    if n_v % n_k:
        raise f.refuse(f"linear_num_value_heads={n_v} is not a multiple of linear_num_key_heads={n_k}")
    kernel = f.count("linear_conv_kernel_dim", least=2, most=MAX_HEADS)
    return RecurrentPlan(conv_width=2 * n_k * d_k + n_v * d_v, conv_kernel=kernel, state_width=n_v * d_k * d_v)


def step(f: Fields) -> Sequence[LayerPlan]:
    """`layer_types` names every layer, MTP blocks too; `attention_other_setting` has the windowed layers' heads."""
    kinds = f.kinds("layer_types", n_trunk(f) + n_mtp(f), (SLIDING, FULL))
    if kinds is None:
        raise f.refuse("layer_types is missing; list a kind for each layer, MTP blocks included")
    kv = f.either("num_attention_groups", "num_key_value_heads", most=MAX_HEADS)
    full = _attention(f, kv=kv)
    if SLIDING not in kinds:
        return [full] * len(kinds)
    other = f.inside("attention_other_setting")
    sliding = _attention(
        f,
        heads=other.count("num_attention_heads", most=MAX_HEADS, default=f.count("num_attention_heads")),
        kv=other.either("num_attention_groups", "num_key_value_heads", most=MAX_HEADS, default=kv),
        dim=other.count("head_dim", most=MAX_HEADS, default=full.head_dim_k),
        window=_need_window(f),
        ring="step",
    )
    return [sliding if kind == SLIDING else full for kind in kinds]


@dataclass(frozen=True)
class Family:
    """A rule, and the values that the family's config class fills in where a published file leaves them out."""

    layers: Callable[[Fields], Sequence[LayerPlan]]
    defaults: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


_LLAMA = Family(llama)
_QWEN = Family(qwen)
_QWEN3 = Family(qwen, {"head_dim": 128})
_GEMMA3 = Family(
    gemma3,
    {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True,
    },
)
_GEMMA4 = Family(gemma4, {"global_head_dim": 512, "rope_theta": 1e6, "tie_word_embeddings": True})
_HYBRID = Family(qwen_hybrid, {"head_dim": 256, "partial_rotary_factor": 0.25})
_STEP = Family(step)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(mistral),
    "ministral": Family(mistral),
    "qwen2": _QWEN,
    "qwen2_moe": _QWEN,
    "qwen3": _QWEN3,
    "qwen3_moe": _QWEN,
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "qwen3_next": _HYBRID,
    "qwen3_5": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_5_moe": _HYBRID,
    "qwen3_5_moe_text": _HYBRID,
    "step3p5": _STEP,
    "step3p5_text": _STEP,
    "step3p7": _STEP,
    "step3p7_text": _STEP,
    "gpt_oss": Family(gpt_oss, {"head_dim": 64}),
}
"""The `model_type`s that can be sized."""
