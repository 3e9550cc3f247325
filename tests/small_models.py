"""Small models with random weights, which answer in milliseconds: a Gemma 3 with a tokenizer, in GGUF, and a Llama, in
safetensors."""

from __future__ import annotations

import json
import string
import struct
from pathlib import Path

import gguf
import numpy as np

LAYERS, WIDTH, HEADS, HEAD_DIM, FF, VOCAB, CONTEXT = 12, 64, 2, 32, 64, 6000, 65536
LLAMA_LAYERS, LLAMA_VOCAB = 6, 512

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


def write_small_gguf(path: Path) -> None:
    """A Gemma 3 in a file."""
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


def write_small_llama(folder: Path) -> None:
    """A Llama in a directory."""
    config = {
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": FF,
        "num_hidden_layers": LLAMA_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "vocab_size": LLAMA_VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (LLAMA_VOCAB, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (LLAMA_VOCAB, WIDTH),
    }
    for il in range(LLAMA_LAYERS):
        for name, shape in {
            "input_layernorm": (WIDTH,),
            "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
            "self_attn.k_proj": (HEAD_DIM, WIDTH),
            "self_attn.v_proj": (HEAD_DIM, WIDTH),
            "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
            "post_attention_layernorm": (WIDTH,),
            "mlp.gate_proj": (FF, WIDTH),
            "mlp.up_proj": (FF, WIDTH),
            "mlp.down_proj": (WIDTH, FF),
        }.items():
            shapes[f"model.layers.{il}.{name}.weight"] = shape
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    _write_safetensors(folder / "model.safetensors", shapes)


def _write_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    random, header, data = np.random.default_rng(1), dict[str, object](), b""
    for name, shape in shapes.items():
        values = random.standard_normal(shape, np.float32) / 4 if len(shape) > 1 else np.ones(shape, np.float32)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + values.nbytes]}
        data += values.tobytes()
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)
