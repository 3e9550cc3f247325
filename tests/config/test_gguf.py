"""The GGUF reader, on files that the gguf package writes, and what its metadata says of each architecture."""

import struct
import time

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from memra_pp.config import KvPlan, ModelConfig, SharedKvPlan
from memra_pp.config.ggml_types import GGML_TYPES
from memra_pp.config.gguf_file import open_gguf
from memra_pp.errors import ConfigError

BASE = {
    "context_length": 2048,
    "embedding_length": 256,
    "block_count": 6,
    "feed_forward_length": 512,
    "attention.head_count": 8,
    "attention.head_count_kv": 2,
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.layer_norm_rms_epsilon": 1e-6,
    "rope.freq_base": 1e6,
}
WINDOW = {"attention.sliding_window": 128}
SSM = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 32,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}


def write(path, arch, keys, tensors=None, tokens=300):
    w = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        if isinstance(value, list):
            w.add_array(f"{arch}.{key}", value)
        elif isinstance(value, float):
            w.add_float32(f"{arch}.{key}", value)
        elif isinstance(value, str):
            w.add_string(f"{arch}.{key}", value)
        else:
            w.add_uint32(f"{arch}.{key}", value)
    w.add_token_list([f"t{i}é" for i in range(tokens)])
    w.add_token_scores([-float(i) for i in range(tokens)])
    w.add_token_types([1] * tokens)
    w.add_bos_token_id(2)
    w.add_add_bos_token(True)
    for name, data, kind in tensors or []:
        w.add_tensor(name, data, raw_dtype=kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


@pytest.fixture
def read(tmp_path):
    def read(arch, keys, drop=(), **kw) -> ModelConfig:
        merged = {k: v for k, v in {**BASE, **keys}.items() if k not in drop}
        return ModelConfig.from_gguf(write(tmp_path / "m.gguf", arch, merged, **kw))

    return read


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    q8 = gguf.quants.quantize(np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    tensors = [
        ("token_embd.weight", q8, gguf.GGMLQuantizationType.Q8_0),
        ("output_norm.weight", np.arange(64, dtype=np.float32), None),
    ]
    return write(path, "gemma3", {**BASE, **WINDOW}, tensors, tokens=20)


def test_reads_what_the_gguf_package_wrote(small):
    file = open_gguf(small)
    assert file.version == 3 and file.metadata["general.architecture"] == "gemma3"
    assert file.metadata["gemma3.rope.freq_base"] == 1e6
    assert list(file.metadata["tokenizer.ggml.tokens"]) == [f"t{i}é" for i in range(20)]
    assert file.metadata["tokenizer.ggml.scores"][3:5].tolist() == [-3.0, -4.0]
    assert file.metadata["tokenizer.ggml.add_bos_token"] is True
    embedding, norm = file.tensors["token_embd.weight"], file.tensors["output_norm.weight"]
    assert (embedding.shape, embedding.type_name, embedding.nbytes) == ((3, 64), "Q8_0", 204)
    assert np.frombuffer(file.data("output_norm.weight"), np.float32).tolist() == list(range(64))
    reader = gguf.GGUFReader(small)
    assert {t.name: (t.data_offset, t.n_bytes) for t in reader.tensors} == {
        t.name: (t.offset, t.nbytes) for t in (embedding, norm)
    }


def test_type_sizes_are_those_of_the_gguf_package():
    known = {int(k): v for k, v in gguf.GGML_QUANT_SIZES.items() if int(k) in GGML_TYPES}
    assert {i: (t.block, t.nbytes) for i, t in GGML_TYPES.items()} == known


def test_a_large_vocabulary_opens_fast(tmp_path):
    path = write(tmp_path / "m.gguf", "gemma3", {**BASE, **WINDOW}, tokens=200_000)
    start = time.perf_counter()
    assert ModelConfig.from_gguf(path).n_vocab == 200_000
    assert time.perf_counter() - start < 1.0


# --- damage


def check(path, data, message):
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message) as e:
        open_gguf(path)
    assert str(path) in str(e.value) and "\n" not in str(e.value) and len(str(e.value)) < 600


def header(n_tensors, n_keys, version=3):
    return b"GGUF" + struct.pack("<IQQ", version, n_tensors, n_keys)


def text(s: bytes) -> bytes:
    return struct.pack("<Q", len(s)) + s


def tensor(name=b"a", dims=(32,), kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


HUGE = 1 << 63
DAMAGE = [
    (b"", "not a GGUF"),
    (b"GG", "not a GGUF"),
    (b"PK\x03\x04" * 10, "not a GGUF"),
    (b"GGUF", "a number"),
    (header(0, 0, 1), "version 1 "),
    (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    (header(HUGE, 0), "tensors, more than"),
    (header(0, HUGE), "metadata keys"),
    (header(0, 5), "a number of 8 bytes"),
    (header(0, 1) + struct.pack("<Q", HUGE), "a metadata key of 9223372036854775808 bytes"),
    (header(0, 1) + text(b"\xff") + struct.pack("<IB", 0, 0), "not UTF-8"),
    (header(0, 1) + text(b"k") + struct.pack("<IB", 99, 0), "unknown value type 99"),
    (header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 9, 1), "elements of type 9"),
    (header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 4, HUGE), "the array 'k' of"),
    (header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, HUGE), "strings in 'k', more than"),
    (header(0, 1) + text(b"k") + struct.pack("<IIQQ", 9, 8, 1, HUGE), "end past the end"),
    (header(0, 1) + text(b"k") + struct.pack("<IIQQQ", 9, 8, 2, 100, 0), "string 1 of 'k' begins past"),
    (header(0, 1) + text(b"k") + struct.pack("<IQ", 8, HUGE), "the string 'k' of"),
    (header(0, 2) + (text(b"k") + struct.pack("<IB", 0, 0)) * 2, "'k' is there twice"),
    (header(1, 1) + text(b"general.alignment") + struct.pack("<II", 4, 3) + tensor(), "general.alignment=3"),
    (header(1, 0) + tensor(dims=()), "0 dimensions"),
    (header(1, 0) + tensor(dims=(1,) * 5), "5 dimensions"),
    (header(1, 0) + tensor(dims=(32, 0)), r"shape \[32, 0\]"),
    (header(1, 0) + tensor(dims=(33,), kind=8), "Q8_0 packs 32"),
    (header(1, 0) + tensor(kind=77), "unknown ggml type 77"),
    (header(1, 0) + tensor(offset=4), "not a multiple of 32"),
    (header(1, 0) + tensor(), "ends at byte"),
    (header(1, 0) + tensor(dims=(HUGE, HUGE)) + bytes(999), "ends at byte"),
    (header(2, 0) + tensor(b"a") + tensor(b"b") + bytes(999), "'a' and 'b' overlap"),
    (header(2, 0) + tensor(b"a") + tensor(b"a", offset=128) + bytes(999), "there twice"),
]


