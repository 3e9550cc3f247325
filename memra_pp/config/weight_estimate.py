"""The tensors that a model has, by its config alone: names as in Hugging Face checkpoints, and shapes.

Shapes are those of the modelling code in the transformers library (and, for Step and for MTP blocks, which it leaves out,
of the published checkpoints). Experts are named as that library stacks them, all of a layer in one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from .fields import MAX_HEADS, MAX_LAYERS, MAX_VOCAB, Fields
from .model import KvPlan, LayerPlan, ModelConfig, RecurrentPlan, SharedKvPlan


class Tensor(NamedTuple):
    """A tensor of `rows` x `cols` elements; a quantised checkpoint packs the `packable` ones."""

    name: str
    rows: int
    cols: int = 1
    packable: bool = False


Tensors: TypeAlias = Iterator[Tensor]


@dataclass(frozen=True)
class _Layers:
    """What the layers of a family hold beside the projections that all have.

    `gated`: the query projection is twice as wide, for a gate. `bias_key` says whether the projections have biases, `bias`
    whether they have where it is missing, `o_bias` whether the output projection has one then. `extra` is what else an
    attention layer holds, given its number of heads.
    """

    mlp: Callable[[Fields, LayerPlan, int], Tensors]
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    qk_norm: bool = False
    gated: bool = False
    bias_key: str = "attention_bias"
    bias: bool = False
    o_bias: bool = True
    extra: Callable[[Fields, int], Tensors] = lambda f, heads: iter(())


def tensors_of(cfg: ModelConfig, where: str) -> Tensors:
    """Every tensor of the text model that `cfg` describes, MTP/NextN blocks among them unless it leaves them out.

    Raises:
        ConfigError: a field that a shape needs is missing or bad, or the architecture is not known; it is named.
    """
    f = Fields(cfg.arch, cfg.hparams, where)
    family = _FAMILIES.get(cfg.arch.removesuffix("_text"))
    if family is None:
        raise f.refuse(f"no rule for the shapes of its tensors; known: {', '.join(_FAMILIES)}")
    yield Tensor("model.embed_tokens.weight", cfg.n_vocab, cfg.n_embd)
    if cfg.arch.startswith("gemma4"):
        yield from _per_layer_embedding(f, cfg)
    for il in range(cfg.n_layer):
        yield from _layer(f, family, cfg, il)
    yield Tensor("model.norm.weight", cfg.n_embd)
    if not f.flag("tie_word_embeddings"):
        yield Tensor("lm_head.weight", cfg.n_vocab, cfg.n_embd)


def _per_layer_embedding(f: Fields, cfg: ModelConfig) -> Tensors:
    """Gemma 4's second embedding, one vector a token and layer (`Gemma4TextModel`)."""
    width = _per_layer_width(f)
    if width:
        vocab = f.count("vocab_size_per_layer_input", most=MAX_VOCAB, default=262144)
        yield Tensor("model.embed_tokens_per_layer.weight", vocab, cfg.n_trunk * width)
        yield Tensor("model.per_layer_model_projection.weight", cfg.n_trunk * width, cfg.n_embd)
        yield Tensor("model.per_layer_projection_norm.weight", width)


def _per_layer_width(f: Fields) -> int:
    return f.count("hidden_size_per_layer_input", least=0, default=256)


def _layer(f: Fields, family: _Layers, cfg: ModelConfig, il: int) -> Tensors:
    """One layer; quantised checkpoints leave MTP/NextN blocks as they are."""
    mtp = il - cfg.n_trunk
    prefix = f"model.layers.{il}."
    if mtp >= 0 and family.gated:
        prefix = f"mtp.layers.{mtp}."
    for tensor in _block(f, family, cfg, il):
        yield tensor._replace(name=prefix + tensor.name, packable=tensor.packable and mtp < 0)
    if mtp >= 0 and not family.gated:
        yield from (tensor._replace(name=prefix + tensor.name) for tensor in _nextn(cfg))
    elif mtp == 0:
        yield from _mtp(f, cfg)


