"""Weights under Hugging Face names, from GGUF and safetensors files made here."""

import json
import pathlib

import gguf
import numpy as np
import pytest

from memra_pp.errors import ConfigError, InputError
from memra_pp.kernels.panels import Q8_0
from memra_pp.models import weights as module
from memra_pp.models.stored import kept_bytes, widened
from memra_pp.models.weights import open_weights

CONFIGS = pathlib.Path(__file__).parents[1] / "data" / "configs"
Q = gguf.GGMLQuantizationType
RNG = np.random.default_rng(0)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def save(path, tensors):
    """A safetensors file of `{name: (dtype, shape, bytes)}`."""
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def checkpoint(directory, tensors, config="gemma3-tiny"):
    (directory / "config.json").write_text((CONFIGS / f"{config}.json").read_text())
    save(directory / "model.safetensors", tensors)
    return open_weights(directory)


X = RNG.standard_normal((6, 5)).astype(np.float32)
STORED = {
    "F32": (X, X.tobytes()),
    "F64": (X, X.astype(np.float64).tobytes()),
    "F16": (X.astype(np.float16).astype(np.float32), X.astype(np.float16).tobytes()),
    "BF16": ((X.view(np.uint32) & 0xFFFF0000).view(np.float32), (X.view(np.uint32) >> 16).astype(np.uint16).tobytes()),
}


@pytest.mark.parametrize("dtype", STORED)
def test_safetensors_types(tmp_path, dtype):
    want, raw = STORED[dtype]
    w = checkpoint(tmp_path, {"pad": ("U8", (3,), b"abc"), EMBED: (dtype, X.shape, raw)})
    got = w.tensor(EMBED)
    assert got.dtype == np.float32 and got.flags.c_contiguous and got.flags.writeable
    np.testing.assert_array_equal(got, want)
    assert w.shape(EMBED) == X.shape and w.bytes_read == len(raw)


def test_rows_and_pieces_read_only_what_they_give(tmp_path):
    w = checkpoint(tmp_path, {EMBED: ("F32", X.shape, X.tobytes())})
    np.testing.assert_array_equal(w.rows(EMBED, [4, 0, 4]), X[[4, 0, 4]])
    assert w.bytes_read == 3 * 20 and w.rows(EMBED, []).shape == (0, 5)
    parts = list(w.pieces(EMBED, 4))
    assert [len(part) for part in parts] == [4, 2] and w.bytes_read == 9 * 20
    np.testing.assert_array_equal(np.concatenate(parts), X)
    np.testing.assert_array_equal(w.matrix(EMBED), X)
    for bad in (6, -1):
        with pytest.raises(InputError, match=f"row {bad} .*rows 0 to 5"):
            w.rows(EMBED, [0, bad])


def test_shapes_that_are_no_matrix(tmp_path):
    conv = RNG.standard_normal((4, 1, 3)).astype(np.float32)
    w = checkpoint(
        tmp_path,
        {
            "model.norm.weight": ("F32", (5,), X[0].tobytes()),
            "model.conv": ("F32", conv.shape, conv.tobytes()),
            "model.scalar": ("F32", (), X[0, :1].tobytes()),
            "model.empty": ("F32", (0, 4), b""),
        },
    )
    np.testing.assert_array_equal(w.tensor("model.norm.weight"), X[0])
    np.testing.assert_array_equal(w.tensor("model.conv"), conv)
    assert w.tensor("model.scalar").shape == () and w.tensor("model.empty").shape == (0, 4)


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model.", ""])
def test_wrapped_names(tmp_path, prefix):
    w = checkpoint(tmp_path, {f"{prefix}embed_tokens.weight": ("F32", X.shape, X.tobytes())})
    assert w.has(EMBED) and not w.has(HEAD)
    np.testing.assert_array_equal(w.tensor(EMBED), X)


@pytest.mark.parametrize(
    "config,offset", [("gemma3-tiny", 1.0), ("qwen3_5-tiny", 1.0), ("llama3_1-70b", 0.0), ("step3p5-flash", 1.0)]
)
def test_norm_offset_of_safetensors(tmp_path, config, offset):
    assert checkpoint(tmp_path, {}, config).norm_offset == offset


