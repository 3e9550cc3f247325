"""Gemma 3's forward over a range of layers, batch-invariant.

Follows the published model (Hugging Face `Gemma3ForCausalLM`, text only): RMS norms before and after attention and
feed-forward, per-head q/k norms, local layers with a window and rope base 1e4, global ones with base 1e6.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..config import KvPlan, ModelConfig
from ..config.fields import Fields
from ..errors import ConfigError
from ..kernels.backend import Backend, Matrix, Rows
from ..kernels.shapes import AttentionSpec
from .parts import Device, Forward, Head, Step, attend, inverse_frequencies, load_head, load_matrix, load_norm, packed
from .protocol import Array
from .stored import F32
from .weights import Weights


@dataclass(frozen=True)
class Gemma3Params:
    """What the forward needs beyond the cache plans, from `ModelConfig.hparams`."""

    n_head: int
    n_ff: int
    eps: float
    scale: float
    final_softcap: float | None
    theta_local: float
    theta_global: float
    rope_factor_global: float
    tied: bool

    @classmethod
    def of(cls, cfg: ModelConfig) -> Gemma3Params:
        """Raises ConfigError for a field that is missing or bad, or asks for what this forward does not compute."""
        f = Fields(cfg.arch, cfg.hparams, "the Gemma 3 forward")
        local = f.inside("rope_parameters").inside("sliding_attention")
        for field, name, computed in (
            (f, "attention_bias", (None, False)),
            (f, "use_bidirectional_attention", (None, False)),
            (f, "attn_logit_softcapping", (None,)),
            (f, "hidden_activation", (None, "gelu_pytorch_tanh")),
            (f, "partial_rotary_factor", (None, 1.0)),
            (f, "rope_type", (None, "default", "linear")),
            (local, "rope_type", (None, "default")),
        ):
            if field.raw.get(name) not in computed:
                raise field.bad(name, f"computed here; {' or '.join(map(repr, computed))} is")
        return cls(
            n_head=f.count("num_attention_heads"),
            n_ff=f.count("intermediate_size"),
            eps=f.number("rms_norm_eps", 1e-6),
            scale=f.number("query_pre_attn_scalar", 256.0) ** -0.5,
            final_softcap=f.number("final_logit_softcapping", 0.0) or None,
            theta_local=f.number("rope_local_base_freq", 1e4),
            theta_global=f.number("rope_theta", 1e6),
            rope_factor_global=f.number("rope_scaling_factor", 1.0),
            tied=f.flag("tie_word_embeddings", default=True),
        )


@dataclass(frozen=True)
class Gemma3Layer:
    """One layer's weights. `qkv` is q, k and v stacked; norms include Gemma's `1 + w`."""

    attention: AttentionSpec
    inv_freq: F32
    input_norm: Rows
    qkv: Matrix
    q_norm: Rows
    k_norm: Rows
    o: Matrix
    post_attention_norm: Rows
    pre_feedforward_norm: Rows
    gate: Matrix
    up: Matrix
    down: Matrix
    post_feedforward_norm: Rows


class Gemma3(Forward):
    """A `StageModel`: Gemma 3's layers of one stage."""

    @classmethod
    def check(cls, cfg: ModelConfig) -> None:
        """Raises ConfigError for a model that this forward does not compute."""
        Gemma3Params.of(cfg)

    def __init__(self, weights: Weights, layers: range, device: Device) -> None:
        super().__init__(weights, layers, device)
        self.params = Gemma3Params.of(weights.cfg)
        self._weights = {il: _load_layer(weights, self.params, il, self.backend) for il in self.layers}

    def load_head(self, weights: Weights) -> Head:
        """The final norm and the output matrix."""
        return load_head(weights, self.params.tied, self.params.eps, self.backend)

    def layer_width(self, il: int) -> int:
        """q, its heads, K, V and their heads, or gate and up."""
        return 2 * max(int(self._weights[il].qkv.n_out), self.params.n_ff)

    def embed(self, weights: Weights, tokens: Array) -> F32:
        """The hidden rows of tokens, times the square root of their width."""
        return super().embed(weights, tokens) * np.float32(self.cfg.n_embd**0.5)

    def logits(self, head: Head, x: Rows) -> Rows:
        """f32 `[rows, n_vocab]` of hidden rows, softly capped if the model says so."""
        logits = super().logits(head, x)
        if self.params.final_softcap is not None:
            self.backend.soft_cap(logits, self.params.final_softcap)
        return logits

    def run_layer(self, il: int, x: Rows, step: Step) -> None:
        """Layer `il` over f32 `x [rows, n_embd]`, in place."""
        layer, eps, ops = self._weights[il], self.params.eps, self.backend
        h = ops.rms_norm(x, layer.input_norm, eps)
        mixed = self._attention(layer, il, h, step)
        ops.add_rms_norm(x, ops.matmul(mixed, layer.o), layer.post_attention_norm, eps)
        h = ops.rms_norm(x, layer.pre_feedforward_norm, eps)
        gate = ops.matmul(h, layer.gate)
        ops.gelu_tanh_mul(gate, ops.matmul(h, layer.up))
        ops.add_rms_norm(x, ops.matmul(gate, layer.down), layer.post_feedforward_norm, eps)

    def _attention(self, layer: Gemma3Layer, il: int, h: Rows, step: Step) -> Rows:
        qkv, rope = self.backend.matmul(h, layer.qkv), step.rope(layer.inv_freq)
        q, k, v = self.backend.split_heads(qkv, layer.attention, layer.q_norm, layer.k_norm, self.params.eps, rope)
        return attend(il, layer.attention, q, k, v, step)