def _block(f: Fields, family: _Layers, cfg: ModelConfig, il: int) -> Tensors:
    plan = cfg.layers[il]
    yield from (Tensor(f"{norm}.weight", cfg.n_embd) for norm in family.norms)
    yield from _delta_net(f, plan) if isinstance(plan, RecurrentPlan) else _attention(f, family, cfg, plan)
    yield from family.mlp(f, plan, il)


def _mtp(f: Fields, cfg: ModelConfig) -> Tensors:
    """What Qwen's MTP blocks share."""
    yield Tensor("mtp.fc.weight", cfg.n_embd, 2 * cfg.n_embd)
    for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield Tensor(f"mtp.{norm}.weight", cfg.n_embd)
    if f.flag("mtp_use_dedicated_embeddings"):
        yield Tensor("mtp.embed_tokens.weight", cfg.n_vocab, cfg.n_embd)


def _nextn(cfg: ModelConfig) -> Tensors:
    """What each NextN block (Step) has beside a layer: a projection of two rows to one, and a head of its own."""
    yield Tensor("eh_proj.weight", cfg.n_embd, 2 * cfg.n_embd)
    for norm in ("enorm", "hnorm", "transformer.shared_head.norm"):
        yield Tensor(f"{norm}.weight", cfg.n_embd)
    yield Tensor("transformer.shared_head.output.weight", cfg.n_vocab, cfg.n_embd)


def _linear(name: str, rows: int, cols: int, bias: bool = False) -> Tensors:
    yield Tensor(f"{name}.weight", rows, cols, packable=True)
    if bias:
        yield Tensor(f"{name}.bias", rows)


def _attention(f: Fields, family: _Layers, cfg: ModelConfig, plan: LayerPlan) -> Tensors:
    """A layer that reads another's K/V has no K and V projections and no K norm (`Gemma4TextAttention`)."""
    own = cfg.layers[plan.source] if isinstance(plan, SharedKvPlan) else plan
    assert isinstance(own, KvPlan)
    heads, bias = _heads(f, own), f.flag(family.bias_key, family.bias)
    yield from _linear("self_attn.q_proj", heads * own.head_dim_k * (2 if family.gated else 1), cfg.n_embd, bias)
    yield from _linear("self_attn.o_proj", cfg.n_embd, heads * own.head_dim_v, bias and family.o_bias)
    if family.qk_norm:
        yield Tensor("self_attn.q_norm.weight", own.head_dim_k)
    if own is plan:
        yield from _linear("self_attn.k_proj", own.kv_dim_k, cfg.n_embd, bias)
        if not (own.kv_class == "gemma4_global" and f.flag("attention_k_eq_v")):
            yield from _linear("self_attn.v_proj", own.kv_dim_v, cfg.n_embd, bias)
        if family.qk_norm:
            yield Tensor("self_attn.k_norm.weight", own.head_dim_k)
    yield from family.extra(f, heads)


def _heads(f: Fields, plan: KvPlan) -> int:
    """Attention heads; Step's windowed layers may have a number of their own."""
    heads = f.count("num_attention_heads", most=MAX_HEADS)
    if plan.ring != "step":
        return heads
    heads = f.count("num_sliding_attention_heads", most=MAX_HEADS, default=heads)
    return f.inside("attention_other_setting").count("num_attention_heads", most=MAX_HEADS, default=heads)


