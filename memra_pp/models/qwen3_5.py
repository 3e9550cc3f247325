"""The forward of Qwen3.5 and Qwen3-Next (text, dense) over a range of layers, batch-invariant.

Follows the published models (Hugging Face `Qwen3_5ForCausalLM` and `Qwen3NextForCausalLM`): gated delta nets, and every
few layers gated attention with a partial rotary embedding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..config import KvPlan, ModelConfig, RecurrentPlan
from ..config.fields import Fields
from ..config.forwards import first_sparse
from ..errors import ConfigError
from ..kernels.backend import Backend, Matrix, Rows
from ..kernels.shapes import AttentionSpec, DeltaShape
from .parts import (
    Device,
    Forward,
    Head,
    Step,
    attend,
    inverse_frequencies,
    load_head,
    load_matrix,
    load_norm,
    load_tensor,
    packed,
)
from .stored import F32, Stored
from .weights import Weights


@dataclass(frozen=True)
class Qwen35Params:
    """What the forward needs beyond the cache plans, from `ModelConfig.hparams`."""

    n_head: int
    n_ff: int
    eps: float
    theta: float
    rotary_factor: float
    tied: bool
    delta: DeltaShape | None

    @classmethod
    def of(cls, cfg: ModelConfig) -> Qwen35Params:
        """Raises ConfigError for a field that is missing or bad, or asks for what this forward does not compute."""
        f = Fields(cfg.arch, cfg.hparams, "the Qwen3.5 forward")
        for name, computed in (
            ("attention_bias", (None, False)),
            ("attn_output_gate", (None, True)),
            ("hidden_act", (None, "silu")),
            ("rope_type", (None, "default")),
        ):
            if f.raw.get(name) not in computed:
                raise f.bad(name, f"computed here; {' or '.join(map(repr, computed))} is")
        if (il := first_sparse(f, cfg.n_trunk)) is not None:
            raise f.bad("num_experts", f"computed here: layer {il} is a mixture of experts; 0, or all layers dense, is")
        return cls(
            n_head=f.count("num_attention_heads"),
            n_ff=f.count("intermediate_size"),
            eps=f.number("rms_norm_eps", 1e-6),
            theta=f.number("rope_theta", 1e4),
            rotary_factor=_rotary_factor(f, cfg),
            tied=f.flag("tie_word_embeddings"),
            delta=_delta_shape(f) if cfg.recurrent else None,
        )


def _rotary_factor(f: Fields, cfg: ModelConfig) -> float:
    """What part of a head is rotated: an even number of elements."""
    factor = f.number("partial_rotary_factor", 0.25)
    for plan in cfg.layers:
        if isinstance(plan, KvPlan):
            rotated = int(plan.head_dim_k * factor)
            if rotated % 2 or not 0 < rotated <= plan.head_dim_k:
                raise f.bad("partial_rotary_factor", f"computed here: of {plan.head_dim_k} elements it rotates {rotated}")
    return factor


def _delta_shape(f: Fields) -> DeltaShape:
    names = "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"
    return DeltaShape(*(f.count(name) for name in names))


@dataclass(frozen=True)
class GatedAttention:
    """A full-attention layer's mixer. `qkv` is q, k and v stacked, `gate` what q_proj gives beside q."""

    attention: AttentionSpec
    inv_freq: F32
    qkv: Matrix
    gate: Matrix
    q_norm: Rows
    k_norm: Rows
    o: Matrix


@dataclass(frozen=True)
class DeltaNet:
    """A gated delta net's mixer. `conv` is `[taps, channels]`, `rate` is e to the power of `A_log`, in f64."""

    shape: DeltaShape
    qkv: Matrix
    z: Matrix
    ba: Matrix
    conv: Rows
    rate: Rows
    dt_bias: Rows
    norm: Rows
    o: Matrix


@dataclass(frozen=True)
class Qwen35Layer:
    """One layer's weights; its norms include the `1 + w` (a delta net's own has none)."""

    input_norm: Rows
    mixer: GatedAttention | DeltaNet
    post_attention_norm: Rows
    gate: Matrix
    up: Matrix
    down: Matrix