@pytest.mark.parametrize("data,message", DAMAGE, ids=[m for _, m in DAMAGE])
def test_damage_is_named(tmp_path, data, message):
    check(tmp_path / "m.gguf", data, message)


def test_a_token_that_is_not_text(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(header(0, 1) + text(b"k") + struct.pack("<IIQ", 9, 8, 1) + text(b"\xff"))
    with pytest.raises(ConfigError, match=r"k\[0\] is not UTF-8"):
        list(open_gguf(path).metadata["k"])


@settings(max_examples=600, deadline=1000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_fuzz(small, tmp_path, data):
    """Flips, truncations and overwritten words anywhere in the header end in a file that reads, or a ConfigError."""
    raw = bytearray(small.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(raw) - 8))
        word = data.draw(st.integers(0, 255) | st.sampled_from([1 << 31, 1 << 62, HUGE, (1 << 64) - 1, 5000]))
        raw[at : at + (1 if word < 256 else 8)] = word.to_bytes(1 if word < 256 else 8, "little")
    path = tmp_path / "fuzz.gguf"
    path.write_bytes(raw[: data.draw(st.just(len(raw)) | st.integers(0, len(raw)))])
    try:
        file = open_gguf(path)
        for value in file.metadata.values():
            if not isinstance(value, (int, float, str)):
                list(value)
        assert all(t.offset + t.nbytes <= len(raw) for t in file.tensors.values())
        ModelConfig.from_gguf(path)
    except ConfigError as e:
        assert "\n" not in str(e)


# --- architectures


def test_gemma3_with_no_pattern_key(read):
    cfg = read("gemma3", WINDOW)
    assert cfg.arch == "gemma3_text" and cfg.n_vocab == 300 and cfg.hparams["tie_word_embeddings"] is True
    assert cfg.layers == (KvPlan(2, 64, 64, window=128, ring="reader"),) * 5 + (KvPlan(2, 64, 64),)
    assert cfg.hparams["query_pre_attn_scalar"] == 64 and cfg.hparams["rope_local_base_freq"] == 1e4
    assert cfg.hparams["bos_token_id"] == 2
    big = read("gemma3", {**WINDOW, "block_count": 62, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0})
    assert big.hparams["query_pre_attn_scalar"] == 256 // 8 and big.hparams["rope_scaling_factor"] == 8.0


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe", "mistral3"])
def test_dense(read, arch):
    assert read(arch, {}).layers == (KvPlan(2, 64, 64),) * 6
    derived = read(arch, {}, drop=("attention.key_length", "attention.value_length", "attention.head_count_kv"))
    assert derived.layers == (KvPlan(8, 32, 32),) * 6


def test_gpt_oss(read):
    assert [p.window for p in read("gpt-oss", WINDOW).layers] == [128, None] * 3


@pytest.mark.parametrize("arch", ["qwen3next", "qwen35", "qwen35moe"])
def test_hybrid(read, arch):
    cfg = read(arch, {**SSM, "full_attention_interval": 3, "rope.dimension_count": 16})
    assert cfg.layers[2] == KvPlan(2, 64, 64) and cfg.hparams["partial_rotary_factor"] == 0.25
    assert (cfg.layers[0].conv_width, cfg.layers[0].state_width) == (2 * 2 * 32 + 64, 4 * 32 * 16)
    mtp = read(arch, {**SSM, "full_attention_interval": 3, "nextn_predict_layers": 2})
    assert (mtp.n_trunk, mtp.n_layer, mtp.layers[5]) == (4, 6, KvPlan(2, 64, 64))
    flags = [True, False, False, True, True, False]
    listed = read(arch, {**SSM, "attention.recurrent_layers": flags, "nextn_predict_layers": 1})
    assert [isinstance(p, KvPlan) for p in listed.layers] == [not f for f in flags[:5]] + [True]


def test_step(read):
    pattern = [False, True, True, True, False, True]
    cfg = read(
        "step35",
        {
            **WINDOW,
            "attention.sliding_window_pattern": pattern,
            "attention.head_count": [12 if w else 8 for w in pattern],
            "attention.head_count_kv": [4 if w else 2 for w in pattern],
            "nextn_predict_layers": 2,
        },
    )
    assert (cfg.n_trunk, cfg.n_layer) == (4, 6)
    assert cfg.layers == tuple(KvPlan(4, 64, 64, window=128, ring="step") if w else KvPlan(2, 64, 64) for w in pattern)


def test_gemma4(read):
    pattern = [True, True, False] * 2
    cfg = read(
        "gemma4",
        {
            **WINDOW,
            "attention.sliding_window_pattern": pattern,
            "attention.head_count_kv": [4 if w else 2 for w in pattern],
            "attention.key_length_swa": 32,
            "attention.shared_kv_layers": 2,
        },
    )
    window, full = KvPlan(4, 32, 32, "gemma4_window", 128), KvPlan(2, 64, 64, "gemma4_global")
    assert cfg.layers == (window, window, full, window, SharedKvPlan(3), SharedKvPlan(2))


@pytest.mark.parametrize(
    "arch,keys,drop,message",
    [
        ("mamba", {}, (), "general.architecture='mamba' has no rule"),
        ("qwen3", {}, ("block_count",), r"num_hidden_layers \(qwen3.block_count\) is missing"),
        ("qwen3", {}, ("embedding_length",), r"qwen3.embedding_length\) is missing"),
        ("qwen3", {}, ("context_length",), "is missing"),
        ("qwen3", {"attention.value_length": 32}, (), "attention.value_length=32 differs"),
        ("qwen3", {"attention.head_count_kv": [2, 2, 2, 2, 2, 4]}, (), r"attention.head_count_kv"),
        ("qwen3", {"attention.head_count_kv": [2] * 5}, (), "lists 5 values for 6 layers"),
        ("qwen3", {"nextn_predict_layers": 6}, (), "less than qwen3.block_count=6"),
        ("qwen3", {"attention.kv_lora_rank": 64}, (), "latent attention"),
        ("gemma3", {}, (), r"gemma3.attention.sliding_window\) is missing"),
        ("gemma3", {**WINDOW, "attention.sliding_window_pattern": [True] * 5}, (), "lists 5 flags for 6 layers"),
        ("qwen35", SSM, ("ssm.group_count",), r"qwen35.ssm.group_count\) is missing"),
        ("qwen35", SSM, ("ssm.inner_size",), "qwen35.ssm.inner_size=None"),
        ("gemma4", WINDOW, (), "gemma4.attention.sliding_window_pattern is missing"),
        ("step35", {**WINDOW, "attention.sliding_window_pattern": [True] * 6, "attention.head_count_kv": [1, 2] * 3}, (),
         "layer 1: .*head_count_kv"),
    ],
)  # fmt: skip
def test_refused(read, arch, keys, drop, message):
    with pytest.raises(ConfigError, match=message):
        read(arch, keys, drop=drop)


def test_missing_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_gguf(tmp_path)
