"""Weight bytes: headers counted where they belong, and estimates against published and computed sizes."""

import json
import pathlib
from dataclasses import replace
from fractions import Fraction

import gguf
import numpy as np
import pytest

from memra_pp.config import ModelConfig, WeightBytes, estimate_weight_bytes, read_weight_bytes
from memra_pp.config.families import FAMILIES
from memra_pp.config.gguf_file import open_gguf
from memra_pp.config.safetensors_file import open_safetensors
from memra_pp.config.weight_bytes import weights_of_bits, weights_of_total
from memra_pp.config.weight_estimate import _FAMILIES, tensors_of
from memra_pp.errors import ConfigError

CONFIGS = pathlib.Path(__file__).parents[1] / "data" / "configs"


def published(name: str, **more) -> dict:
    """A config of tests/data, with the keys that the published file has beside them."""
    raw = json.loads((CONFIGS / f"{name}.json").read_text())
    return {**raw.get("text_config", raw), **more}


def whole(w: WeightBytes) -> int:
    return w.of_stage(range(len(w.layers)), first=True, last=True)


def large(n: int) -> str:
    return f"{n / 1e9:.1f} B" if n >= 10**9 else f"{n / 1e6:.1f} M"


def shape(kind: str, hidden: int, layers: int, heads: int, kv: int, vocab: int, **more) -> dict:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": 2048,
        **more,
    }


