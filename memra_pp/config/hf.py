"""Reads a Hugging Face `config.json` into a `ModelConfig`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .families import FAMILIES, n_trunk
from .fields import MAX_ROWS, MAX_VOCAB, Fields, show
from .hparams import normalise
from .model import ModelConfig

MAX_BYTES = 64 << 20
"""A larger `config.json` is not one."""

_OUTER_KEYS = (
    *("eos_token_id", "bos_token_id", "pad_token_id", "tie_word_embeddings"),
    *("quantization_config", "dtype", "torch_dtype"),
)
"""Keys that a wrapped config may keep outside its `text_config`, which goes first."""

_UNSIZED = {
    "kv_lora_rank": "latent attention (MLA)",
    "ssm_state_size": "a state-space layer",
    "state_size": "a state-space layer",
    "mamba_d_state": "a Mamba layer",
    "mamba_num_heads": "a Mamba layer",
}


def read_hf(source: str | PathLike[str] | Mapping[str, Any]) -> ModelConfig:
    """Reads a `config.json`, a directory that holds one, or its dict; a wrapped `text_config` is found inside.

    Raises:
        ConfigError: the file is missing, is no JSON object or contradicts itself, or a layer's state cannot be sized;
            the message names the architecture, the layer or field, its value and what is allowed.
    """
    if isinstance(source, Mapping):
        raw, where = source, "config"
    else:
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        raw, where = _load(path), str(path)
    return read_text(*_unwrap(raw, where), where)


def read_text(arch: str, raw: Mapping[str, Any], where: str, spelled: Mapping[str, str] | None = None) -> ModelConfig:
    """The `ModelConfig` of a flat text config under Hugging Face names.

    `where` names its source in errors; `spelled` maps a name to the one that the source itself uses.

    Raises:
        ConfigError: as `read_hf`.
    """
    for name, what in _UNSIZED.items():
        if raw.get(name) is not None:
            raise ConfigError(f"{where}: {arch}: layer 0 keeps {what} ({name}={show(raw[name])}), which cannot be sized")
    family = FAMILIES.get(arch)
    if family is None:
        raise ConfigError(
            f"{where}: architecture {show(arch)} has no rule that sizes its layers (layer 0 on); known: {', '.join(FAMILIES)}"
        )
    f = Fields(arch, {**family.defaults, **raw}, where, spelled)
    layers = tuple(family.layers(f))
    return ModelConfig(
        arch=arch,
        n_trunk=n_trunk(f),
        n_embd=f.count("hidden_size"),
        n_vocab=f.count("vocab_size", most=MAX_VOCAB),
        max_ctx=f.count("max_position_embeddings" if f.given("max_position_embeddings") else "max_seq_len", most=MAX_ROWS),
        layers=layers,
        hparams=normalise(f, layers),
    )


def _load(path: Path) -> Mapping[str, Any]:
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: not a file; give a config.json or a directory with one")
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            data = file.read(min(size, MAX_BYTES))  # room is made for all that is asked for
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read ({e.strerror}); give a config.json or a directory with one") from e
    if size > MAX_BYTES:
        raise ConfigError(f"{path}: larger than {MAX_BYTES} bytes, so not a model's config.json")
    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: not JSON ({e}); give a model's config.json") from e
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: holds {show(raw)}, not a JSON object; give a model's config.json")
    return raw


def _unwrap(raw: Mapping[str, Any], where: str) -> tuple[str, Mapping[str, Any]]:
    """The text model's type and config: the file itself, or its `text_config`."""
    inner = raw.get("text_config")
    if inner is not None and not isinstance(inner, Mapping):
        raise ConfigError(f"{where}: text_config={show(inner)} is not an object")
    text = raw if inner is None else {**inner, **{k: raw[k] for k in _OUTER_KEYS if k in raw and inner.get(k) is None}}
    arch = text.get("model_type") or raw.get("model_type")
    if not isinstance(arch, str):
        raise ConfigError(f"{where}: model_type={show(arch)} names no architecture; known: {', '.join(FAMILIES)}")
    return arch, text
