"""Fences: even cuts, listed cuts, the environment, and shared K/V that no cut may part."""

import itertools
import pathlib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_pp.config import (
    KvPlan,
    ModelConfig,
    SharedKvPlan,
    check_fence,
    even_fence,
    fence_from_cuts,
    fence_from_env,
    stage_layers,
)
from memra_pp.errors import ConfigError

CONFIGS = pathlib.Path(__file__).parents[1] / "data" / "configs"
E4B = ModelConfig.from_hf(CONFIGS / "gemma4-e4b.json")
STEP = ModelConfig.from_hf(CONFIGS / "step3p5-flash.json")


def model(sources: list[int | None], n_mtp: int = 0) -> ModelConfig:
    """A model whose layer `i` reads K/V of layer `sources[i]`, or owns it (None)."""
    kv = KvPlan(1, 32, 32)
    layers = [kv if s is None else SharedKvPlan(s) for s in sources] + [kv] * n_mtp
    return ModelConfig("test", len(sources), 64, 100, 1000, tuple(layers))


@st.composite
def models(draw):
    sources: list[int | None] = [None]
    for _ in range(draw(st.integers(0, 8))):
        owners = [i for i, s in enumerate(sources) if s is None]
        sources.append(draw(st.none() | st.sampled_from(owners)))
    return model(sources, draw(st.integers(0, 2)))


def parts(cfg, fence) -> bool:
    stage = [s for s, (a, b) in enumerate(itertools.pairwise(fence)) for _ in range(a, b)]
    return any(isinstance(p, SharedKvPlan) and stage[p.source] != stage[i] for i, p in enumerate(cfg.layers))


@given(models(), st.integers(1, 9))
def test_stages_partition_the_layers(cfg, stages):
    try:
        fence = even_fence(cfg, stages)
    except ConfigError:
        assert stages > cfg.n_trunk or parts(cfg, [s * cfg.n_trunk // stages for s in range(stages + 1)])
        return
    assert fence == tuple(s * cfg.n_trunk // stages for s in range(stages + 1))
    ranges = [stage_layers(cfg, fence, s) for s in range(stages)]
    assert [il for r in ranges for il in r] == list(range(cfg.n_layer))
    assert all(len(r) for r in ranges) and not parts(cfg, fence)


@settings(max_examples=300)
@given(models(), st.sets(st.integers(1, 8), max_size=4))
def test_the_nearest_valid_fence_is_named(cfg, cuts):
    cuts = sorted(c for c in cuts if c < cfg.n_trunk)
    valid = [c for c in itertools.combinations(range(1, cfg.n_trunk), len(cuts)) if not parts(cfg, [0, *c, cfg.n_trunk])]
    if tuple(cuts) in valid:
        assert fence_from_cuts(cfg, cuts) == (0, *cuts, cfg.n_trunk)
        return
    with pytest.raises(ConfigError) as e:
        fence_from_cuts(cfg, cuts)
    found = re.search(r"nearest valid fence is (\[[\d, ]+\])", str(e.value))
    if not valid:
        most = max(
            n
            for n in range(1, cfg.n_trunk + 1)
            for c in itertools.combinations(range(1, cfg.n_trunk), n - 1)
            if not parts(cfg, [0, *c, cfg.n_trunk])
        )
        assert found is None and f"at most {most} stages" in str(e.value)
        return
    nearest = [int(c) for c in found[1].strip("[]").split(",")]
    assert check_fence(cfg, nearest) == tuple(nearest)
    moved = sum(abs(a - b) for a, b in zip(nearest[1:-1], cuts, strict=True))
    assert moved == min(sum(abs(a - b) for a, b in zip(c, cuts, strict=True)) for c in valid)


def test_a_parting_cut_names_both_layers():
    with pytest.raises(ConfigError, match=r"cut 30 parts layer 30 from layer 22.*\[0, 22, 42\]"):
        fence_from_cuts(E4B, [30])
    with pytest.raises(ConfigError, match=r"cut 28 parts.*\[0, 14, 22, 42\]"):
        even_fence(E4B, 3)


def test_mtp_blocks_run_on_the_last_stage():
    assert stage_layers(STEP, even_fence(STEP, 2), 1) == range(22, 48)


@pytest.mark.parametrize("stages", [0, -1, 46, 2.0, True, "2", None])
def test_bad_stages(stages):
    with pytest.raises(ConfigError, match="choose from 1 to 45"):
        even_fence(STEP, stages)


@pytest.mark.parametrize("cuts", [[0], [45], [46], [-1], [20, 10], [10, 10], [1.0], [True], ["5"], "5", 5, None])
def test_bad_cuts(cuts):
    with pytest.raises(ConfigError, match="cut"):
        fence_from_cuts(STEP, cuts)


@pytest.mark.parametrize("fence", [[], [0], [1, 45], [0, 44], [0, 10, 48]])
def test_bad_fences(fence):
    with pytest.raises(ConfigError, match="fence"):
        check_fence(STEP, fence)


@pytest.mark.parametrize("s", [-1, 2, True, 0.0])
def test_no_such_stage(s):
    with pytest.raises(ConfigError, match="stages 0 to 1"):
        stage_layers(STEP, (0, 20, 45), s)


@pytest.mark.parametrize(
    "env,fence",
    [
        ({}, None),
        ({"MEMRA_PP_STAGES": "", "MEMRA_PP_SPLIT": " "}, None),
        ({"MEMRA_PP_STAGES": "3"}, (0, 15, 30, 45)),
        ({"MEMRA_PP_SPLITS": "10, 20"}, (0, 10, 20, 45)),
        ({"MEMRA_PP_SPLIT": "7"}, (0, 7, 45)),
        ({"MEMRA_PP_SPLIT": "7", "MEMRA_PP_STAGES": "2"}, (0, 7, 45)),
    ],
)
def test_environment(env, fence):
    assert fence_from_env(STEP, env) == fence


@pytest.mark.parametrize(
    "env,message",
    [
        ({"MEMRA_PP_STAGES": "two"}, "MEMRA_PP_STAGES='two'"),
        ({"MEMRA_PP_STAGES": "²"}, "MEMRA_PP_STAGES"),
        ({"MEMRA_PP_STAGES": "-1"}, "MEMRA_PP_STAGES='-1'"),
        ({"MEMRA_PP_SPLITS": "1,,2"}, "MEMRA_PP_SPLITS=''"),
        ({"MEMRA_PP_SPLIT": "1,2"}, "MEMRA_PP_SPLIT='1,2'"),
        ({"MEMRA_PP_SPLIT": "9" * 5000}, "MEMRA_PP_SPLIT"),
        ({"MEMRA_PP_SPLIT": "1", "MEMRA_PP_SPLITS": "1"}, "both set"),
        ({"MEMRA_PP_STAGES": "3", "MEMRA_PP_SPLITS": "1"}, "makes 2 stages"),
        ({"MEMRA_PP_SPLITS": "20,10"}, "rise strictly"),
    ],
)
def test_bad_environment(env, message):
    with pytest.raises(ConfigError, match=message):
        fence_from_env(STEP, env)