def test_a_missing_tensor_is_named(tmp_path):
    w = checkpoint(tmp_path, {"odd": ("I32", (1,), bytes(4))})
    with pytest.raises(ConfigError, match=rf"{tmp_path}: holds no tensor {HEAD}"):
        w.tensor(HEAD)
    with pytest.raises(ConfigError, match="odd is stored as I32"):
        w.tensor("odd")


def test_other_files(tmp_path):
    for path, message in [
        (tmp_path / "none", "does not exist"),
        (tmp_path / "x.bin", "another kind of file"),
        (tmp_path, "config.json: cannot be read"),
    ]:
        (tmp_path / "x.bin").write_bytes(b"x")
        with pytest.raises(ConfigError, match=message):
            open_weights(path)


# --- GGUF


def write_gguf(path, arch, tensors, **extra):
    w = gguf.GGUFWriter(path, arch)
    w.add_context_length(64)
    w.add_embedding_length(256)
    w.add_block_count(6)
    w.add_head_count(8)
    w.add_head_count_kv(2)
    w.add_key_length(32)
    w.add_vocab_size(40)
    w.add_sliding_window(16)
    for key, value in extra.items():
        w.add_uint16(key.replace("__", "."), value)
    for name, (data, kind) in tensors.items():
        stored = gguf.quants.quantize(data, kind) if kind > Q.F16 and data.dtype == np.float32 else data
        w.add_tensor(name, stored, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


BIG = RNG.standard_normal((40, 256)).astype(np.float32)


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q5_1])
def test_gguf_types(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_BYTES", 16 * 1024)
    data = BIG.astype(np.float16) if kind == Q.F16 else BIG
    w = open_weights(write_gguf(tmp_path / "m.gguf", "gemma3", {"token_embd.weight": (data, kind)}))
    stored = gguf.quants.quantize(BIG, kind)
    want = gguf.quants.dequantize(stored.view(np.uint8), kind)
    np.testing.assert_array_equal(w.tensor(EMBED), want)
    assert w.bytes_read == stored.nbytes and w.norm_offset == 0.0 and w.shape(EMBED) == BIG.shape
    np.testing.assert_array_equal(w.rows(EMBED, np.array([39, 1])), want[[39, 1]])
    assert w.bytes_read == stored.nbytes * 42 // 40


def same_bits(a, b):
    np.testing.assert_array_equal(a.view(np.uint32), b.view(np.uint32))


@pytest.mark.parametrize("kind", [Q.Q8_0, Q.Q5_0, Q.Q4_0])
def test_blocks_of_small_integers_are_kept_as_q8_0(tmp_path, kind):
    blocks = gguf.quants.quantize(BIG, kind)
    random = np.random.default_rng(1).integers(0, 256, (40, *blocks.shape[1:]), np.uint8)
    random[:, 1 :: 34 if kind == Q.Q8_0 else 22 if kind == Q.Q5_0 else 18] &= 0xBF  # finite scales, of either sign
    for stored in (blocks, random):
        w = open_weights(write_gguf(tmp_path / "m.gguf", "gemma3", {"token_embd.weight": (stored, kind)}))
        kept = w.matrix(EMBED)
        assert kept.dtype == Q8_0 and kept.shape == (40, BIG.shape[1] // 32) and w.bytes_read == stored.nbytes
        assert kept.nbytes == kept_bytes(kind.name, BIG.shape)
        same_bits(widened(kept), gguf.quants.dequantize(stored, kind))
        same_bits(widened(np.concatenate([*w.pieces(EMBED, 7)])), widened(kept))


def test_what_lies_in_a_file_as_it_is_kept_is_not_copied(tmp_path):
    for kind in (Q.Q8_0, Q.BF16):
        w = open_weights(write_gguf(tmp_path / "m.gguf", "gemma3", {"token_embd.weight": (BIG, kind)}))
        assert not w.matrix(EMBED).flags.owndata


def test_bf16_is_kept_as_its_bits(tmp_path):
    bits = (BIG.view(np.uint32) >> 16).astype("<u2")
    for w in (
        checkpoint(tmp_path, {EMBED: ("BF16", BIG.shape, bits.tobytes())}),
        open_weights(write_gguf(tmp_path / "m.gguf", "gemma3", {"token_embd.weight": (bits.view(np.uint8), Q.BF16)})),
    ):
        kept = w.matrix(EMBED)
        assert kept.dtype == np.uint16 and kept.nbytes == kept_bytes("BF16", BIG.shape)
        np.testing.assert_array_equal(kept, bits)
        same_bits(widened(kept), w.tensor(EMBED))


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.Q5_1, Q.Q4_1])
def test_what_is_kept_in_no_other_form_is_f32(tmp_path, kind):
    w = open_weights(write_gguf(tmp_path / "m.gguf", "gemma3", {"token_embd.weight": (BIG, kind)}))
    same_bits(w.matrix(EMBED), w.tensor(EMBED))
    assert w.matrix(EMBED).nbytes == kept_bytes(kind.name, BIG.shape)


