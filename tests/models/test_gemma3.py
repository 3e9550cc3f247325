"""The Gemma 3 forward against the transformers library: a tiny random model whole, the 270M weights layer by layer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from library import assert_logits_and_greedy_tokens

import memra_pp
import memra_pp.cache
from memra_pp.cache import DflashTapSink, KvPolicy
from memra_pp.config import ModelConfig
from memra_pp.errors import ConfigError
from memra_pp.kernels import CpuDev
from memra_pp.models import Gemma3, Segment, StepBatch, forward_layers, stage_model_for

PAIRS = [("f32", "f32"), ("q8_0", "q5_1"), ("q8_0", "q4_0"), ("fp8", "fp8")]


@pytest.mark.parametrize(("k", "v"), PAIRS)
def test_logits_and_greedy_tokens_of_the_tiny_model(tiny: Path, k: str, v: str) -> None:
    assert_logits_and_greedy_tokens(tiny, KvPolicy(k=k, v=v, ring="all"))


def test_each_layer_of_the_real_weights(gemma: Path, data: Path) -> None:
    hidden = np.load(data / "gemma3_270m_hidden.npz")["hidden"]
    for layer in range(18):
        x, want = hidden[layer], hidden[layer + 1]
        got = forward_layers(gemma, range(layer, layer + 1), x, policy=KvPolicy(k="f32", v="f32"))
        error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want - x, axis=1)
        assert error.max() < 2e-5, layer


@pytest.mark.parametrize("policy", [KvPolicy(), KvPolicy(ring="all")], ids=["flat", "ring"])
def test_a_windowed_layer_over_more_rows_than_its_window(gemma: Path, data: Path, policy: KvPolicy) -> None:
    case = np.load(data / "gemma3_270m_window.npz")
    layer, x, rows = int(case["layer"]), case["x"].astype(np.float32), case["rows"]
    got, want = forward_layers(gemma, range(layer, layer + 1), x, policy=policy)[rows], case["out"]
    error = np.linalg.norm(got - want, axis=1) / np.linalg.norm(want - x[rows], axis=1)
    assert np.median(error) < 1e-4
    assert error.max() < 2e-2


@pytest.mark.parametrize("pair", ["f32_f32", "q8_0_q5_1"])
def test_logits_of_the_real_weights_end_to_end(gemma: Path, data: Path, pair: str) -> None:
    exact = np.load(data / "gemma3_270m_exact.npz")
    policy = KvPolicy(k="f32", v="f32") if pair == "f32_f32" else KvPolicy()
    with memra_pp.launch(gemma, stages=2, backend="local", policy=policy) as pipe:
        for case in range(2):
            ids, pos = exact[f"ids_{case}"].tolist(), exact[f"pos_{case}_{pair}"]
            top, want = exact[f"top_ids_{case}_{pair}"], exact[f"top_logits_{case}_{pair}"]
            with pipe.open(ids, max_new_tokens=0) as session:
                rows = session.prefill(all_logits=True)[pos]
            error = np.abs(np.take_along_axis(rows, top, -1) - want)
            if pair == "f32_f32":
                assert error.max() < 5e-3
            else:
                sure = want[:, 0] - want[:, 1] > 2.0
                assert (rows.argmax(-1) == top[:, 0])[sure].all()
                assert error.mean() < 0.2


def test_layers_run_one_by_one_equal_layers_run_together(tiny: Path) -> None:
    x = np.random.default_rng(0).standard_normal((70, 64)).astype(np.float32)
    one = x
    for layer in range(6):
        one = forward_layers(tiny, range(layer, layer + 1), one)
    np.testing.assert_array_equal(one, forward_layers(tiny, range(6), x))


def test_a_stage_reads_only_its_own_tensors(gemma: Path) -> None:
    device = CpuDev()
    middle = Gemma3.load(gemma, range(6, 8), device)
    assert sorted(middle.layers) == [6, 7]
    assert middle.workspace_bytes(8) < 4 * 8 * middle.cfg.n_vocab


def test_taps_hold_the_residual_after_each_tapped_layer_in_slot_order(tiny: Path) -> None:
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    device = CpuDev()
    model = Gemma3.load(tiny, range(1, 5), device)
    with memra_pp.cache.Cache.new_ppn_slice(device, 1, 5, model.cfg, 8) as cache:
        cache.dflash_taps = DflashTapSink.armed((4, 0, 2), 64, 5)
        last = model.run_layers(StepBatch((Segment(0, 5, logits=0),)), x, [cache])
        slots = cache.dflash_taps.buf.reshape(5, 3, 64)
        np.testing.assert_array_equal(slots[:, 0], last)
        np.testing.assert_array_equal(slots[:, 1], 0)
        np.testing.assert_array_equal(slots[:, 2], forward_layers(tiny, range(1, 3), x))


def test_forward_layers_refuses_layers_and_rows_that_do_not_fit(tiny: Path) -> None:
    x = np.zeros((1, 64), np.float32)
    for layers, rows in ((range(5, 7), x), (range(2, 2), x), (range(0, 4, 2), x), (range(1), x[:, :8])):
        with pytest.raises(ConfigError):
            forward_layers(tiny, layers, rows)


def test_an_architecture_without_a_reference_forward_is_named() -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "vocab_size": 8, "intermediate_size": 64, "max_position_embeddings": 64,
    }  # fmt: skip
    with pytest.raises(ConfigError, match="llama"):
        stage_model_for(ModelConfig.from_hf(config))


def altered(tiny: Path, folder: Path, **changes: object) -> Path:
    """The tiny model with some of its config changed."""
    config = json.loads((tiny / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes((tiny / "model.safetensors").read_bytes())
    return folder


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_bias", True),
        ("use_bidirectional_attention", True),
        ("attn_logit_softcapping", 50.0),
        ("hidden_activation", "silu"),
        ("final_logit_softcapping", 0),
        ("final_logit_softcapping", "30"),
        ("query_pre_attn_scalar", 0),
        ("query_pre_attn_scalar", True),
        ("intermediate_size", None),
        ("intermediate_size", 64),
        ("vocab_size", 500),
        ("num_attention_heads", 8),
        ("head_dim", 64),
        ("tie_word_embeddings", False),
        ("rope_parameters", {"full_attention": {"rope_type": "yarn", "factor": 4.0}}),
        ("rope_parameters", {"full_attention": {"rope_type": "linear", "rope_theta": 1e6}}),
        (
            "rope_parameters",
            {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}},
        ),
    ],
)
def test_what_is_not_computed_or_not_of_these_weights_is_refused(tiny: Path, tmp_path: Path, field: str, value: object) -> None:
    with pytest.raises(ConfigError):
        memra_pp.launch(altered(tiny, tmp_path, **{field: value}), backend="local")


def test_a_soft_cap_bounds_the_logits(tiny: Path, tmp_path: Path) -> None:
    ids = [5, 6, 7]
    with (
        memra_pp.launch(tiny, backend="local") as plain,
        memra_pp.launch(altered(tiny, tmp_path, final_logit_softcapping=2.0), backend="local") as capped,
        plain.open(ids, max_new_tokens=0) as a,
        capped.open(ids, max_new_tokens=0) as b,
    ):
        np.testing.assert_allclose(b.prefill(), 2.0 * np.tanh(a.prefill() / 2.0), rtol=1e-5, atol=1e-6)
