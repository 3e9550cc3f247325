"""The Qwen3.5 / Qwen3-Next forward: against the transformers library's logits, and against the equations in float64."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from library import assert_logits_and_greedy_tokens
from numpy.typing import NDArray

import memra_pp
from memra_pp.cache import Cache, KvPolicy
from memra_pp.config import ModelConfig, has_reference_forward
from memra_pp.errors import ConfigError
from memra_pp.kernels import CpuDev
from memra_pp.models import Qwen35, Segment, StepBatch, forward_layers, stage_model_for

PAIRS = [("f32", "f32"), ("q8_0", "q5_1"), ("q8_0", "q4_0"), ("fp8", "fp8")]
F32, F64 = NDArray[np.float32], NDArray[np.float64]
Tensors = Mapping[str, F32]
EXACT = KvPolicy(k="f32", v="f32")

BASE: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": 48,
    "intermediate_size": 80,
    "vocab_size": 70,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"},
}
SHAPES: dict[str, dict[str, Any]] = {
    "base": {},
    "one v head a k head": {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2, "linear_value_head_dim": 64},
    "three v heads a k head": {"linear_num_value_heads": 6, "linear_conv_kernel_dim": 5, "head_dim": 64},
    "one k head": {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "num_key_value_heads": 1, "linear_key_head_dim": 7},
    "tied": {"tie_word_embeddings": True, "linear_conv_kernel_dim": 3, "linear_value_head_dim": 40},
    "fused": {"model_type": "qwen3_next", "linear_num_value_heads": 6, "linear_key_head_dim": 32},
    "fused, tied": {"model_type": "qwen3_next", "tie_word_embeddings": True, "num_experts": 8, "mlp_only_layers": [0, 1, 2, 3]},
    "wide": {
        "hidden_size": 256, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 6,
        "head_dim": 128, "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 1.0},
    },
    "full attention only": {"layer_types": ["full_attention"] * 4},
    "delta nets only": {"layer_types": ["linear_attention"] * 4},
}  # fmt: skip


def random_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, F32]:
    """Weights of a config, under Hugging Face names."""
    rng = np.random.default_rng(seed)
    cfg = ModelConfig.from_hf(config)
    n_embd, n_ff = config["hidden_size"], config["intermediate_size"]
    heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    n_k, n_v, d_k, d_v, taps = delta_sizes(config)
    out: dict[str, F32] = {}

    def matrix(name: str, n_out: int, n_in: int) -> None:
        out[name] = (rng.standard_normal((n_out, n_in)) * 1.2 * n_in**-0.5).astype(np.float32)

    def vector(name: str, values: Any) -> None:
        out[name] = np.asarray(values, np.float32)

    matrix("model.embed_tokens.weight", config["vocab_size"], n_embd)
    for il in range(cfg.n_trunk):
        base = f"model.layers.{il}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            vector(f"{base}{name}.weight", rng.normal(0, 0.3, n_embd))
        for name, shape in (("gate", (n_ff, n_embd)), ("up", (n_ff, n_embd)), ("down", (n_embd, n_ff))):
            matrix(f"{base}mlp.{name}_proj.weight", *shape)
        if cfg.hparams["layer_types"][il] == "full_attention":
            for name, n_out in (("q", 2 * heads * dim), ("k", kv * dim), ("v", kv * dim)):
                matrix(f"{base}self_attn.{name}_proj.weight", n_out, n_embd)
            matrix(f"{base}self_attn.o_proj.weight", n_embd, heads * dim)
            for name in ("q_norm", "k_norm"):
                vector(f"{base}self_attn.{name}.weight", rng.normal(0.5, 0.3, dim))
            continue
        base += "linear_attn."
        if config["model_type"] == "qwen3_next":
            matrix(f"{base}in_proj_qkvz.weight", 2 * n_k * d_k + 2 * n_v * d_v, n_embd)
            matrix(f"{base}in_proj_ba.weight", 2 * n_v, n_embd)
        else:
            matrix(f"{base}in_proj_qkv.weight", 2 * n_k * d_k + n_v * d_v, n_embd)
            matrix(f"{base}in_proj_z.weight", n_v * d_v, n_embd)
            matrix(f"{base}in_proj_b.weight", n_v, n_embd)
            matrix(f"{base}in_proj_a.weight", n_v, n_embd)
        matrix(f"{base}out_proj.weight", n_embd, n_v * d_v)
        vector(f"{base}conv1d.weight", rng.normal(0, 0.5, (2 * n_k * d_k + n_v * d_v, 1, taps)))
        vector(f"{base}A_log", np.log(rng.uniform(0.01, 4, n_v)))
        vector(f"{base}dt_bias", rng.normal(-1, 1, n_v))
        vector(f"{base}norm.weight", rng.normal(1, 0.3, d_v))
    vector("model.norm.weight", rng.normal(0, 0.3, n_embd))
    if not config.get("tie_word_embeddings"):
        matrix("lm_head.weight", config["vocab_size"], n_embd)
    return out


def delta_sizes(config: Mapping[str, Any]) -> tuple[int, int, int, int, int]:
    names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"
    n_k, n_v, d_k, d_v, taps = (int(config[f"linear_{name}"]) for name in names)
    return n_k, n_v, d_k, d_v, taps


def write(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    """A checkpoint: config.json and model.safetensors."""
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": tensor.shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    data = b"".join(tensor.tobytes() for tensor in tensors.values())
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def sigmoid(x: F64) -> F64:
    return 1 / (1 + np.exp(-x))


def rms(x: F64, eps: float = 1e-6) -> F64:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


class Equations:
    """The published model in float64, one step at a time and as plainly as it goes."""

    def __init__(self, config: Mapping[str, Any], tensors: Tensors) -> None:
        self.config, self.w = config, {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        self.kinds = ModelConfig.from_hf(config).hparams["layer_types"]

    def logits(self, ids: list[int]) -> F64:
        """Float64 `[len(ids), n_vocab]`."""
        w = self.w
        x = w["model.embed_tokens.weight"][ids]
        for il, kind in enumerate(self.kinds):
            base = f"model.layers.{il}."
            h = rms(x) * (1 + w[f"{base}input_layernorm.weight"])
            x = x + (self.attention if kind == "full_attention" else self.delta_net)(base, h)
            h = rms(x) * (1 + w[f"{base}post_attention_layernorm.weight"])
            gate = h @ w[f"{base}mlp.gate_proj.weight"].T
            x = x + (gate * sigmoid(gate) * (h @ w[f"{base}mlp.up_proj.weight"].T)) @ w[f"{base}mlp.down_proj.weight"].T
        return rms(x) * (1 + w["model.norm.weight"]) @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T

    def attention(self, base: str, h: F64) -> F64:
        c, w, base, rows = self.config, self.w, f"{base}self_attn.", len(h)
        heads, kv, dim = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        q, gate = np.split((h @ w[f"{base}q_proj.weight"].T).reshape(rows, heads, 2 * dim), 2, axis=-1)
        k, v = ((h @ w[f"{base}{name}_proj.weight"].T).reshape(rows, kv, dim) for name in "kv")
        q = self.rotated(rms(q) * (1 + w[f"{base}q_norm.weight"]))
        k = self.rotated(rms(k) * (1 + w[f"{base}k_norm.weight"]))
        k, v = (np.repeat(x, heads // kv, axis=1) for x in (k, v))
        scores = np.einsum("thd,shd->hts", q, k) * dim**-0.5
        scores[:, ~np.tri(rows, dtype=bool)] = -np.inf
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out: F64 = np.einsum("hts,shd->thd", scores / scores.sum(-1, keepdims=True), v) * sigmoid(gate)
        return out.reshape(rows, -1) @ w[f"{base}o_proj.weight"].T

    def rotated(self, x: F64) -> F64:
        """The first part of every head rotated; as in the library, frequencies and angles are f32."""
        rope = self.config["rope_parameters"]
        dim = int(x.shape[-1] * rope["partial_rotary_factor"])
        freq = 1 / np.float32(rope["rope_theta"]) ** (np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim))
        angle = (np.arange(len(x), dtype=np.float32)[:, None] * freq.astype(np.float32)).astype(np.float64)[:, None]
        first, second = x[..., : dim // 2], x[..., dim // 2 : dim]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, x[..., dim:]], axis=-1)

    def delta_net(self, base: str, h: F64) -> F64:
        w, base, rows = self.w, f"{base}linear_attn.", len(h)
        n_k, n_v, d_k, d_v, taps = delta_sizes(self.config)
        share = n_v // n_k
        if f"{base}in_proj_qkvz.weight" in w:
            grouped = (h @ w[f"{base}in_proj_qkvz.weight"].T).reshape(rows, n_k, -1)
            q, k, v, z = np.split(grouped, np.cumsum([d_k, d_k, share * d_v]), axis=-1)
            b, a = np.split((h @ w[f"{base}in_proj_ba.weight"].T).reshape(rows, n_k, -1), 2, axis=-1)
            qkv = np.concatenate([part.reshape(rows, -1) for part in (q, k, v)], axis=-1)
            z, b, a = (part.reshape(rows, -1) for part in (z, b, a))
        else:
            qkv, z, b, a = (h @ w[f"{base}in_proj_{name}.weight"].T for name in ("qkv", "z", "b", "a"))
        padded = np.concatenate([np.zeros((taps - 1, qkv.shape[1])), qkv])
        conv = sum(padded[t : t + rows] * w[f"{base}conv1d.weight"][:, 0, t] for t in range(taps))
        q, k, v = np.split(conv * sigmoid(conv), [n_k * d_k, 2 * n_k * d_k], axis=-1)
        q, k = (x.reshape(rows, n_k, d_k) for x in (q, k))
        q, k = (np.repeat(x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6), share, axis=1) for x in (q, k))
        decay = np.exp(-np.exp(w[f"{base}A_log"]) * np.logaddexp(0, a + w[f"{base}dt_bias"]))
        state, out = np.zeros((n_v, d_k, d_v)), np.empty((rows, n_v, d_v))
        for t in range(rows):
            state = state * decay[t][:, None, None]
            delta = (v[t].reshape(n_v, d_v) - np.einsum("hk,hkv->hv", k[t], state)) * sigmoid(b[t])[:, None]
            state = state + k[t][:, :, None] * delta[:, None]
            out[t] = np.einsum("hk,hkv->hv", q[t] * d_k**-0.5, state)
        z = z.reshape(rows, n_v, d_v)
        return (rms(out) * w[f"{base}norm.weight"] * z * sigmoid(z)).reshape(rows, -1) @ w[f"{base}out_proj.weight"].T


IDS = np.random.default_rng(5).integers(0, 70, 90).tolist()


@pytest.fixture
def hybrid(data: Path) -> Path:
    """Eight random Qwen3.5 layers with the transformers library's logits beside them."""
    return data / "hybrid"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write(tmp_path, BASE, random_tensors(BASE))


