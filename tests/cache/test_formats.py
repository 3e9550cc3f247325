"""The policy switches, each with its default, its values and what it changes in bytes a token."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
from toy import model

from memra_pp.cache import (
    KV_FP8_FORCE,
    KvPolicy,
    cache_bytes_per_token,
    cache_ring_bytes_per_token,
    gkv_on,
    kv_blk_bytes,
    kv_cache_formats,
    kv_fp8_on,
    swa_ring_on,
    wkv_on,
)
from memra_pp.config import KvPlan
from memra_pp.errors import ConfigError

BLOCK_OF = {"q8_0": 34, "q5_1": 24, "q4_0": 18, "fp8": 32}
DEFAULT, E4M3 = 34 + 24, 32 + 32
CLASSES = ["ordinary", "gemma4_global", "gemma4_window"]


@pytest.fixture
def door():
    yield KV_FP8_FORCE
    KV_FP8_FORCE.set(-1)


def token_bytes(policy: KvPolicy, kv_class: str = "ordinary") -> int:
    """Bytes of a token in a layer of one block of K and one of V."""
    return cache_bytes_per_token(model(KvPlan(1, 32, 32, kv_class)), policy=policy)


def by_class(env: dict[str, str]) -> list[int]:
    return [token_bytes(KvPolicy.from_env(env), kv_class) for kv_class in CLASSES]


@pytest.mark.parametrize("v", ["", "q5_1", "q4_0", "fp8"])
@pytest.mark.parametrize("k", ["", "q8_0", "fp8"])
def test_formats_and_their_block_bytes(k, v):
    env = {"MEMRA_KV_K": k, "MEMRA_KV_V": v}
    pair = k or "q8_0", v or "q5_1"
    assert kv_cache_formats(env) == pair
    assert kv_blk_bytes(env) == (BLOCK_OF[pair[0]], BLOCK_OF[pair[1]])
    assert token_bytes(KvPolicy.from_env(env)) == BLOCK_OF[pair[0]] + BLOCK_OF[pair[1]]


def test_unset_is_the_default():
    assert kv_cache_formats({}) == ("q8_0", "q5_1") and kv_blk_bytes({}) == (34, 24)
    assert KvPolicy.from_env({}) == KvPolicy()


@pytest.mark.parametrize(
    ("name", "value", "choices"),
    [
        ("MEMRA_KV_K", "q5_1", ["q8_0", "fp8"]),
        ("MEMRA_KV_K", "f32", ["q8_0", "fp8"]),
        ("MEMRA_KV_K", "Q8_0", ["q8_0", "fp8"]),
        ("MEMRA_KV_V", "q8_0", ["q5_1", "q4_0", "fp8"]),
        ("MEMRA_KV_V", "f32", ["q5_1", "q4_0", "fp8"]),
        ("MEMRA_KV_V", " q4_0", ["q5_1", "q4_0", "fp8"]),
    ],
)
def test_any_other_format_is_an_error_naming_variable_value_and_choices(name, value, choices):
    for read in (kv_cache_formats, kv_blk_bytes, KvPolicy.from_env):
        with pytest.raises(ConfigError) as error:
            read({name: value})
        assert all(word in str(error.value) for word in (name, value, *choices))


def test_a_pair_that_is_not_the_default_is_logged_once():
    program = (
        "import logging; logging.basicConfig(level=logging.INFO, format='%(message)s')\n"
        "from memra_pp.cache import KvPolicy, kv_blk_bytes\n"
        "for v in ('', 'q4_0', 'q4_0', 'q4_0'): KvPolicy.from_env({'MEMRA_KV_V': v}); kv_blk_bytes({'MEMRA_KV_V': v})\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    (line,) = run.stderr.splitlines()
    assert "q8_0" in line and "q4_0" in line


@pytest.mark.parametrize(("value", "on"), [(None, True), ("0", False), ("", True), ("1", True), ("off", True)])
def test_gemma4_global_layers_hold_e4m3_unless_gkv_is_0(value, on):
    env = {} if value is None else {"MEMRA_GEMMA_GKV": value}
    assert gkv_on(env) is on
    assert by_class(env) == [DEFAULT, E4M3 if on else DEFAULT, E4M3]


@pytest.mark.parametrize("draft", [None, "/draft.gguf"])
@pytest.mark.parametrize("value", [None, "0", "", "1", "off"])
def test_gemma4_windowed_layers_hold_e4m3_by_wkv_else_unless_there_is_a_draft(value, draft):
    env = {k: v for k, v in {"MEMRA_GEMMA_WKV": value, "MEMRA_DRAFT": draft}.items() if v is not None}
    on = draft is None if value is None else value != "0"
    assert wkv_on(env) is on
    assert by_class(env) == [DEFAULT, E4M3, E4M3 if on else DEFAULT]


@pytest.mark.parametrize("force", [-1, 0, 1])
@pytest.mark.parametrize("value", [None, "1", "0", "", "yes"])
def test_ordinary_layers_hold_e4m3_by_the_variable_else_by_the_door(door, value, force):
    env = {} if value is None else {"MEMRA_KV_FP8": value}
    on = force == 1 if value is None else value == "1"
    assert kv_fp8_on(env, force) is on
    assert token_bytes(KvPolicy.from_env(env, fp8_force=force)) == (E4M3 if on else DEFAULT)
    door.set(force)
    assert kv_fp8_on(env) is on
    assert token_bytes(KvPolicy.from_env(env)) == (E4M3 if on else DEFAULT)
    assert by_class(env)[1:] == [E4M3, E4M3]


def test_fp8_force_when_given_is_read_in_place_of_the_door(door):
    door.set(1)
    assert not KvPolicy.from_env({}, fp8_force=0).fp8_ordinary
    assert not KvPolicy.from_env({}, fp8_force=-1).fp8_ordinary


def test_the_door_does_not_move_a_policy_that_is_resolved(door):
    policy = KvPolicy.from_env({})
    door.set(1)
    assert token_bytes(policy) == token_bytes(KvPolicy()) == DEFAULT


def test_the_door_takes_no_other_value(door):
    with pytest.raises(ConfigError, match=r"2.*-1"):
        door.set(2)
    assert int(door) == -1


@pytest.mark.parametrize(("value", "rings"), [(None, []), ("", []), ("0", []), ("1", ["step"]), ("all", ["step", "reader"])])
def test_ring_switch(value, rings):
    env = {} if value is None else {"MEMRA_SWA_RING": value}
    assert swa_ring_on(env) is bool(rings)
    policy = KvPolicy.from_env(env)
    for use in ("never", "step", "reader"):
        ringed = cache_ring_bytes_per_token(model(KvPlan(1, 32, 32, window=64, ring=use)), policy=policy)
        assert ringed == (DEFAULT if use in rings else 0)
        assert cache_ring_bytes_per_token(model(KvPlan(1, 32, 32, ring=use)), policy=policy) == 0, "no window, no ring"


def test_f32_is_128_bytes_a_block_in_every_class():
    policy = KvPolicy(k="f32", v="f32")
    assert [token_bytes(policy, kv_class) for kv_class in CLASSES] == [256] * 3


def test_a_policy_is_frozen_and_of_known_formats():
    with pytest.raises(FrozenInstanceError):
        KvPolicy().k = "fp8"
    with pytest.raises(ConfigError, match=r"q6_K.*q8_0"):
        KvPolicy(k="q6_K")
    with pytest.raises(ConfigError, match=r"sometimes.*step"):
        KvPolicy(ring="sometimes")


def test_the_default_environment_is_the_process_s(monkeypatch):
    for name in ("MEMRA_KV_K", "MEMRA_KV_V", "MEMRA_SWA_RING", "MEMRA_GEMMA_GKV", "MEMRA_GEMMA_WKV"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MEMRA_KV_FP8", "1")
    monkeypatch.setenv("MEMRA_DRAFT", "/draft.gguf")
    assert KvPolicy.from_env() == KvPolicy(fp8_ordinary=True, fp8_gemma4_window=False)
    assert (kv_fp8_on(), wkv_on(), gkv_on(), swa_ring_on(), kv_cache_formats()) == (True, False, True, False, ("q8_0", "q5_1"))
