"""Reads GGUF metadata into a `ModelConfig`: `<arch>.*` keys become a config under Hugging Face names, and the same
family rules size it. Key names are llama.cpp's (`src/llama-arch.cpp`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

from ..errors import ConfigError
from .families import FULL, LINEAR, SLIDING
from .fields import MAX_LAYERS, Fields, show
from .gguf_file import GgufArray, GgufFile, open_gguf
from .hf import read_text
from .model import ModelConfig

ARCHS: Mapping[str, str] = {
    "llama": "llama",
    "mistral3": "mistral",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "gpt-oss": "gpt_oss",
    "qwen3next": "qwen3_next",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "step35": "step3p5",
}
"""`general.architecture` -> the `model_type` whose rule sizes it."""

KEYS: Mapping[str, str] = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "context_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "kv_lora_rank": "attention.kv_lora_rank",
    "sliding_window": "attention.sliding_window",
    "num_kv_shared_layers": "attention.shared_kv_layers",
    "num_nextn_predict_layers": "nextn_predict_layers",
    "full_attention_interval": "full_attention_interval",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "rope_local_base_freq": "rope.freq_base_swa",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Hugging Face name -> the key after `<arch>.`, where both mean the same."""

TOKEN_IDS = {f"{k}_token_id": f"tokenizer.ggml.{v}_token_id" for k, v in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}


def read_gguf(path: str | PathLike[str]) -> ModelConfig:
    """Reads the metadata of a GGUF file; no tensor data is touched.

    Raises:
        ConfigError: the file is missing, truncated or corrupt, or a layer's state cannot be sized (naming the key).
    """
    return config_of(open_gguf(path))


def config_of(file: GgufFile) -> ModelConfig:
    """The `ModelConfig` of an open GGUF file.

    Raises:
        ConfigError: as `read_gguf`.
    """
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHS:
        raise ConfigError(
            f"{file.path}: general.architecture={show(arch)} has no rule that sizes its layers (layer 0 on); "
            f"known: {', '.join(ARCHS)}"
        )
    meta = {k.removeprefix(f"{arch}."): v for k, v in file.metadata.items() if k.startswith(f"{arch}.")}
    spelled = {hf: f"{arch}.{key}" for hf, key in KEYS.items()}
    raw: dict[str, Any] = {hf: meta[key] for hf, key in KEYS.items() if key in meta}
    f = Fields(arch, raw, str(file.path), spelled)  # reads raw as it grows

    blocks, mtp = f.count("num_hidden_layers", most=MAX_LAYERS), f.count("num_nextn_predict_layers", least=0, default=0)
    if mtp >= blocks:
        raise f.bad("num_nextn_predict_layers", f"less than {arch}.block_count={blocks}, which counts these blocks too")
    raw |= {hf: _per_layer(f, hf, value, blocks) for hf, value in raw.items() if isinstance(value, GgufArray)}
    raw |= {"num_hidden_layers": blocks - mtp, **_kinds(f, meta, blocks)}
    raw |= {"vocab_size": _vocab(file, raw), "tie_word_embeddings": "output.weight" not in file.tensors}
    raw |= {hf: file.metadata[key] for hf, key in TOKEN_IDS.items() if key in file.metadata}
    raw |= _rope(meta)
    raw |= _SPECIAL.get(ARCHS[arch], _plain)(f, meta)
    return read_text(ARCHS[arch], raw, str(file.path), spelled)


def _per_layer(f: Fields, name: str, value: GgufArray, blocks: int) -> Any:
    """The one value that all layers share, or the list of `blocks` values."""
    if len(value) != blocks:
        raise f.refuse(f"{f.key(name)} lists {len(value)} values for {blocks} layers")
    return value[0] if len(set(value.values)) == 1 else list(value.values)


def _kinds(f: Fields, meta: Mapping[str, Any], blocks: int) -> dict[str, Any]:
    """Which layers are windowed or recurrent: one flag a layer, or a period."""
    out: dict[str, Any] = {}
    for key, yes in (("attention.sliding_window_pattern", SLIDING), ("attention.recurrent_layers", LINEAR)):
        flags = meta.get(key)
        if isinstance(flags, GgufArray):
            if len(flags) != blocks:
                raise f.refuse(f"{f.arch}.{key} lists {len(flags)} flags for {blocks} layers")
            out["layer_types"] = [yes if flag else FULL for flag in flags.values]
        elif flags is not None:
            out["sliding_window_pattern"] = flags
    mtp = f.count("num_nextn_predict_layers", least=0, default=0)
    if mtp and "layer_types" in out and ARCHS[f.arch] != "step3p5":
        del out["layer_types"][-mtp:]
    return out