class Qwen35(Forward):
    """A `StageModel`: Qwen3.5's or Qwen3-Next's layers of one stage."""

    @classmethod
    def check(cls, cfg: ModelConfig) -> None:
        """Raises ConfigError for a model that this forward does not compute."""
        Qwen35Params.of(cfg)

    def __init__(self, weights: Weights, layers: range, device: Device) -> None:
        super().__init__(weights, layers, device)
        self.params = Qwen35Params.of(weights.cfg)
        self._weights = {il: _Loader(weights, self.params, il, self.backend).layer() for il in self.layers}

    def load_head(self, weights: Weights) -> Head:
        """The final norm and the output matrix."""
        return load_head(weights, self.params.tied, self.params.eps, self.backend)

    def layer_width(self, il: int) -> int:
        """What a mixer's projections and their results take, or gate and up."""
        match self._weights[il].mixer:
            case GatedAttention() as attention:
                mixer = 2 * attention.qkv.n_out + 3 * attention.gate.n_out
            case DeltaNet() as net:
                mixer = 3 * net.qkv.n_out + 4 * net.z.n_out + 2 * net.ba.n_out
        return int(max(mixer, 2 * self.params.n_ff))

    def run_layer(self, il: int, x: Rows, step: Step) -> None:
        """Layer `il` over f32 `x [rows, n_embd]`, in place."""
        layer, eps, ops = self._weights[il], self.params.eps, self.backend
        h = ops.rms_norm(x, layer.input_norm, eps)
        match layer.mixer:
            case GatedAttention() as mixer:
                mixed = self._attention(mixer, il, h, step)
            case DeltaNet() as mixer:
                mixed = self._delta_net(mixer, il, h, step)
        ops.add_into(x, ops.matmul(mixed, layer.mixer.o))
        h = ops.rms_norm(x, layer.post_attention_norm, eps)
        gate = ops.matmul(h, layer.gate)
        ops.silu_mul(gate, ops.matmul(h, layer.up))
        ops.add_into(x, ops.matmul(gate, layer.down))

    def _attention(self, mixer: GatedAttention, il: int, h: Rows, step: Step) -> Rows:
        qkv, rope = self.backend.matmul(h, mixer.qkv), step.rope(mixer.inv_freq)
        q, k, v = self.backend.split_heads(qkv, mixer.attention, mixer.q_norm, mixer.k_norm, self.params.eps, rope)
        mixed = attend(il, mixer.attention, q, k, v, step)
        self.backend.sigmoid_mul(mixed, self.backend.matmul(h, mixer.gate))
        return mixed

    def _delta_net(self, net: DeltaNet, il: int, h: Rows, step: Step) -> Rows:
        ops, states = self.backend, step.states(il)
        qkv, z = ops.matmul(h, net.qkv), ops.matmul(h, net.z)
        beta, decay = ops.delta_gates(ops.matmul(h, net.ba), net.rate, net.dt_bias)
        mixed = ops.delta_scan(ops.conv_silu(qkv, net.conv, states), beta, decay, net.shape, states)
        by_head = ops.rms_norm(mixed.reshape(-1, net.shape.d_v), net.norm, self.params.eps)
        ops.silu_mul(z, by_head.reshape(z.shape))
        return z


