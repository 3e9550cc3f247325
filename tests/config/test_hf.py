"""Per-layer plans from Hugging Face configs."""

import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_pp.config import KvPlan, ModelConfig, RecurrentPlan, SharedKvPlan
from memra_pp.errors import ConfigError

CONFIGS = pathlib.Path(__file__).parents[1] / "data" / "configs"
NAMES = sorted(p.stem for p in CONFIGS.glob("*.json"))

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
GEMMA4 = {
    **LLAMA,
    "model_type": "gemma4_text",
    "num_hidden_layers": 8,
    "head_dim": 64,
    "global_head_dim": 128,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
}
STEP = {
    **LLAMA,
    "model_type": "step3p5",
    "num_attention_groups": 2,
    "head_dim": 64,
    "sliding_window": 64,
    "num_nextn_predict_layers": 2,
    "layer_types": ["full_attention"] + ["sliding_attention"] * 4 + ["full_attention"],
}
del STEP["num_key_value_heads"]
HYBRID = {
    **LLAMA,
    "model_type": "qwen3_next",
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
MISTRAL = {**LLAMA, "model_type": "mistral"}
QWEN = {**LLAMA, "model_type": "qwen2"}


def config(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def plans(cfg: ModelConfig) -> list[tuple]:
    """Each plan as a short tuple."""
    out = []
    for p in cfg.layers:
        match p:
            case KvPlan():
                out.append((p.kv_dim_k, p.kv_dim_v, p.kv_class, p.window, p.ring))
            case RecurrentPlan():
                out.append((p.conv_width, p.conv_kernel, p.state_width))
            case SharedKvPlan():
                out.append((p.source,))
    return out


ORDINARY = ("ordinary", None, "never")
EXPECTED = {
    "llama3_1-70b": [(1024, 1024, *ORDINARY)] * 80,
    "gemma3-270m": ([(256, 256, "ordinary", 512, "reader")] * 5 + [(256, 256, *ORDINARY)]) * 3,
    "gemma3-tiny": ([(64, 64, "ordinary", 32, "reader")] * 2 + [(64, 64, *ORDINARY)]) * 2,
    "gemma4-26b-a4b": ([(2048, 2048, "gemma4_window", 1024, "never")] * 5 + [(1024, 1024, "gemma4_global", None, "never")]) * 5,
    "gemma4-e4b": ([(512, 512, "gemma4_window", 512, "never")] * 5 + [(1024, 1024, "gemma4_global", None, "never")]) * 4
    + ([(22,)] * 5 + [(23,)]) * 3,
    "qwen3_5-27b": ([(10240, 4, 786432)] * 3 + [(1024, 1024, *ORDINARY)]) * 16 + [(1024, 1024, *ORDINARY)],
    "qwen3_next-80b-a3b": ([(8192, 4, 524288)] * 3 + [(512, 512, *ORDINARY)]) * 12,
    "qwen3_5-tiny": ([(256, 4, 4096)] * 3 + [(64, 64, *ORDINARY)]) * 2,
    "step3p5-flash": ([(1024, 1024, *ORDINARY)] + [(1024, 1024, "ordinary", 512, "step")] * 3) * 12,
}


@pytest.mark.parametrize("name", NAMES)
def test_published_shapes(name):
    cfg = ModelConfig.from_hf(CONFIGS / f"{name}.json")
    assert plans(cfg) == EXPECTED[name]
    text = config(name).get("text_config", config(name))
    assert (cfg.n_trunk, cfg.n_embd, cfg.n_vocab) == (
        text["num_hidden_layers"],
        text["hidden_size"],
        text["vocab_size"],
    )
    assert cfg.max_ctx == text["max_position_embeddings"]
    assert cfg.without_mtp().n_layer == cfg.n_trunk


def test_mtp_blocks_follow_the_trunk():
    step, qwen = (ModelConfig.from_hf(CONFIGS / f"{n}.json") for n in ("step3p5-flash", "qwen3_5-27b"))
    assert (step.n_trunk, step.n_layer, qwen.n_trunk, qwen.n_layer) == (45, 48, 64, 65)
    assert isinstance(qwen.layers[64], KvPlan) and qwen.layers[64] == qwen.layers[3]


def test_a_file_a_directory_and_a_dict_are_the_same(tmp_path):
    raw = config("gemma3-270m")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert ModelConfig.from_hf(tmp_path) == ModelConfig.from_hf(tmp_path / "config.json") == ModelConfig.from_hf(raw)


def test_both_spellings_of_rope():
    full, local = {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}, {"rope_theta": 2e4}
    by_kind = {"full_attention": full, "sliding_attention": local}
    tiny = config("gemma3-tiny")
    nested = ModelConfig.from_hf({**tiny, "rope_parameters": by_kind}).hparams
    older = {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"type": "linear", "factor": 4}}
    flat = ModelConfig.from_hf({**tiny, "rope_parameters": None, **older}).hparams
    names = ("rope_theta", "rope_local_base_freq", "rope_type", "rope_scaling_factor", "partial_rotary_factor")
    assert [nested[n] for n in names] == [flat[n] for n in names] == [5e5, 2e4, "linear", 4.0, 1.0]
    scaled = {**LLAMA, "rope_scaling": {"type": "linear", "factor": 8.0}, "rope_theta": 5e5}
    hparams = ModelConfig.from_hf(scaled).hparams
    assert [hparams[n] for n in ("rope_theta", "rope_type", "rope_scaling_factor")] == [5e5, "linear", 8.0]
    yarn = ModelConfig.from_hf({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4}}).hparams
    assert (yarn["rope_type"], yarn["rope_scaling_factor"]) == ("yarn", 1.0)
    assert ModelConfig.from_hf(config("qwen3_5-tiny")).hparams["partial_rotary_factor"] == 0.25