def _delta_net(f: Fields, plan: RecurrentPlan) -> Tensors:
    """`Qwen3_5GatedDeltaNet`; Qwen3-Next holds the same numbers in fewer matrices."""
    hidden, heads = f.count("hidden_size"), f.count("linear_num_value_heads", most=MAX_HEADS)
    head = f.count("linear_value_head_dim", most=MAX_HEADS)
    yield from _linear("linear_attn.in_proj_qkv", plan.conv_width, hidden)
    yield from _linear("linear_attn.in_proj_z", heads * head, hidden)
    yield from _linear("linear_attn.out_proj", hidden, heads * head)
    yield Tensor("linear_attn.in_proj_b.weight", heads, hidden)
    yield Tensor("linear_attn.in_proj_a.weight", heads, hidden)
    yield Tensor("linear_attn.conv1d.weight", plan.conv_width, plan.conv_kernel)
    yield Tensor("linear_attn.norm.weight", head)
    yield Tensor("linear_attn.A_log", heads)
    yield Tensor("linear_attn.dt_bias", heads)


def _gated_mlp(f: Fields, name: str, width: int) -> Tensors:
    hidden, bias = f.count("hidden_size"), f.flag("mlp_bias")
    yield from _linear(f"{name}.gate_proj", width, hidden, bias)
    yield from _linear(f"{name}.up_proj", width, hidden, bias)
    yield from _linear(f"{name}.down_proj", hidden, width, bias)


def _experts(f: Fields, name: str, count: int, width: int) -> Tensors:
    hidden = f.count("hidden_size")
    yield Tensor(f"{name}.gate_up_proj", count * 2 * width, hidden, packable=True)
    yield Tensor(f"{name}.down_proj", count * hidden, width, packable=True)


def _dense(f: Fields, plan: LayerPlan, il: int) -> Tensors:
    return _gated_mlp(f, "mlp", f.count("intermediate_size"))


def _moe(f: Fields, plan: LayerPlan, il: int) -> Tensors:
    """Experts (`Qwen3MoeSparseMoeBlock`), or a dense MLP."""
    if not is_sparse(f, il):
        yield from _dense(f, plan, il)
        return
    count = f.count("num_experts")
    yield Tensor("mlp.gate.weight", count, f.count("hidden_size"))
    yield from _experts(f, "mlp.experts", count, f.count("moe_intermediate_size"))


def _shared_moe(f: Fields, plan: LayerPlan, il: int) -> Tensors:
    """The same with one expert that is always asked (`Qwen3NextSparseMoeBlock`)."""
    yield from _moe(f, plan, il)
    if is_sparse(f, il):
        yield from _gated_mlp(f, "mlp.shared_expert", f.count("shared_expert_intermediate_size"))
        yield Tensor("mlp.shared_expert_gate.weight", 1, f.count("hidden_size"))


def is_sparse(f: Fields, il: int) -> bool:
    """Whether a Qwen layer is a mixture of experts: it is not in `mlp_only_layers`, and a `decoder_sparse_step`-th."""
    dense = f.raw.get("mlp_only_layers") or ()
    if not isinstance(dense, (list, tuple)):
        raise f.bad("mlp_only_layers", "a list of layers")
    step = f.count("decoder_sparse_step", most=MAX_LAYERS, default=1)
    return f.count("num_experts", least=0) > 0 and il not in dense and (il + 1) % step == 0


def _gpt_oss(f: Fields, plan: LayerPlan, il: int) -> Tensors:
    """Experts with biases in every layer (`GptOssExperts`)."""
    hidden, width = f.count("hidden_size"), f.count("intermediate_size")
    count = f.either("num_local_experts", "num_experts")
    yield Tensor("mlp.router.weight", count, hidden)
    yield Tensor("mlp.router.bias", count)
    yield from _experts(f, "mlp.experts", count, width)
    yield Tensor("mlp.experts.gate_up_proj_bias", count, 2 * width)
    yield Tensor("mlp.experts.down_proj_bias", count, hidden)