@dataclass(frozen=True)
class _Loader:
    """Reads one layer's weights."""

    weights: Weights
    params: Qwen35Params
    il: int
    backend: Backend

    def layer(self) -> Qwen35Layer:
        n_embd, n_ff = self.weights.cfg.n_embd, self.params.n_ff
        return Qwen35Layer(
            input_norm=self.norm("input_layernorm", n_embd),
            mixer=self.mixer(),
            post_attention_norm=self.norm("post_attention_layernorm", n_embd),
            gate=self.packed(self.matrix("mlp.gate_proj", n_ff)),
            up=self.packed(self.matrix("mlp.up_proj", n_ff)),
            down=self.packed(self.matrix("mlp.down_proj", n_embd, n_ff)),
        )

    def mixer(self) -> GatedAttention | DeltaNet:
        match self.weights.cfg.layers[self.il]:
            case KvPlan() as plan:
                return self.attention(plan)
            case RecurrentPlan() as plan if self.params.delta is not None:
                return self.delta_net(plan, self.params.delta)
        raise ConfigError(f"{self.weights.cfg.arch}: layer {self.il} shares another's K/V rows; this forward has none that do")

    def attention(self, plan: KvPlan) -> GatedAttention:
        n_head, dim, n_embd = self.params.n_head, plan.head_dim_k, self.weights.cfg.n_embd
        # Each head's rows of q_proj are q, then the gate.
        q, gate = self.split("self_attn.q_proj", n_head, dim, dim)
        k, v = self.matrix("self_attn.k_proj", plan.kv_dim_k), self.matrix("self_attn.v_proj", plan.kv_dim_v)
        return GatedAttention(
            attention=AttentionSpec(plan.n_head_kv, dim, plan.head_dim_v, plan.window, dim**-0.5),
            inv_freq=inverse_frequencies(int(dim * self.params.rotary_factor), self.params.theta),
            qkv=self.packed(q, k, v),
            gate=self.packed(gate),
            q_norm=self.norm("self_attn.q_norm", dim),
            k_norm=self.norm("self_attn.k_norm", dim),
            o=self.packed(self.matrix("self_attn.o_proj", n_embd, n_head * plan.head_dim_v)),
        )

    def delta_net(self, plan: RecurrentPlan, shape: DeltaShape) -> DeltaNet:
        n_k, n_v, d_k, d_v = shape
        if self.weights.has(self.name("linear_attn.in_proj_qkvz.weight")):
            # Qwen3-Next's rows are grouped by key head.
            q, k, v, z = self.split("linear_attn.in_proj_qkvz", n_k, d_k, d_k, n_v // n_k * d_v, n_v // n_k * d_v)
            qkv, ba = [q, k, v], self.split("linear_attn.in_proj_ba", n_k, n_v // n_k, n_v // n_k)
        else:
            qkv = [self.matrix("linear_attn.in_proj_qkv", shape.conv_width)]
            z = self.matrix("linear_attn.in_proj_z", shape.value_width)
            ba = [self.matrix(f"linear_attn.in_proj_{name}", n_v) for name in "ba"]
        conv = self.tensor("linear_attn.conv1d.weight", shape.conv_width, 1, plan.conv_kernel)
        return DeltaNet(
            shape=shape,
            qkv=self.packed(*qkv),
            z=self.packed(z),
            ba=self.packed(*ba),
            conv=self.backend.upload(conv[:, 0].T),
            rate=self.backend.upload(np.exp(self.tensor("linear_attn.A_log", n_v).astype(np.float64))),
            dt_bias=self.backend.upload(self.tensor("linear_attn.dt_bias", n_v)),
            norm=self.backend.upload(self.tensor("linear_attn.norm.weight", d_v)),
            o=self.packed(self.matrix("linear_attn.out_proj", self.weights.cfg.n_embd, shape.value_width)),
        )

    def split(self, name: str, groups: int, *sizes: int) -> list[Stored]:
        """A matrix whose rows are `groups` groups of parts of `sizes`: each part's rows, group after group."""
        whole = self.matrix(name, groups * sum(sizes)).reshape(groups, sum(sizes), -1)
        parts = np.split(whole, np.cumsum(sizes)[:-1], axis=1)
        return [np.ascontiguousarray(part).reshape(-1, whole.shape[2]) for part in parts]

    def matrix(self, name: str, n_out: int, n_in: int | None = None) -> Stored:
        """`[n_out, n_in]`, `n_embd` wide unless said otherwise."""
        return load_matrix(self.weights, self.name(f"{name}.weight"), n_out, n_in or self.weights.cfg.n_embd)

    def norm(self, name: str, width: int) -> Rows:
        return self.backend.upload(load_norm(self.weights, self.name(f"{name}.weight"), width))

    def tensor(self, name: str, *shape: int) -> F32:
        return load_tensor(self.weights, self.name(name), *shape)

    def name(self, name: str) -> str:
        return f"model.layers.{self.il}.{name}"

    def packed(self, *parts: Stored) -> Matrix:
        return packed(parts, self.backend)