def test_hparams_say_what_each_layer_is():
    for name in NAMES:
        cfg = ModelConfig.from_hf(CONFIGS / f"{name}.json")
        text = config(name).get("text_config", config(name))
        if "layer_types" in text:
            assert cfg.hparams["layer_types"] == text["layer_types"], name
        assert len(cfg.hparams["layer_types"]) == cfg.n_layer


def test_gemma3_with_only_the_keys_that_its_4b_publishes():
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    text["eos_token_id"] = None
    cfg = ModelConfig.from_hf({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert plans(cfg)[4:6] == [(1024, 1024, "ordinary", 1024, "reader"), (1024, 1024, *ORDINARY)]
    assert (cfg.n_vocab, cfg.max_ctx, cfg.hparams["rope_scaling_factor"]) == (262208, 131072, 8.0)
    assert cfg.hparams["eos_token_id"] == [1, 106] and cfg.hparams["tie_word_embeddings"] is True


@pytest.mark.parametrize("key", ["sliding_window_pattern", "_sliding_window_pattern"])
def test_gemma3_pattern(key):
    raw = {**config("gemma3-270m"), key: 3}
    if key != "sliding_window_pattern":
        del raw["sliding_window_pattern"]
    assert [p.window for p in ModelConfig.from_hf(raw).layers] == [512, 512, None] * 6


def test_windows_of_mistral_and_qwen():
    def windows(raw):
        return [p.window for p in ModelConfig.from_hf(raw).layers]

    assert windows({**MISTRAL, "sliding_window": None}) == [None] * 4
    assert windows({**MISTRAL, "sliding_window": 64}) == [64] * 4
    assert windows({**QWEN, "sliding_window": 64, "use_sliding_window": False}) == [None] * 4
    on = {**QWEN, "sliding_window": 64, "use_sliding_window": True}
    assert windows({**on, "max_window_layers": 3}) == [None, None, None, 64]
    kinds = ["sliding_attention", "full_attention"] * 2
    assert windows({**on, "layer_types": kinds}) == [64, None] * 2
    assert {p.ring for p in ModelConfig.from_hf({**MISTRAL, "sliding_window": 64}).layers} == {"reader"}
    with pytest.raises(ConfigError, match=r"layer 0.*use_sliding_window"):
        windows({**on, "layer_types": kinds, "use_sliding_window": False})


def test_gpt_oss_takes_turns():
    raw = {**LLAMA, "model_type": "gpt_oss", "sliding_window": 128}
    assert plans(ModelConfig.from_hf(raw)) == [(128, 128, "ordinary", 128, "reader"), (128, 128, *ORDINARY)] * 2


def test_llama_without_kv_heads_has_one_a_head():
    raw = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert ModelConfig.from_hf(raw).layers[0] == KvPlan(8, 32, 32)


def test_qwen3_head_size_is_not_a_share_of_the_width():
    assert ModelConfig.from_hf({**LLAMA, "model_type": "qwen3"}).layers[0] == KvPlan(2, 128, 128)


def test_gemma4_shares_with_the_last_owner_of_the_kind():
    cfg = ModelConfig.from_hf({**GEMMA4, "num_kv_shared_layers": 3})
    assert [p.source for p in cfg.layers[5:]] == [4, 4, 3]
    assert ModelConfig.from_hf({**GEMMA4, "num_global_key_value_heads": 1}).layers[3].kv_dim_k == 2 * 128
    assert ModelConfig.from_hf({**GEMMA4, "num_global_key_value_heads": 1, "attention_k_eq_v": True}).layers[3].kv_dim_v == 128


def test_gemma4_ends_with_a_full_layer_whatever_its_file_says():
    raw = {**GEMMA4, "layer_types": ["full_attention"] + ["sliding_attention"] * 7}
    assert ModelConfig.from_hf(raw).layers[7] == ModelConfig.from_hf(raw).layers[0] != ModelConfig.from_hf(raw).layers[6]


def test_step_windowed_layers_have_their_own_heads():
    other = {"num_attention_heads": 12, "num_attention_groups": 4, "head_dim": 32}
    cfg = ModelConfig.from_hf({**STEP, "attention_other_setting": other})
    assert plans(cfg)[:2] == [(128, 128, *ORDINARY), (128, 128, "ordinary", 64, "step")]
    assert cfg.layers[1].n_head_kv == 4 and cfg.n_trunk == 4


REFUSED = [
    (LLAMA, {"num_hidden_layers": None}, "num_hidden_layers is missing"),
    (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers=0"),
    (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000"),
    (LLAMA, {"num_hidden_layers": 4.0}, r"num_hidden_layers=4\.0"),
    (LLAMA, {"num_hidden_layers": True}, "num_hidden_layers=True"),
    (LLAMA, {"num_key_value_heads": 3}, "8 attention heads cannot share 3"),
    (LLAMA, {"num_key_value_heads": -2}, "num_key_value_heads=-2"),
    (LLAMA, {"head_dim": 33}, "33 is not a multiple of 32"),
    (LLAMA, {"hidden_size": 250}, "hidden_size=250"),
    (LLAMA, {"hidden_size": "256"}, "hidden_size='256'"),
    (LLAMA, {"vocab_size": None}, "vocab_size is missing"),
    (LLAMA, {"max_position_embeddings": None}, "max_seq_len is missing"),
    (LLAMA, {"max_position_embeddings": 1 << 40}, "max_position_embeddings"),
    (LLAMA, {"kv_lora_rank": 512}, "llama: layer 0 keeps latent attention"),
    (LLAMA, {"model_type": "mamba2"}, "'mamba2' has no rule.*layer 0.*known: llama"),
    (LLAMA, {"model_type": None}, "model_type=None"),
    (LLAMA, {"rms_norm_eps": "tiny"}, "rms_norm_eps"),
    (LLAMA, {"rope_theta": float("nan")}, "rope_theta"),
    (LLAMA, {"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor=-1"),
    (LLAMA, {"rope_scaling": 4}, "rope_scaling=4"),
    (LLAMA, {"tie_word_embeddings": 1}, "tie_word_embeddings=1"),
    (LLAMA, {"text_config": 7}, "text_config=7"),
    (LLAMA, {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 2}, "contradict"),
    (MISTRAL, {"sliding_window": 0}, "sliding_window=0"),
    (MISTRAL, {"sliding_window": -1}, "sliding_window=-1"),
    (MISTRAL, {"num_key_value_heads": None}, "num_key_value_heads is missing"),
    (QWEN, {"layer_types": ["full_attention"] * 3}, "3 entries.*list of 4 entries"),
    (QWEN, {"layer_types": ["full_attention"] * 3 + ["chunked_attention"]}, "qwen2: layer 3.*'chunked_attention'"),
    (QWEN, {"layer_types": "full_attention"}, "layer_types"),
    (HYBRID, {"layer_types": ["linear_attention", "mamba"] * 2}, "qwen3_next: layer 1.*'mamba'"),
    (HYBRID, {"linear_num_value_heads": 5}, "linear_num_value_heads=5"),
    (HYBRID, {"linear_conv_kernel_dim": None}, "linear_conv_kernel_dim is missing"),
    (HYBRID, {"full_attention_interval": 0}, "full_attention_interval=0"),
    (GEMMA4, {"sliding_window": None}, "sliding_window is missing"),
    (GEMMA4, {"num_kv_shared_layers": 8}, "layer 0: shares K/V"),
    (GEMMA4, {"num_kv_shared_layers": 5}, "layer 3: shares K/V.*no full_attention"),
    (GEMMA4, {"num_kv_shared_layers": 9}, "num_kv_shared_layers=9"),
    (GEMMA4, {"num_nextn_predict_layers": 1}, "layer 8: 1 MTP"),
    (GEMMA4, {"per_layer_config": {}}, "per_layer_config"),
    (STEP, {"num_nextn_predict_layers": 3}, "6 entries.*list of 7"),
    (STEP, {"layer_types": None}, "layer_types is missing"),
    (STEP, {"attention_other_setting": {"num_attention_groups": 3}}, "8 attention heads cannot share 3"),
    (STEP, {"attention_other_setting": {"head_dim": 40}}, "40 is not a multiple of 32"),
    (STEP, {"num_key_value_heads": 4}, "num_attention_groups=2 and num_key_value_heads=4"),
]


@pytest.mark.parametrize("base,change,message", REFUSED, ids=[m for _, _, m in REFUSED])
def test_refused(base, change, message):
    with pytest.raises(ConfigError, match=message) as e:
        ModelConfig.from_hf({**base, **change})
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    "text,message", [("", "not JSON"), ("[1]", "not a JSON object"), ("[" * 100000, "not JSON"), ("\xff", "not JSON")]
)
def test_bad_files(tmp_path, text, message):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message) as e:
        ModelConfig.from_hf(tmp_path)
    assert str(tmp_path) in str(e.value) and len(str(e.value)) < 500
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelConfig.from_hf(tmp_path / "missing.json")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.integers(0, 64),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_any_change_gives_plans_or_a_config_error(name, data):
    raw = config(name)
    text = raw.get("text_config", raw)
    for _ in range(data.draw(st.integers(1, 2))):
        text[data.draw(st.sampled_from(sorted(text)))] = data.draw(JSON)
    try:
        cfg = ModelConfig.from_hf(raw)
    except ConfigError as e:
        assert "\n" not in str(e) and len(str(e)) < 1000
        return
    for p in cfg.layers:
        if isinstance(p, KvPlan):
            assert p.head_dim_k % 32 == p.head_dim_v % 32 == 0 and (p.window is None or p.window > 0)
        if isinstance(p, SharedKvPlan):
            assert isinstance(cfg.layers[p.source], KvPlan)