NEXT = {"num_experts": 512, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
STEP = {
    "moe_num_experts": 288,
    "moe_intermediate_size": 1280,
    "share_expert_dim": 1280,
    "moe_layers_enum": ",".join(map(str, range(3, 45))),
}
GEMMA_MOE = {"hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 128, "moe_intermediate_size": 704}
OSS = {"intermediate_size": 2880, "sliding_window": 128}
OSS_20B = shape("gpt_oss", 2880, 24, 64, 8, 201088, num_local_experts=32, **OSS)
OSS_120B = shape("gpt_oss", 2880, 36, 64, 8, 201088, num_local_experts=128, **OSS)
QWEN3_30B = shape("qwen3_moe", 2048, 48, 32, 4, 151936, head_dim=128, num_experts=128, moe_intermediate_size=768)
QWEN15_MOE = shape(
    "qwen2_moe", 2048, 24, 16, 16, 151936, num_experts=60, moe_intermediate_size=1408, shared_expert_intermediate_size=5632
)

EXACT = [
    (published("gemma3-270m"), 268_098_176),
    (published("llama3_1-70b"), 70_553_706_496),
    (published("qwen3_next-80b-a3b", **NEXT), 79_674_391_296),
    (shape("mistral", 4096, 32, 32, 8, 32000, intermediate_size=14336), 7_241_732_096),
    (shape("qwen2", 3584, 28, 28, 4, 152064, intermediate_size=18944), 7_615_616_512),
    (shape("qwen3", 4096, 36, 32, 8, 151936, intermediate_size=12288), 8_190_735_360),
    (QWEN3_30B, 30_532_122_624),
    (QWEN15_MOE, 14_315_784_192),
    (OSS_20B, 20_914_757_184),
    (OSS_120B, 116_829_156_672),
]
"""Configs and the published number of parameters, MTP blocks that the config does not name left out."""


@pytest.mark.parametrize("raw,params", EXACT, ids=[f"{c['model_type']}-{n // 10**6}M" for c, n in EXACT])
def test_published_sizes_to_the_parameter(raw, params):
    w = estimate_weight_bytes(ModelConfig.from_hf(raw))
    assert (whole(w), w.estimated, w.source) == (2 * params, True, f"estimated: bf16, {large(params)} parameters")


@pytest.mark.parametrize(
    "raw,trunk,head",
    [
        (published("qwen3_5-27b"), 27.781e9 - 0.461e9, None),  # what the files hold, without the vision tower
        (published("step3p5-flash", **STEP), 196.81e9, 0.81e9),  # 0.81e9 of these are "head": embedding and matrix
        (published("gemma4-26b-a4b", **GEMMA_MOE), 25.2e9, None),
        (published("gemma4-e4b"), 8.0e9 - 0.48e9, None),  # with embeddings, without the towers of 0.17e9 and 0.31e9
    ],
    ids=["qwen3_5-27b", "step3p5-flash", "gemma4-26b-a4b", "gemma4-e4b"],
)
def test_published_sizes_as_rounded(raw, trunk, head):
    cfg = ModelConfig.from_hf(raw)
    w = estimate_weight_bytes(cfg.without_mtp() if head else cfg)
    assert whole(w) == pytest.approx(2 * trunk, rel=0.01)


@pytest.mark.parametrize("raw,nbytes", [(OSS_20B, 13_761_264_768), (OSS_120B, 65_248_815_744)], ids=["20b", "120b"])
def test_gpt_oss_as_it_is_published(raw, nbytes):
    """`metadata.total_size` of the published index files."""
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    for quant in ({"quant_method": "mxfp4", "modules_to_not_convert": kept}, {"quant_method": "mxfp4"}):
        w = estimate_weight_bytes(ModelConfig.from_hf({**raw, "quantization_config": quant}))
        assert whole(w) == nbytes and w.source.startswith("estimated: bf16, experts mxfp4, ")


MLP = {"intermediate_size": 512}
MOE = {"intermediate_size": 512, "num_experts": 8, "moe_intermediate_size": 96, "num_experts_per_tok": 2}
SHARED = {**MOE, "shared_expert_intermediate_size": 160}
NET = {
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
PATTERN = {"layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 2, "num_hidden_layers": 8}
GEMMA4 = {**MLP, **PATTERN, "head_dim": 64, "global_head_dim": 128, "sliding_window": 64}
SMALL = [
    ("llama", {**MLP}, 2742528),
    ("llama", {**MLP, "attention_bias": True, "mlp_bias": True}, 2750208),
    ("llama", {**MLP, "tie_word_embeddings": True}, 2486528),
    ("ministral", {**MLP, "head_dim": 32, "sliding_window": 64}, 2742528),
    ("qwen2", {**MLP}, 2744064),
    ("qwen3", {**MLP, "head_dim": 64}, 3398400),
    ("qwen3", {**MLP, "head_dim": 64, "attention_bias": True}, 3402496),
    ("qwen2_moe", {**SHARED}, 4031232),
    ("qwen2_moe", {**SHARED, "qkv_bias": False, "decoder_sparse_step": 2, "mlp_only_layers": [3]}, 3064320),
    ("qwen3_moe", {**MOE, "head_dim": 64, "mlp_only_layers": [0]}, 3994368),
    ("gemma3_text", {**MLP, "head_dim": 64, "sliding_window": 64}, 3144448),
    ("qwen3_next", {**NET, **SHARED}, 4164692),
    ("qwen3_next", {**NET, **SHARED, "num_experts": 0}, 2877524),
    ("qwen3_5_text", {**NET, **MLP}, 2877524),
    ("qwen3_5_moe_text", {**NET, **SHARED}, 4164692),
    ("gpt_oss", {**MLP, "num_local_experts": 8, "sliding_window": 64}, 14461248),
    (
        "step3p5",
        {
            **MLP,
            "head_dim": 64,
            "sliding_window": 64,
            "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
            "attention_other_setting": {"num_attention_heads": 12},
            "moe_layers_enum": "2,3",
            "moe_num_experts": 8,
            "moe_intermediate_size": 96,
            "share_expert_dim": 160,
        },
        4445968,
    ),
    ("gemma4_text", GEMMA4, 545134344),
    (
        "gemma4_text",
        {
            **GEMMA4,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 900,
            "hidden_size_per_layer_input": 32,
        },
        8362216,
    ),
    (
        "gemma4_text",
        {
            **GEMMA4,
            **GEMMA_MOE,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_experts": 8,
            "moe_intermediate_size": 96,
        },
        11234888,
    ),
]
"""Small configs and how many numbers the transformers library's model of each holds, a tied matrix once."""


@pytest.mark.parametrize("kind,more,params", SMALL)
def test_each_family_against_the_transformers_library(kind, more, params):
    raw = shape(kind, 256, 4, 8, 2, 1000, **{"dtype": "float32", "tie_word_embeddings": kind.startswith("gemma"), **more})
    raw["num_hidden_layers"] = more.get("num_hidden_layers", 4)
    w = estimate_weight_bytes(ModelConfig.from_hf(raw))
    assert (whole(w), w.source) == (4 * params, f"estimated: f32, {large(params)} parameters")


def test_every_family_that_can_be_sized_can_be_estimated():
    assert {kind.removesuffix("_text") for kind in FAMILIES} == set(_FAMILIES)
    with pytest.raises(ConfigError, match=r"mamba: no rule for the shapes .* known: llama"):
        estimate_weight_bytes(ModelConfig("mamba", 1, 8, 8, 8, ()))


@pytest.mark.parametrize("name", ["gemma3_tiny", "hybrid"])
def test_the_estimate_of_a_checkpoint_is_what_its_headers_say(data, name):
    cfg = ModelConfig.from_hf(data / name)
    tensors = open_safetensors(data / name)
    cfg = replace(cfg, hparams={**cfg.hparams, "dtype": "float32"})
    names = {t.name: t.rows * t.cols * 4 for t in tensors_of(cfg, "")}
    assert names == {t.name: t.nbytes for t in tensors.values()}
    read = read_weight_bytes(data / name, cfg)
    assert whole(read) == sum(t.nbytes for t in tensors.values())
    assert (read.estimated, read.source) == (False, "headers of 1 tensor file")
    assert replace(
        read, estimated=True, source=f"estimated: f32, {large(whole(read) // 4)} parameters"
    ) == estimate_weight_bytes(cfg)
    assert read == read_weight_bytes(data / name / "config.json", cfg)
    assert read == read_weight_bytes(data / name / "model.safetensors", cfg)


def test_a_real_gguf_file(gemma):
    w = read_weight_bytes(gemma, ModelConfig.from_gguf(gemma))
    tensors = open_gguf(gemma).tensors
    table, norm = (tensors[name].nbytes for name in ("token_embd.weight", "output_norm.weight"))
    assert whole(w) == sum(t.nbytes for t in tensors.values())
    assert (w.tied, w.embedding, w.head, len(w.layers)) == (True, table, table + norm, 18)
    assert w.layers[3] == sum(t.nbytes for n, t in tensors.items() if n.startswith("blk.3."))


def test_stages_add_up_and_a_tied_matrix_is_on_both_ends():
    w = WeightBytes((1, 2, 4, 8), 100, 1000, False, True, "", head_matrix=90)
    assert [w.of_stage(r, f, e) for r, f, e in ((range(2), True, False), (range(2, 3), False, False))] == [103, 4]
    assert (w.of_stage(range(3, 4), False, True), whole(w)) == (1008, 1115)
    tied = replace(w, tied=True)
    assert (tied.of_stage(range(2), True, False), tied.of_stage(range(2, 4), False, True)) == (103, 1012)
    assert whole(tied) == 1115 - 90


@pytest.mark.parametrize("total", [1, 999, 40 << 30, (40 << 30) + 1])
@pytest.mark.parametrize("name", ["gemma3-270m", "llama3_1-70b", "qwen3_5-27b", "gemma4-e4b"])
def test_a_total_is_shared_out_to_the_byte_as_the_estimate_is(name, total):
    cfg = ModelConfig.from_hf(CONFIGS / f"{name}.json")
    estimate, w = estimate_weight_bytes(cfg), weights_of_total(cfg, total)
    assert whole(w) == w.whole == total and (w.tied, w.estimated) == (estimate.tied, True)
    for got, of in zip((*w.layers, w.head_matrix), (*estimate.layers, estimate.head_matrix), strict=True):
        assert got == of * total // whole(estimate)
    assert 0 <= w.embedding - estimate.embedding * total // whole(estimate) <= len(w.layers) + 2
    assert 0 <= estimate.head * total // whole(estimate) - w.head <= 1


def test_a_total_goes_evenly_over_layers_where_the_config_is_too_short():
    cfg = ModelConfig.from_hf(published("qwen3_next-80b-a3b"))
    w = weights_of_total(cfg, (40 << 30) + 5)
    assert set(w.layers) == {(40 << 30) // 48} and (w.head, whole(w)) == (0, (40 << 30) + 5)
    assert w.estimated and w.source == "given: 40.0 GiB, evenly over layers, as the config is too short for an estimate"
    with pytest.raises(ConfigError, match="num_experts is missing"):
        weights_of_bits(cfg, Fraction(4))


@pytest.mark.parametrize("quant", [{}, {"quant_method": "gptq", "bits": 4, "group_size": 32}])
def test_bits_a_parameter_are_of_those_that_the_config_comes_to(quant):
    cfg = ModelConfig.from_hf(published("llama3_1-70b", quantization_config=quant))
    w = weights_of_bits(cfg, Fraction("4.5"))
    assert whole(w) == -(-70_553_706_496 * 9 // 16) and w.estimated
    assert w.source == "given: 4.5 bits for each of 70.6 B parameters"
    assert (
        weights_of_bits(cfg, Fraction(16)).layers
        == estimate_weight_bytes(ModelConfig.from_hf(published("llama3_1-70b"))).layers
    )


def save(path: pathlib.Path, sizes: dict[str, int]) -> None:
    """A safetensors file of u8 tensors, its data a hole."""
    header, at = {}, 0
    for name, size in sizes.items():
        header[name] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


LLAMA = ModelConfig.from_hf(shape("llama", 64, 2, 2, 2, 100, intermediate_size=96))
TEXT = {
    "model.embed_tokens.weight": 1,
    "model.layers.0.self_attn.q_proj.weight": 10,
    "model.layers.0.mlp.experts.7.up_proj.weight_scale_inv": 30,
    "model.layers.1.x": 500,
    "model.norm.weight": 1000,
    "lm_head.weight": 6000,
}


def test_bytes_are_those_of_the_file_whatever_its_size(tmp_path):
    save(tmp_path / "a.safetensors", {**TEXT, "model.layers.1.x": 3 << 40})
    assert read_weight_bytes(tmp_path, LLAMA).layers == (40, 3 << 40)


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.language_model."])
def test_wrapped_names(tmp_path, prefix):
    head = "language_model.lm_head." if prefix.startswith("language") else "lm_head."
    names = {n.replace("model.", prefix).replace("lm_head.", head): size for n, size in TEXT.items()}
    towers = {"model.visual.patch_embed.weight": 9, "vision_tower.layers.0.x": 9, "model.audio_tower.layers.1.x": 9}
    projectors = {"multi_modal_projector.x": 9, "model.embed_vision.x": 9, "vit_large_projector.weight": 9, "vision_model.x": 9}
    save(tmp_path / "a.safetensors", {**names, **towers, **projectors})
    assert read_weight_bytes(tmp_path, LLAMA) == WeightBytes(
        (40, 500), 1, 7000, False, False, "headers of 1 tensor file", head_matrix=6000
    )


def test_what_is_not_recognised_is_counted_and_said(tmp_path):
    save(tmp_path / "a.safetensors", {**TEXT, "model.memory.weight": 7, "model.layers.shared": 8})
    w = read_weight_bytes(tmp_path, LLAMA)
    assert (w.embedding, w.source) == (16, "headers of 1 tensor file, 2 unknown tensors of 15 B counted for the first stage")


def test_per_layer_embeddings_are_the_first_stages(tmp_path):
    front = {"embed_tokens_per_layer": 20, "per_layer_model_projection": 300, "per_layer_projection_norm": 4000}
    names = {f"model.language_model.{name}.weight": size for name, size in front.items()}
    save(tmp_path / "a.safetensors", {**TEXT, **names})
    w = read_weight_bytes(tmp_path, LLAMA)
    assert (w.embedding, w.source) == (4321, "headers of 1 tensor file")
    tied = replace(LLAMA, hparams={**LLAMA.hparams, "tie_word_embeddings": True})
    w = read_weight_bytes(tmp_path, tied)
    assert (w.tied, w.embedding, w.head, whole(w)) == (True, 4321, 1001, 4321 + 540 + 1000)  # the stored copy is not counted


@pytest.mark.parametrize("config", ["qwen3_5", "step3p5"])
def test_mtp_blocks(tmp_path, config):
    if config == "qwen3_5":
        raw = shape("qwen3_5", 64, 2, 2, 2, 100, intermediate_size=96, mtp_num_hidden_layers=2, **NET)
        blocks = {"mtp.layers.0.x": 1, "mtp.layers.1.x": 20, "mtp.fc.weight": 300, "mtp.norm.weight": 4000}
        expected = (4301, 20)
    else:
        kinds = ["full_attention"] * 4
        raw = shape("step3p5", 64, 2, 2, 2, 100, head_dim=32, layer_types=kinds, num_nextn_predict_layers=2)
        blocks = {"model.layers.2.eh_proj.weight": 3, "model.layers.3.transformer.shared_head.output.weight": 50}
        expected = (3, 50)
    cfg = ModelConfig.from_hf(raw)
    save(tmp_path / "a.safetensors", {**TEXT, **blocks})
    w = read_weight_bytes(tmp_path, cfg)
    assert (w.layers, w.embedding, w.source) == ((40, 500, *expected), 1, "headers of 1 tensor file")
    assert read_weight_bytes(tmp_path, cfg.without_mtp()) == replace(w, layers=(40, 500))
    save(tmp_path / "a.safetensors", TEXT)
    w = read_weight_bytes(tmp_path, cfg)
    assert (w.layers, w.source) == ((40, 500, 0, 0), "headers of 1 tensor file, no MTP blocks there")


def test_mtp_blocks_that_no_config_names_are_left_out(tmp_path):
    save(tmp_path / "a.safetensors", {**TEXT, "mtp.layers.0.x": 1, "mtp.fc.weight": 2})
    w = read_weight_bytes(tmp_path, LLAMA)
    assert (w.layers, w.embedding, w.source) == ((40, 500), 1, "headers of 1 tensor file")


def test_estimated_mtp_blocks():
    qwen = ModelConfig.from_hf(published("qwen3_5-27b"))
    w = estimate_weight_bytes(qwen)
    h, v = qwen.n_embd, qwen.n_vocab
    assert w.layers[64] - w.layers[3] == 2 * (2 * h * h + 3 * h)  # a full-attention layer, fc and three norms
    assert estimate_weight_bytes(qwen.without_mtp()).layers == w.layers[:64]
    own = replace(qwen, hparams={**qwen.hparams, "mtp_use_dedicated_embeddings": True})
    assert estimate_weight_bytes(own).layers[64] - w.layers[64] == 2 * v * h
    step = ModelConfig.from_hf(published("step3p5-flash", **STEP))
    layers = estimate_weight_bytes(step).layers
    h, v = step.n_embd, step.n_vocab
    assert layers[45] == layers[46] == layers[47]
    assert layers[45] - layers[1] == 2 * (2 * h * h + 3 * h + v * h)  # layer 1 is windowed and dense, as these are


MISSING = [
    (lambda t: t.pop("model.layers.1.x"), "holds no tensor of layer 1; is it the checkpoint of this llama config, and whole"),
    (lambda t: t.pop("model.embed_tokens.weight"), "holds no token embedding"),
    (lambda t: t.pop("model.norm.weight"), "holds no final norm"),
    (lambda t: t.pop("lm_head.weight"), "holds no output matrix"),
    (lambda t: t.update({"model.layers.2.x": 1}), r"holds 'model\.layers\.2\.x', but the config has 2 layers"),
]


@pytest.mark.parametrize("change,message", MISSING, ids=[m.split(";")[0] for _, m in MISSING])
def test_another_models_checkpoint_or_a_part_of_one_is_refused(tmp_path, change, message):
    sizes = dict(TEXT)
    change(sizes)
    save(tmp_path / "a.safetensors", sizes)
    with pytest.raises(ConfigError, match=message):
        read_weight_bytes(tmp_path, LLAMA)


def test_shards(tmp_path):
    names = ["model.safetensors-00001-of-00002.safetensors", "model.safetensors-00002-of-00002.safetensors"]
    one, two = (tmp_path / name for name in names)
    half = dict(list(TEXT.items())[:3])
    save(one, half)
    save(two, {name: size for name, size in TEXT.items() if name not in half})
    w = read_weight_bytes(tmp_path, LLAMA)
    assert (whole(w), w.source) == (sum(TEXT.values()), "headers of 2 tensor files")

    save(one, TEXT)
    two.unlink()
    for path in (tmp_path, one):
        with pytest.raises(ConfigError, match=r"one of 2 parts, of which 1 are here; fetch the others"):
            read_weight_bytes(path, LLAMA)
    index = {"weight_map": {name: names[name not in half] for name in TEXT}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=r"00002-of-00002\.safetensors: cannot be read"):
        read_weight_bytes(tmp_path, LLAMA)
    one.unlink()
    w = read_weight_bytes(tmp_path, LLAMA)
    assert (w.estimated, w.source) == (True, f"estimated: bf16, 0.1 M parameters, no tensor files in {tmp_path.name}")


def test_a_config_alone_is_estimated(tmp_path):
    config = tmp_path / "config.json"
    config.write_text("{}")
    w = read_weight_bytes(config, LLAMA)
    assert (w.estimated, w.source) == (True, "estimated: bf16, 0.1 M parameters, no tensor files beside config.json")
    assert replace(w, source="estimated: bf16, 0.1 M parameters") == estimate_weight_bytes(LLAMA)
    save(tmp_path / "a.safetensors", TEXT)
    assert not read_weight_bytes(config, LLAMA).estimated
    config.rename(tmp_path / "other.json")
    assert read_weight_bytes(tmp_path / "other.json", LLAMA).estimated
    with pytest.raises(ConfigError, match="does not exist"):
        read_weight_bytes(config, LLAMA)


def write_gguf(path: pathlib.Path, names: list[str], **keys: int) -> pathlib.Path:
    """A GGUF file whose tensor `i` has `i + 1` floats."""
    w = gguf.GGUFWriter(path, "llama")
    for key, value in keys.items():
        w.add_uint16(key.replace("__", "."), value)
    for i, name in enumerate(names):
        w.add_tensor(name, np.zeros(i + 1, np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def test_gguf_names(tmp_path):
    names = ["token_embd.weight", "blk.0.attn_q.weight", "blk.1.nextn.eh_proj.weight", "output_norm.weight", "output.weight"]
    front = ["rope_freqs.weight", "per_layer_token_embd.weight", "per_layer_model_proj.weight", "per_layer_proj_norm.weight"]
    path = write_gguf(tmp_path / "a.gguf", names + front)
    w = read_weight_bytes(path, LLAMA)
    assert (w.layers, w.embedding, w.head, w.head_matrix) == ((8, 12), 4 + 24 + 28 + 32 + 36, 36, 20)
    assert (w.tied, w.source) == (False, "headers of 1 tensor file")
    w = read_weight_bytes(write_gguf(path, [*names, "blkk.0.x"]), LLAMA)
    assert (w.embedding, w.source) == (28, "headers of 1 tensor file, 1 unknown tensor of 24 B counted for the first stage")
    with pytest.raises(ConfigError, match="holds no output matrix"):
        read_weight_bytes(write_gguf(path, names[:4]), LLAMA)
    with pytest.raises(ConfigError, match=r"one of 3 parts; merge them first"):
        read_weight_bytes(write_gguf(path, names, split__count=3), LLAMA)


@pytest.mark.parametrize(
    "raw,message",
    [
        (published("qwen3_next-80b-a3b"), "qwen3_next: num_experts is missing"),
        (published("step3p5-flash"), "step3p5: moe_layers_enum=None"),
        (published("step3p5-flash", **{**STEP, "moe_layers_enum": "3,x"}), "moe_layers_enum='3,x'"),
        (published("step3p5-flash", moe_layers_enum=[3]), "moe_num_experts or n_routed_experts is missing"),
        (published("gemma4-26b-a4b", enable_moe_block=True), "num_experts is missing"),
        (shape("llama", 64, 2, 2, 2, 100), "llama: intermediate_size is missing"),
        (shape("qwen3_moe", 64, 2, 2, 2, 100, num_experts=4), "moe_intermediate_size is missing"),
        (shape("qwen3_moe", 64, 2, 2, 2, 100, num_experts=4, mlp_only_layers=3), "mlp_only_layers=3"),
        (shape("llama", 64, 2, 2, 2, 100, dtype="int3"), "dtype='int3' is not one of bfloat16"),
        (
            shape("llama", 64, 2, 2, 2, 100, quantization_config={"quant_method": "awq"}),
            r"quantization_config: bits is missing",
        ),
    ],
)
def test_a_config_that_does_not_say_is_refused(raw, message):
    with pytest.raises(ConfigError, match=message):
        estimate_weight_bytes(ModelConfig.from_hf(raw))


QK = 64 * 64  # each of q, k, v, o
FF = 3 * 64 * 96
NORMS = 2 * 2 * 64
LAYER = 2 * (4 * QK + FF) + NORMS


@pytest.mark.parametrize(
    "quant,layer,label",
    [
        ({"quant_method": "fp8"}, 4 * QK + FF + 4 * (4 * 64 + 2 * 96 + 64) + NORMS, "bf16, matrices fp8"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, 4 * QK + FF + 4 * (4 + 6) + NORMS, "bf16, matrices fp8"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 32},
            4 * (QK // 2 + 2 * 64 * 2 + 64 + 4 * 64) + FF // 2 + 3 * (96 * 2 * 2 + 96) + 4 * (64 + 64 + 96) + NORMS,
            "bf16, matrices gptq 4 bit",
        ),
        ({"quant_method": "quip"}, LAYER, "bf16 (quantisation 'quip' is not known here, so this is too much)"),
        ({}, LAYER, "bf16"),
    ],
)
def test_quantised_checkpoints(quant, layer, label):
    raw = shape("llama", 64, 12, 2, 2, 100, intermediate_size=96, torch_dtype="bfloat16", quantization_config=quant)
    w = estimate_weight_bytes(ModelConfig.from_hf(raw))
    assert (w.layers, w.source) == ((layer,) * 12, f"estimated: {label}, 0.4 M parameters")
    assert (w.embedding, w.head) == (2 * 6400, 2 * 6400 + 128)


def test_modules_that_are_not_converted_keep_their_bytes():
    kept = ["model.language_model.layers.1.mlp", "model.layers.*.self_attn.q_proj", "mlp.gate", "lm_head"]
    quant = {"quant_method": "fp8", "weight_block_size": [64, 128], "modules_to_not_convert": kept}
    raw = shape("llama", 64, 12, 2, 2, 100, intermediate_size=96, quantization_config=quant)
    layers = estimate_weight_bytes(ModelConfig.from_hf(raw)).layers
    packed = 3 * (QK + 4) + 2 * QK + NORMS
    assert layers[0] == layers[10] == layers[11] == packed + FF + 4 * 5
    assert layers[1] == packed + 2 * FF


def test_quantised_checkpoints_keep_their_mtp_blocks():
    raw = published("qwen3_5-27b", quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    quantised, plain = (estimate_weight_bytes(ModelConfig.from_hf(r)) for r in (raw, published("qwen3_5-27b")))
    assert quantised.layers[64] == plain.layers[64]
    assert 0.5 < quantised.layers[0] / plain.layers[0] < 0.51