def _vocab(file: GgufFile, raw: Mapping[str, Any]) -> Any:
    """Rows of the embedding, which may be padded past the tokens."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is not None:
        return embedding.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    return raw.get("vocab_size", len(tokens) if isinstance(tokens, GgufArray) else None)


def _rope(meta: Mapping[str, Any]) -> dict[str, Any]:
    kind, factor = meta.get("rope.scaling.type"), meta.get("rope.scaling.factor", meta.get("rope.scale_linear"))
    out: dict[str, Any] = {}
    if kind not in (None, "none") or (kind is None and factor not in (None, 1.0)):
        out["rope_scaling"] = {"rope_type": kind or "linear", "factor": factor}
    width, head = meta.get("rope.dimension_count"), meta.get("attention.key_length")
    if type(width) is int and type(head) is int and 0 < width < head:
        out["partial_rotary_factor"] = width / head
    return out


def _plain(f: Fields, meta: Mapping[str, Any]) -> dict[str, Any]:
    """What llama.cpp derives where no key says it: as many K/V heads as heads, and heads that share out the width."""
    heads, width = f.count("num_attention_heads"), f.count("hidden_size")
    kv, dim = f.count("num_key_value_heads", default=heads), f.count("head_dim", default=width // heads)
    if meta.get("attention.value_length", dim) != dim:
        value = show(meta["attention.value_length"])
        raise f.refuse(f"{f.arch}.attention.value_length={value} differs from K's {dim}; no rule sizes it")
    return {"num_key_value_heads": kv, "head_dim": dim}


def _gemma3(f: Fields, meta: Mapping[str, Any]) -> dict[str, Any]:
    """The query scale is in no key: heads' share of the width in the 27B model (62 layers), else the head size."""
    plain = _plain(f, meta)
    heads, width = f.count("num_attention_heads"), f.count("hidden_size")
    scalar = width // heads if f.count("num_hidden_layers") == 62 else plain["head_dim"]
    f.count("sliding_window")
    return {**plain, "query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}


def _hybrid(f: Fields, meta: Mapping[str, Any]) -> dict[str, Any]:
    """The V heads' size is `ssm.inner_size` shared out among `ssm.time_step_rank` heads."""
    inner, heads = meta.get("ssm.inner_size"), f.count("linear_num_value_heads")
    if type(inner) is not int or inner < heads or inner % heads:
        raise f.refuse(f"{f.arch}.ssm.inner_size={show(inner)} is not a multiple of {f.arch}.ssm.time_step_rank={heads}")
    return {**_plain(f, meta), "linear_value_head_dim": inner // heads}


def _step(f: Fields, meta: Mapping[str, Any]) -> dict[str, Any]:
    heads, kv = _by_kind(f, "num_attention_heads"), _by_kind(f, "num_key_value_heads")
    dim = f.count("head_dim")
    return {
        "num_attention_heads": heads[FULL],
        "num_key_value_heads": kv[FULL],
        "attention_other_setting": {
            "num_attention_heads": heads[SLIDING],
            "num_attention_groups": kv[SLIDING],
            "head_dim": meta.get("attention.key_length_swa", dim),
        },
    }


def _gemma4(f: Fields, meta: Mapping[str, Any]) -> dict[str, Any]:
    """`key_length` is the global layers', `key_length_swa` the windowed ones'; K/V heads may differ by kind."""
    kv = _by_kind(f, "num_key_value_heads")
    if "attention.key_length_swa" not in meta:
        raise f.refuse(f"{f.arch}.attention.key_length_swa is missing; without it windowed layers cannot be sized")
    return {
        "num_key_value_heads": kv[SLIDING],
        "num_global_key_value_heads": kv[FULL],
        "attention_k_eq_v": True,
        "head_dim": meta["attention.key_length_swa"],
        "global_head_dim": f.count("head_dim"),
    }


def _by_kind(f: Fields, name: str) -> dict[str, Any]:
    """A value that may differ between windowed and full layers, but not within a kind."""
    kinds, value = f.raw.get("layer_types"), f.raw.get(name)
    if kinds is None:
        raise f.refuse(f"{f.arch}.attention.sliding_window_pattern is missing; it says which layers are windowed")
    if not isinstance(value, list):
        return dict.fromkeys((FULL, SLIDING), value)
    out: dict[str, Any] = {}
    for il, (kind, one) in enumerate(zip(kinds, value, strict=False)):
        if out.setdefault(kind, one) != one:
            raise f.refuse(f"layer {il}: {f.key(name)} is {one}, but {out[kind]} in an earlier {kind} layer; no rule sizes it")
    return {kind: out.get(kind, next(iter(out.values()))) for kind in (FULL, SLIDING)}


_SPECIAL: Mapping[str, Callable[[Fields, Mapping[str, Any]], dict[str, Any]]] = {
    "gemma3_text": _gemma3,
    "gemma4_text": _gemma4,
    "step3p5": _step,
    "qwen3_next": _hybrid,
    "qwen3_5_text": _hybrid,
    "qwen3_5_moe_text": _hybrid,
}
