"""Gemma 3's forward over a range of layers, on the CPU, batch-invariant.

Follows the published model (Hugging Face `Gemma3ForCausalLM`, text only): RMS norms before and after attention and
feed-forward, per-head q/k norms, local layers with a window and rope base 1e4, global ones with base 1e6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..cache import Cache, KvLayer
from ..config import KvPlan, ModelConfig
from ..config.fields import Fields
from ..errors import ConfigError
from ..kernels import CpuDev, append, ops
from ..kernels.attention import AttentionSpec, attention
from ..kernels.matmul import PackedMatrix, matmul
from .protocol import Array, Segment, StepBatch
from .weights import Weights, open_weights

F32 = NDArray[np.float32]
HEAD_CHUNK_ROWS = 8192
EMBEDDING = "model.embed_tokens.weight"


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

    plan: KvPlan
    inv_freq: F32
    input_norm: F32
    qkv: PackedMatrix
    q_norm: F32
    k_norm: F32
    o: PackedMatrix
    post_attention_norm: F32
    pre_feedforward_norm: F32
    gate: PackedMatrix
    up: PackedMatrix
    down: PackedMatrix
    post_feedforward_norm: F32


class Gemma3:
    """A `StageModel`: Gemma 3's layers of one stage."""

    def __init__(self, weights: Weights, layers: range, device: CpuDev) -> None:
        self.cfg = weights.cfg
        self.params = Gemma3Params.of(weights.cfg)
        self.device = device
        self.layers = {il: _load_layer(weights, self.params, il, device) for il in layers}
        self._embedding: Weights | None = None
        self._final_norm: F32 | None = None
        self._head: PackedMatrix | None = None

    @classmethod
    def load(cls, path: str | PathLike[str], layers: range, device: CpuDev) -> Gemma3:
        """Reads the tensors of `layers`; the embedding if the first layer is among them, the head if the last is.

        Raises:
            ConfigError: the file is not a Gemma 3 this forward computes, or lacks a tensor.
        """
        weights = open_weights(path)
        model = cls(weights, layers, device)
        if layers.start == 0:
            _require_shape(weights, EMBEDDING, (weights.cfg.n_vocab, weights.cfg.n_embd))
            model._embedding = weights
        if layers.stop == model.cfg.n_layer:
            model._final_norm = _norm(weights, "model.norm.weight", weights.cfg.n_embd)
            model._head = _load_head(weights, model.params.tied, device)
        return model

    def workspace_bytes(self, max_rows: int) -> int:
        """Activations of the widest moment, and logits for every row on the last stage."""
        plans = [layer.plan for layer in self.layers.values()]
        attn = max((2 * self.params.n_head * p.head_dim_k + 2 * p.kv_dim_k + 2 * p.kv_dim_v for p in plans), default=0)
        width = 4 * self.cfg.n_embd + max(attn, 2 * self.params.n_ff)
        return 4 * max_rows * (width + (self.cfg.n_vocab if self._head is not None else 0))

    def forward(self, batch: StepBatch, x: Array, caches: Sequence[Cache]) -> Array:
        """Tokens or hidden rows in; hidden rows, or the logits asked for on the last stage, out (see `StageModel`)."""
        if self._embedding is not None:
            x = self._embedding.rows(EMBEDDING, x) * np.float32(self.cfg.n_embd**0.5)
        x = self.run_layers(batch, x, caches)
        if self._head is None or self._final_norm is None:
            return x
        wanted = np.ascontiguousarray(x[batch.logit_rows])
        logits = matmul(ops.rms_norm(wanted, self._final_norm, self.params.eps), self._head, self.device.threads)
        if self.params.final_softcap is None:
            return logits
        cap = np.float32(self.params.final_softcap)
        capped: F32 = np.tanh(logits / cap) * cap
        return capped

    def run_layers(self, batch: StepBatch, x: F32, caches: Sequence[Cache]) -> F32:
        """The layers alone: f32 `[rows, n_embd]` in and out."""
        x = np.array(x, np.float32, order="C")
        tables: dict[bytes, tuple[F32, F32]] = {}
        positions, parts = batch.positions, list(zip(batch.segments, batch.slices, caches, strict=True))
        for il, layer in self.layers.items():
            key = layer.inv_freq.tobytes()
            if key not in tables:
                tables[key] = ops.rope_tables(positions, layer.inv_freq)
            self._attention(layer, il, x, parts, tables[key])
            self._feed_forward(layer, x)
            for _, where, cache in parts:
                if cache.dflash_taps is not None:
                    cache.dflash_taps.write(il, x[where])
        return x

    def _attention(
        self, layer: Gemma3Layer, il: int, x: F32, parts: Sequence[tuple[Segment, slice, Cache]], rope: tuple[F32, F32]
    ) -> None:
        plan, params, threads = layer.plan, self.params, self.device.threads
        n_q = params.n_head * plan.head_dim_k
        qkv = matmul(ops.rms_norm(x, layer.input_norm, params.eps), layer.qkv, threads)
        q = _heads(qkv[:, :n_q], plan.head_dim_k, layer.q_norm, params.eps, rope)
        k = _heads(qkv[:, n_q : n_q + plan.kv_dim_k], plan.head_dim_k, layer.k_norm, params.eps, rope)
        v = np.ascontiguousarray(qkv[:, n_q + plan.kv_dim_k :])
        mixed = np.empty((len(x), params.n_head * plan.head_dim_v), np.float32)
        for segment, where, cache in parts:
            kv = cache.kv[il]
            if kv is None:
                raise ConfigError(f"layer {il}'s cache is not on this stage: the cache was cut at another fence")
            append(kv, segment.pos, k[where].reshape(segment.rows, -1), v[where], cache.retain_from(kv))
            spec = _spec(kv, params.scale)
            attention(q[where], kv.k, kv.v, spec, segment.pos, kv.base, threads, out=mixed[where])
        ops.add_into(x, ops.rms_norm(matmul(mixed, layer.o, threads), layer.post_attention_norm, params.eps))

    def _feed_forward(self, layer: Gemma3Layer, x: F32) -> None:
        threads, eps = self.device.threads, self.params.eps
        h = ops.rms_norm(x, layer.pre_feedforward_norm, eps)
        gate = matmul(h, layer.gate, threads)
        ops.gelu_tanh_mul(gate, matmul(h, layer.up, threads))
        ops.add_into(x, ops.rms_norm(matmul(gate, layer.down, threads), layer.post_feedforward_norm, eps))


