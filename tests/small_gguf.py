"""Writes a small Gemma 3 with random weights to a GGUF file: a model with a tokenizer that answers in milliseconds."""

from __future__ import annotations

import string
from pathlib import Path

import gguf
import numpy as np

LAYERS, WIDTH, HEADS, HEAD_DIM, FF, VOCAB, CONTEXT = 12, 64, 2, 32, 64, 6000, 65536

NORMS = {
    "attn_norm": WIDTH,
    "attn_q_norm": HEAD_DIM,
    "attn_k_norm": HEAD_DIM,
    "post_attention_norm": WIDTH,
    "ffn_norm": WIDTH,
    "post_ffw_norm": WIDTH,
}
MATRICES = {
    "attn_q": (HEADS * HEAD_DIM, WIDTH),
    "attn_k": (HEAD_DIM, WIDTH),
    "attn_v": (HEAD_DIM, WIDTH),
    "attn_output": (WIDTH, HEADS * HEAD_DIM),
    "ffn_gate": (FF, WIDTH),
    "ffn_up": (FF, WIDTH),
    "ffn_down": (WIDTH, FF),
}
UNKNOWN, CONTROL, BYTE, NORMAL = 2, 3, 6, 1


def write_small_gguf(path: Path) -> Path:
    """The file at `path`."""
    w = gguf.GGUFWriter(path, "gemma3")
    w.add_context_length(CONTEXT)
    w.add_embedding_length(WIDTH)
    w.add_block_count(LAYERS)
    w.add_feed_forward_length(FF)
    w.add_head_count(HEADS)
    w.add_head_count_kv(1)
    w.add_key_length(HEAD_DIM)
    w.add_value_length(HEAD_DIM)
    w.add_layer_norm_rms_eps(1e-6)
    w.add_rope_freq_base(1e6)
    w.add_sliding_window(512)
    _add_tokenizer(w)
    random = np.random.default_rng(0)
    w.add_tensor("token_embd.weight", random.standard_normal((VOCAB, WIDTH), np.float32))
    w.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for il in range(LAYERS):
        for name, width in NORMS.items():
            w.add_tensor(f"blk.{il}.{name}.weight", np.ones(width, np.float32))
        for name, shape in MATRICES.items():
            w.add_tensor(f"blk.{il}.{name}.weight", random.standard_normal(shape, np.float32) / 8)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def _add_tokenizer(w: gguf.GGUFWriter) -> None:
    """Bytes, printable characters, and words of no meaning."""
    special = [("<pad>", CONTROL), ("<eos>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN)]
    pieces = special + [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    pieces += [(char, NORMAL) for char in "\u2581" + string.printable.strip()]
    pieces += [(f"\u2581w{n}", NORMAL) for n in range(VOCAB - len(pieces))]
    w.add_tokenizer_model("llama")
    w.add_token_list([text for text, _ in pieces])
    w.add_token_scores([-float(n) for n in range(VOCAB)])
    w.add_token_types([kind for _, kind in pieces])
    w.add_bos_token_id(2)
    w.add_eos_token_id(1)
    w.add_add_space_prefix(False)