def _load_layer(weights: Weights, params: Gemma3Params, il: int, backend: Backend) -> Gemma3Layer:
    plan = weights.cfg.layers[il]
    if not isinstance(plan, KvPlan):
        raise ConfigError(f"{weights.cfg.arch}: layer {il} has no K/V rows of its own; this forward needs them")
    base, n_embd, n_ff = f"model.layers.{il}.", weights.cfg.n_embd, params.n_ff
    n_q, n_mixed = params.n_head * plan.head_dim_k, params.n_head * plan.head_dim_v
    # Local layers have a rope base of their own, and only global ones are scaled.
    theta, factor = (params.theta_global, params.rope_factor_global) if plan.window is None else (params.theta_local, 1.0)

    def matrix(n_in: int, *outputs: tuple[str, int]) -> Matrix:
        return packed([load_matrix(weights, f"{base}{name}.weight", n_out, n_in) for name, n_out in outputs], backend)

    def norm(name: str, width: int = n_embd) -> Rows:
        return backend.upload(load_norm(weights, f"{base}{name}.weight", width))

    return Gemma3Layer(
        attention=AttentionSpec(plan.n_head_kv, plan.head_dim_k, plan.head_dim_v, plan.window, params.scale),
        inv_freq=inverse_frequencies(plan.head_dim_k, theta, factor),
        input_norm=norm("input_layernorm"),
        qkv=matrix(n_embd, ("self_attn.q_proj", n_q), ("self_attn.k_proj", plan.kv_dim_k), ("self_attn.v_proj", plan.kv_dim_v)),
        q_norm=norm("self_attn.q_norm", plan.head_dim_k),
        k_norm=norm("self_attn.k_norm", plan.head_dim_k),
        o=matrix(n_mixed, ("self_attn.o_proj", n_embd)),
        post_attention_norm=norm("post_attention_layernorm"),
        pre_feedforward_norm=norm("pre_feedforward_layernorm"),
        gate=matrix(n_embd, ("mlp.gate_proj", n_ff)),
        up=matrix(n_embd, ("mlp.up_proj", n_ff)),
        down=matrix(n_ff, ("mlp.down_proj", n_embd)),
        post_feedforward_norm=norm("post_feedforward_layernorm"),
    )