def _heads(flat: F32, head_dim: int, norm: F32, eps: float, rope: tuple[F32, F32]) -> F32:
    """Splits rows into heads, normalises and rotates each: f32 `[rows, heads, head_dim]`."""
    rows = len(flat)
    heads = ops.rms_norm(np.ascontiguousarray(flat).reshape(-1, head_dim), norm, eps).reshape(rows, -1, head_dim)
    ops.rope_neox(heads, *rope)
    return heads


def _spec(kv: KvLayer, scale: float) -> AttentionSpec:
    plan, layout = kv.plan, kv.layout
    return AttentionSpec(plan.n_head_kv, plan.head_dim_k, plan.head_dim_v, layout.k_fmt, layout.v_fmt, plan.window, scale)


def _load_layer(weights: Weights, params: Gemma3Params, il: int, device: CpuDev) -> Gemma3Layer:
    plan = weights.cfg.layers[il]
    if not isinstance(plan, KvPlan):
        raise ConfigError(f"{weights.cfg.arch}: layer {il} has no K/V rows of its own; this forward needs them")
    base, n_embd, n_ff = f"model.layers.{il}.", weights.cfg.n_embd, params.n_ff
    n_q, n_mixed = params.n_head * plan.head_dim_k, params.n_head * plan.head_dim_v

    def packed(n_in: int, *outputs: tuple[str, int]) -> PackedMatrix:
        return _packed([_tensor(weights, f"{base}{name}.weight", n_out, n_in) for name, n_out in outputs], device)

    def norm(name: str, width: int = n_embd) -> F32:
        return _norm(weights, f"{base}{name}.weight", width)

    return Gemma3Layer(
        plan=plan,
        inv_freq=_inv_freq(plan, params),
        input_norm=norm("input_layernorm"),
        qkv=packed(n_embd, ("self_attn.q_proj", n_q), ("self_attn.k_proj", plan.kv_dim_k), ("self_attn.v_proj", plan.kv_dim_v)),
        q_norm=norm("self_attn.q_norm", plan.head_dim_k),
        k_norm=norm("self_attn.k_norm", plan.head_dim_k),
        o=packed(n_mixed, ("self_attn.o_proj", n_embd)),
        post_attention_norm=norm("post_attention_layernorm"),
        pre_feedforward_norm=norm("pre_feedforward_layernorm"),
        gate=packed(n_embd, ("mlp.gate_proj", n_ff)),
        up=packed(n_embd, ("mlp.up_proj", n_ff)),
        down=packed(n_ff, ("mlp.down_proj", n_embd)),
        post_feedforward_norm=norm("post_feedforward_layernorm"),
    )


def _packed(parts: list[F32], device: CpuDev) -> PackedMatrix:
    matrix = PackedMatrix.empty(sum(len(part) for part in parts), parts[0].shape[1])
    row = 0
    for part in parts:
        matrix.fill(row, part, device.threads)
        row += len(part)
    return matrix


def _load_head(weights: Weights, tied: bool, device: CpuDev) -> PackedMatrix:
    name = EMBEDDING if tied else "lm_head.weight"
    shape = weights.cfg.n_vocab, weights.cfg.n_embd
    _require_shape(weights, name, shape)
    matrix = PackedMatrix.empty(*shape)
    for row, part in weights.chunks(name, HEAD_CHUNK_ROWS):
        matrix.fill(row, part, device.threads)
    return matrix


def _norm(weights: Weights, name: str, width: int) -> F32:
    return _tensor(weights, name, width) + np.float32(weights.norm_offset)


def _tensor(weights: Weights, name: str, *shape: int) -> F32:
    _require_shape(weights, name, shape)
    return weights.tensor(name)


def _require_shape(weights: Weights, name: str, shape: tuple[int, ...]) -> None:
    found = weights.shape(name)
    if found != shape:
        raise ConfigError(f"{weights.path}: {name} is {found} and the config says {shape}: they are not of one model")


def _inv_freq(plan: KvPlan, params: Gemma3Params) -> F32:
    """Rotary frequencies, f32 `[head_dim/2]`: `theta^(-2i/d)`, divided by the linear scaling factor on global layers."""
    theta, factor = (params.theta_global, params.rope_factor_global) if plan.window is None else (params.theta_local, 1.0)
    exponent = np.arange(0, plan.head_dim_k, 2, dtype=np.float32) / np.float32(plan.head_dim_k)
    freq: Any = np.float32(1.0) / np.power(np.float32(theta), exponent, dtype=np.float32)
    return np.asarray(freq / np.float32(factor), np.float32)
