"""Models for the sweeps: Gemma 3's layers with random weights, all alike, and hardly a head, so small is their vocabulary.

A decode step of one layer reads 6 MB of bf16 of the small one and 17 MB of the even one, on one thread about half a millisecond
and one, and all layers more than a cache holds. The even one's are as wide as those of a model of half a billion parameters.
"""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

U16 = np.ndarray[Any, np.dtype[np.uint16]]


class Shape(NamedTuple):
    """What a model's matrices are like."""

    layers: int = 8
    width: int = 512
    ff: int = 1536
    heads: int = 4
    head_dim: int = 128
    vocab: int = 512


SMALL = Shape()
EVEN = Shape(layers=16, width=1024, ff=2048, heads=8)
QUICK = Shape(width=64, ff=128, heads=2, head_dim=32)


@contextmanager
def even_model(shape: Shape) -> Iterator[Path]:
    """A directory that holds the model while it is used: `config.json` and `model.safetensors`."""
    with tempfile.TemporaryDirectory(prefix="memra-even-") as name:
        path = Path(name)
        write_model(path, shape)
        yield path


def write_model(path: Path, shape: Shape) -> None:
    """Writes a model into a directory, the same bytes every time."""
    (path / "config.json").write_text(json.dumps(config(shape)))
    random = np.random.default_rng(0)
    ends = ("model.embed_tokens.weight", "lm_head.weight")
    tensors = {name: _matrix(random, shape.vocab, shape.width) for name in ends} | {"model.norm.weight": _norm(shape.width)}
    for il in range(shape.layers):
        tensors |= {f"model.layers.{il}.{name}.weight": tensor for name, tensor in _layer(random, shape).items()}
    write_safetensors(path / "model.safetensors", tensors)


def config(shape: Shape) -> dict[str, Any]:
    """The model's `config.json`: one K/V head, and attention to all rows in every layer."""
    return {
        "model_type": "gemma3_text",
        "hidden_size": shape.width,
        "intermediate_size": shape.ff,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": 1,
        "head_dim": shape.head_dim,
        "query_pre_attn_scalar": shape.head_dim,
        "layer_types": ["full_attention"] * shape.layers,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,  # a tied head of random weights says the last token again
    }


def write_safetensors(file: Path, tensors: Mapping[str, U16]) -> None:
    """Writes bf16 tensors, given as the integers of their bits: the header's length (u64), the header in JSON, the bytes
    (https://github.com/huggingface/safetensors#format)."""
    header, at = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            out.write(tensor.tobytes())


def _layer(random: np.random.Generator, shape: Shape) -> dict[str, U16]:
    mixed = shape.heads * shape.head_dim
    matrices = {
        "self_attn.q_proj": (mixed, shape.width),
        "self_attn.k_proj": (shape.head_dim, shape.width),
        "self_attn.v_proj": (shape.head_dim, shape.width),
        "self_attn.o_proj": (shape.width, mixed),
        "mlp.gate_proj": (shape.ff, shape.width),
        "mlp.up_proj": (shape.ff, shape.width),
        "mlp.down_proj": (shape.width, shape.ff),
    }
    norms = {
        "input_layernorm": shape.width,
        "self_attn.q_norm": shape.head_dim,
        "self_attn.k_norm": shape.head_dim,
        "post_attention_layernorm": shape.width,
        "pre_feedforward_layernorm": shape.width,
        "post_feedforward_layernorm": shape.width,
    }
    drawn = {name: _matrix(random, *size) for name, size in matrices.items()}
    return drawn | {name: _norm(width) for name, width in norms.items()}


def _matrix(random: np.random.Generator, n_out: int, n_in: int) -> U16:
    """Normal numbers that keep the size of what they multiply."""
    drawn = random.standard_normal((n_out, n_in), np.float32) / np.float32(n_in**0.5)
    return (drawn.view(np.uint32) >> 16).astype(np.uint16)


def _norm(width: int) -> U16:
    return np.zeros(width, np.uint16)  # Gemma multiplies by 1 + w