def _gemma4(f: Fields, plan: LayerPlan, il: int) -> Tensors:
    """A dense MLP (twice as wide where K/V are shared, with `use_double_wide_mlp`), experts beside it, a per-layer input."""
    hidden, width = f.count("hidden_size"), _per_layer_width(f)
    wide = f.flag("use_double_wide_mlp") and isinstance(plan, SharedKvPlan)
    yield from _gated_mlp(f, "mlp", f.count("intermediate_size") * (2 if wide else 1))
    yield Tensor("layer_scalar", 1)
    if width:
        yield from _linear("per_layer_input_gate", width, hidden)
        yield from _linear("per_layer_projection", hidden, width)
        yield Tensor("post_per_layer_input_norm.weight", hidden)
    if f.flag("enable_moe_block"):
        count = f.count("num_experts")
        yield from _experts(f, "experts", count, f.count("moe_intermediate_size"))
        yield Tensor("router.proj.weight", count, hidden)
        yield Tensor("router.scale", hidden)
        yield Tensor("router.per_expert_scale", count)
        for norm in ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2"):
            yield Tensor(f"{norm}.weight", hidden)


def _step(f: Fields, plan: LayerPlan, il: int) -> Tensors:
    """Experts and a shared one in the layers that `moe_layers_enum` or `mlp_layer_types` names, else a dense MLP."""
    if il not in _step_sparse(f):
        yield from _dense(f, plan, il)
        return
    hidden, count = f.count("hidden_size"), f.either("moe_num_experts", "n_routed_experts")
    yield Tensor("moe.gate.weight", count, hidden)
    yield Tensor("moe.router_bias", count)
    yield from _experts(f, "moe.experts", count, f.count("moe_intermediate_size"))
    yield from _gated_mlp(f, "share_expert", f.either("share_expert_dim", "share_expert_dims"))


def _step_sparse(f: Fields) -> set[int]:
    if f.given("mlp_layer_types"):
        kinds = f.raw["mlp_layer_types"]
        if not isinstance(kinds, (list, tuple)):
            raise f.bad("mlp_layer_types", "a list with sparse or dense a layer")
        return {il for il, kind in enumerate(kinds) if kind == "sparse"}
    listed: Any = f.raw.get("moe_layers_enum")
    try:
        return {int(il) for il in (listed.split(",") if isinstance(listed, str) else listed) if str(il).strip()}
    except (TypeError, ValueError) as e:
        raise f.bad("moe_layers_enum", "the layers that have experts, as a list or as text with commas") from e


def _head_gate(f: Fields, heads: int) -> Tensors:
    if f.flag("use_head_wise_attn_gate", default=True):
        yield Tensor("self_attn.g_proj.weight", heads, f.count("hidden_size"))


_SANDWICH = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_MISTRAL = _Layers(_dense, bias_key="")
_HYBRID_MOE = _Layers(_shared_moe, qk_norm=True, gated=True)
_STEP = _Layers(_step, qk_norm=True, extra=_head_gate)
_FAMILIES: Mapping[str, _Layers] = {
    "llama": _Layers(_dense),
    "mistral": _MISTRAL,
    "ministral": _MISTRAL,
    "qwen2": _Layers(_dense, bias_key="", bias=True, o_bias=False),
    "qwen2_moe": _Layers(_shared_moe, bias_key="qkv_bias", bias=True, o_bias=False),
    "qwen3": _Layers(_dense, qk_norm=True),
    "qwen3_moe": _Layers(_moe, qk_norm=True),
    "gemma3": _Layers(_dense, _SANDWICH, qk_norm=True),
    "gemma4": _Layers(_gemma4, _SANDWICH, qk_norm=True),
    "qwen3_next": _HYBRID_MOE,
    "qwen3_5": _Layers(_dense, qk_norm=True, gated=True),
    "qwen3_5_moe": _HYBRID_MOE,
    "step3p5": _STEP,
    "step3p7": _STEP,
    "gpt_oss": _Layers(_gpt_oss, bias=True, extra=lambda f, heads: iter([Tensor("self_attn.sinks", heads)])),
}
"""By `model_type`, without `_text`."""