def all_logits(model: Path, ids: list[int], **options: Any) -> F32:
    with (
        memra_pp.launch(model, backend="local", policy=EXACT, **options) as pipe,
        pipe.open(ids, max_new_tokens=0) as session,
    ):
        return session.prefill(all_logits=True)


@pytest.mark.parametrize(("k", "v"), PAIRS)
def test_logits_and_greedy_tokens_of_the_library(hybrid: Path, k: str, v: str) -> None:
    assert_logits_and_greedy_tokens(hybrid, KvPolicy(k=k, v=v))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_the_equations(tmp_path: Path, shape: str) -> None:
    config = BASE | SHAPES[shape]
    tensors = random_tensors(config, seed=len(shape))
    want = Equations(config, tensors).logits(IDS)
    error = np.abs(all_logits(write(tmp_path, config, tensors), IDS, stages=2) - want) / np.abs(want).max()
    assert error.mean() < 5e-7
    # A row whose q and k are nearly at right angles loses digits before the norm scales it up.
    assert error.max() < 5e-5


def test_a_wrapped_checkpoint_is_the_same_model(base: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = {"model_type": "qwen3_5", "text_config": BASE}
    tensors = {name.replace("model.", "model.language_model.", 1): w for name, w in random_tensors(BASE).items()}
    wrapped = write(tmp_path_factory.mktemp("wrapped"), config, tensors)
    np.testing.assert_array_equal(all_logits(wrapped, IDS), all_logits(base, IDS))


def test_layers_run_one_by_one_equal_layers_run_together(hybrid: Path) -> None:
    x = np.random.default_rng(0).standard_normal((40, 64)).astype(np.float32)
    one = x
    for layer in range(8):
        one = forward_layers(hybrid, range(layer, layer + 1), one)
    np.testing.assert_array_equal(one, forward_layers(hybrid, range(8), x))


class Run:
    """A model's layers with a few sessions' caches."""

    def __init__(self, path: Path, threads: int, sessions: int = 1) -> None:
        self.dev = CpuDev(threads=threads)
        self.model = Qwen35.load(path, range(8), self.dev)
        self.caches = [Cache.new(self.dev, self.model.cfg, 64) for _ in range(sessions)]

    def step(self, x: list[F32], captures: Any = ()) -> list[F32]:
        """One batch of rows, the `i`-th session's `x[i]`."""
        segments = [Segment(c.pos, len(r), logits=0, captures=captures) for c, r in zip(self.caches, x, strict=True)]
        batch = StepBatch(tuple(segments))
        out = self.model.run_layers(batch, np.concatenate(x), self.caches)
        for cache, rows in zip(self.caches, x, strict=True):
            cache.pos += len(rows)
        return [out[where] for where in batch.slices]

    def state(self, session: int) -> list[NDArray[Any]]:
        """Everything a session's cache holds."""
        cache = self.caches[session]
        planes = [plane for kv in cache.kv if kv is not None for plane in (kv.k, kv.v)]
        return planes + [buf for s in cache.recur if s is not None for buf in (s.conv_state, s.ssm_state)]

    def close(self) -> None:
        for cache in self.caches:
            cache.close()
        self.dev.close()


@pytest.fixture
def start(hybrid: Path) -> Iterator[Any]:
    with ExitStack() as stack:

        def make(threads: int = 1, sessions: int = 1) -> Run:
            run = Run(hybrid, threads, sessions)
            stack.callback(run.close)
            return run

        yield make


def hidden(rows: int, seed: int = 0) -> F32:
    return np.random.default_rng(seed).standard_normal((rows, 64)).astype(np.float32)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("chunks", [[48], [1] * 48, [1, 2, 3, 42], [40, 1, 7]])
def test_rows_and_states_do_not_depend_on_chunks_threads_or_company(start: Any, chunks: list[int], threads: int) -> None:
    x, other = hidden(48), hidden(48, seed=1)
    alone = start()
    want = alone.step([x])[0]
    run = start(threads, sessions=3)
    ends = np.cumsum(chunks)
    parts = [
        run.step([other[:1], x[end - rows : end], other[end - rows : end]])[1] for end, rows in zip(ends, chunks, strict=True)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), want)
    for got, expected in zip(run.state(1), alone.state(0), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_captures_are_the_states_on_the_way(start: Any) -> None:
    x, run, plain = hidden(12), start(), start()
    run.step([x[:4]])
    snaps = [run.caches[0].new_snapshot() for _ in range(4)]
    captures = tuple(zip((1, 2, 5, 8), snaps, strict=True))
    got = run.step([x[4:]], captures)[0]
    rows = [plain.step([x[:4]])[0]]
    for snap, (lo, hi) in zip(snaps, ((4, 5), (5, 6), (6, 9), (9, 12)), strict=True):
        rows.append(plain.step([x[lo:hi]])[0])
        for il, copy in snap.states.items():
            np.testing.assert_array_equal(copy.conv, plain.caches[0].state(il).conv_state)
            np.testing.assert_array_equal(copy.ssm, plain.caches[0].state(il).ssm_state)
    assert len(snaps[0].states) == 6
    np.testing.assert_array_equal(np.concatenate(rows)[4:], got)


def test_state_buffers_are_never_reallocated(start: Any) -> None:
    run = start()
    state = run.caches[0].state(0)
    buffers, held = {id(b) for b in state.buffers()}, run.dev.allocated_bytes
    for _ in range(3):
        run.step([hidden(2)])
    assert {id(b) for b in state.buffers()} == buffers
    assert run.dev.allocated_bytes == held


@pytest.mark.parametrize("mtp", [True, False])
def test_mtp_blocks_are_left_out(base: Path, mtp: bool) -> None:
    want = all_logits(base, IDS, stages=2)
    (base / "config.json").write_text(json.dumps(BASE | {"mtp_num_hidden_layers": 1}))
    np.testing.assert_array_equal(all_logits(base, IDS, stages=2, mtp=mtp), want)


def test_a_stage_reads_only_its_own_tensors(base: Path) -> None:
    tensors = random_tensors(BASE)
    write(base, BASE, {name: w for name, w in tensors.items() if name.startswith("model.layers.1.")})
    middle = Qwen35.load(base, range(1, 2), CpuDev())
    assert list(middle.layers) == [1]
    assert middle.head is None
    assert middle.workspace_bytes(8) < 4 * 8 * 48 * 40
    with pytest.raises(ConfigError, match="embed_tokens"):
        Qwen35.load(base, range(0, 0), CpuDev())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_bias", True),
        ("attn_output_gate", False),
        ("hidden_act", "gelu"),
        ("rope_parameters", {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.03}),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.1}),
        ("num_experts", 4),
        ("intermediate_size", None),
        ("intermediate_size", 96),
        ("num_attention_heads", 8),
        ("linear_num_value_heads", 2),
        ("linear_conv_kernel_dim", 3),
        ("vocab_size", 71),
        ("head_dim", 64),
    ],
)
def test_what_is_not_computed_or_not_of_these_weights_is_refused(base: Path, field: str, value: object) -> None:
    (base / "config.json").write_text(json.dumps(BASE | {field: value}))
    with pytest.raises(ConfigError):
        memra_pp.launch(base, backend="local")


def test_experts_are_refused_only_where_a_layer_has_them_and_before_anything_is_loaded(base: Path) -> None:
    mixed = BASE | {"num_experts": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
    with pytest.raises(ConfigError, match=r"num_experts=4 .* layer 3"):
        stage_model_for(ModelConfig.from_hf(mixed))
    assert not has_reference_forward(ModelConfig.from_hf(mixed))
    (base / "config.json").write_text(json.dumps(mixed))
    with pytest.raises(ConfigError, match=r"num_experts=4 .* layer 3"):
        Qwen35.load(base, range(1), CpuDev())
    dense = BASE | {"num_experts": 4, "decoder_sparse_step": 5}
    assert stage_model_for(ModelConfig.from_hf(dense)) is Qwen35 and has_reference_forward(ModelConfig.from_hf(dense))
    (base / "config.json").write_text(json.dumps(dense))
    Qwen35.load(base, range(1), CpuDev())
    (base / "config.json").write_text(json.dumps(BASE | {"num_experts": None}))
    assert stage_model_for(ModelConfig.from_path(base)) is Qwen35