def test_only_a_matrix_is_kept_narrow(tmp_path):
    w = checkpoint(tmp_path, {"model.norm.weight": ("BF16", (4,), bytes(8)), EMBED: ("BF16", (0, 4), b"")})
    assert kept_bytes("BF16", (4,)) == 16
    for name in ("model.norm.weight", EMBED):
        with pytest.raises(ConfigError, match="no matrix"):
            w.matrix(name)
    with pytest.raises(ConfigError, match=f"holds no tensor {HEAD}"):
        w.matrix(HEAD)


def test_gguf_k_quants_are_those_of_the_gguf_package(tmp_path):
    for kind in (Q.Q4_K, Q.Q6_K, Q.IQ4_XS):
        nbytes = gguf.GGML_QUANT_SIZES[kind][1]
        raw = RNG.integers(0, 120, (7, nbytes), np.uint8)
        w = gguf.GGUFWriter(tmp_path / "m.gguf", "gemma3")
        for add, value in ((w.add_context_length, 64), (w.add_embedding_length, 256), (w.add_block_count, 6)):
            add(value)
        w.add_head_count(8)
        w.add_sliding_window(16)
        w.add_tensor("token_embd.weight", raw, raw_dtype=kind)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
        got = open_weights(tmp_path / "m.gguf").tensor(EMBED)
        np.testing.assert_array_equal(got, gguf.quants.dequantize(raw, kind))


NAMES = {
    "gemma3": {
        "self_attn.q_proj": "attn_q",
        "self_attn.o_proj": "attn_output",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    "qwen3": {"self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm"},
}


@pytest.mark.parametrize("arch", NAMES)
def test_gguf_names(tmp_path, arch):
    tensors = {f"blk.5.{name}.weight": (BIG + i, Q.F32) for i, name in enumerate(NAMES[arch].values())}
    w = open_weights(write_gguf(tmp_path / "m.gguf", arch, {**tensors, "output.weight": (BIG, Q.F32)}))
    for i, name in enumerate(NAMES[arch]):
        np.testing.assert_array_equal(w.tensor(f"model.layers.5.{name}.weight"), BIG + i)
    assert w.has(HEAD) and not w.has("model.layers.4.mlp.down_proj.weight") and not w.has("model.layers.5.other.weight")
    with pytest.raises(ConfigError, match=r"m.gguf: holds no tensor model.layers.5.other.weight"):
        w.tensor("model.layers.5.other.weight")


def test_gguf_that_is_not_read(tmp_path):
    with pytest.raises(ConfigError, match="tensors of a llama GGUF are not read"):
        open_weights(write_gguf(tmp_path / "m.gguf", "llama", {}))
    with pytest.raises(ConfigError, match="one of 3 parts"):
        open_weights(write_gguf(tmp_path / "m.gguf", "gemma3", {}, split__count=3))
