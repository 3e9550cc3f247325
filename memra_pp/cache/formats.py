"""`KvPolicy`: which block format each class of layer keeps its K and V in, and whether windows are held in rings.

Resolved once by the driver from the environment and passed on: stages and admission always get one. Where a caller of this
module gives none, the process's environment decides.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from ..config import KvPlan
from ..errors import ConfigError

log = logging.getLogger(__name__)

BLOCK = 32
"""Elements in a block of every format."""

BLOCK_BYTES: Mapping[str, int] = {"q8_0": 34, "q5_1": 24, "q4_0": 18, "fp8": 32, "f32": 128}
"""Bytes a block of 32 elements (ggml block_q8_0, block_q5_1, block_q4_0; e4m3fn; plain f32)."""

F16_MAX = 65504.0

LARGEST: Mapping[str, float] = {
    "q8_0": 127 * F16_MAX,
    "q5_1": F16_MAX,
    "q4_0": 8 * F16_MAX,
    "fp8": float("inf"),
    "f32": float("inf"),
}
"""The largest magnitude a format keeps: beyond it a block's f16 scale or minimum would be infinite (e4m3 saturates)."""

K_CHOICES = ("q8_0", "fp8")
V_CHOICES = ("q5_1", "q4_0", "fp8")

RingMode = Literal["off", "step", "all"]


class ModelDoor:
    """A per-model switch that a loader may set before the policy is resolved: -1 unset, 0 off, 1 on."""

    def __init__(self) -> None:
        self._value = -1

    def set(self, value: int) -> None:
        """Sets the switch.

        Raises:
            ConfigError: `value` is not -1, 0 or 1.
        """
        if value not in (-1, 0, 1):
            raise ConfigError(f"a model door of {value!r}: set -1 (unset), 0 (off) or 1 (on)")
        self._value = value

    def __int__(self) -> int:
        return self._value


KV_FP8_FORCE = ModelDoor()
"""The door to e4m3 K/V on ordinary layers. Read by `KvPolicy.from_env` only, when `fp8_force` is not given."""


@dataclass(frozen=True)
class KvPolicy:
    """Block formats by layer class, and the ring switch. Sent to every stage and used by admission as it is.

    `k`, `v` are names in `BLOCK_BYTES`. `fp8_*` open the e4m3 door (both K and V) for a class of layers: ordinary,
    Gemma-4 global, Gemma-4 windowed. `f32` in `k` or `v` is a debugging format and closes every door, so that all layers
    hold f32.
    """

    k: str = "q8_0"
    v: str = "q5_1"
    fp8_ordinary: bool = False
    fp8_gemma4_global: bool = True
    fp8_gemma4_window: bool = True
    ring: RingMode = "off"

    def __post_init__(self) -> None:
        for name, fmt in (("k", self.k), ("v", self.v)):
            if fmt not in BLOCK_BYTES:
                raise ConfigError(f"KvPolicy({name}={fmt!r}): not a K/V format; choose one of {', '.join(BLOCK_BYTES)}")
        if self.ring not in ("off", "step", "all"):
            raise ConfigError(f"KvPolicy(ring={self.ring!r}): choose off, step or all")

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, fp8_force: int | None = None) -> KvPolicy:
        """Resolves the policy from the `MEMRA_*` switches in `env` (default: the process's environment).

        Raises:
            ConfigError: an unknown format, naming the variable, the value and the choices.
        """
        env = os.environ if env is None else env
        k, v = kv_cache_formats(env)
        return cls(
            k=k,
            v=v,
            fp8_ordinary=kv_fp8_on(env, fp8_force),
            fp8_gemma4_global=gkv_on(env),
            fp8_gemma4_window=wkv_on(env),
            ring=_ring_mode(env),
        )

    def formats(self, plan: KvPlan) -> tuple[str, str]:
        """The `(k, v)` block formats of an attention layer."""
        if "f32" in (self.k, self.v):
            return self.k, self.v
        match plan.kv_class:
            case "ordinary":
                door = self.fp8_ordinary
            case "gemma4_global":
                door = self.fp8_gemma4_global
            case "gemma4_window":
                door = self.fp8_gemma4_window
        return ("fp8", "fp8") if door else (self.k, self.v)

    def ringed(self, plan: KvPlan) -> bool:
        """Whether the layer's rows are held in a ring."""
        if plan.window is None or self.ring == "off":
            return False
        return plan.ring == "step" or (plan.ring == "reader" and self.ring == "all")


def resolved(policy: KvPolicy | None) -> KvPolicy:
    """`policy`, or the process's for None."""
    return KvPolicy.from_env() if policy is None else policy


def kv_cache_formats(env: Mapping[str, str] | None = None) -> tuple[str, str]:
    """`(k, v)` from `MEMRA_KV_K` and `MEMRA_KV_V`; empty means the default, `q8_0` and `q5_1`.

    Raises:
        ConfigError: any other value, naming the variable, the value and the choices.
    """
    env = os.environ if env is None else env
    pair = _choice(env, "MEMRA_KV_K", K_CHOICES), _choice(env, "MEMRA_KV_V", V_CHOICES)
    if pair != (K_CHOICES[0], V_CHOICES[0]):
        _log_pair_once(*pair)
    return pair


def kv_blk_bytes(env: Mapping[str, str] | None = None) -> tuple[int, int]:
    """Bytes per 32 elements of K and of V under `kv_cache_formats`."""
    k, v = kv_cache_formats(env)
    return BLOCK_BYTES[k], BLOCK_BYTES[v]


def gkv_on(env: Mapping[str, str] | None = None) -> bool:
    """Whether Gemma-4 global layers hold e4m3: `MEMRA_GEMMA_GKV`, off only by `0`."""
    env = os.environ if env is None else env
    return env.get("MEMRA_GEMMA_GKV") != "0"


def wkv_on(env: Mapping[str, str] | None = None) -> bool:
    """Whether Gemma-4 windowed layers hold e4m3: `MEMRA_GEMMA_WKV`; unset, on unless `MEMRA_DRAFT` is set."""
    env = os.environ if env is None else env
    value = env.get("MEMRA_GEMMA_WKV")
    return "MEMRA_DRAFT" not in env if value is None else value != "0"


def kv_fp8_on(env: Mapping[str, str] | None = None, fp8_force: int | None = None) -> bool:
    """Whether ordinary layers hold e4m3: `MEMRA_KV_FP8` if set (`1` on, else off), else the door `fp8_force`
    (default: the module's `KV_FP8_FORCE`), else off."""
    env = os.environ if env is None else env
    value = env.get("MEMRA_KV_FP8")
    if value is not None:
        return value == "1"
    return int(KV_FP8_FORCE if fp8_force is None else fp8_force) == 1


def swa_ring_on(env: Mapping[str, str] | None = None) -> bool:
    """Whether layers with `ring="step"` are ringed: `MEMRA_SWA_RING` is `1` or `all`."""
    return _ring_mode(os.environ if env is None else env) != "off"


def _ring_mode(env: Mapping[str, str]) -> RingMode:
    modes: dict[str, RingMode] = {"1": "step", "all": "all", "0": "off", "": "off"}
    value = env.get("MEMRA_SWA_RING", "")
    if value not in modes:
        _warn_of_ring_once(value)
    return modes.get(value, "off")


@cache
def _warn_of_ring_once(value: str) -> None:
    log.warning("MEMRA_SWA_RING=%r leaves rings off: 1 or all turns them on", value[:40])


def _choice(env: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = env.get(name, "") or choices[0]
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not a K/V format; set it to one of {', '.join(choices)}, or unset it")
    return value


@cache
def _log_pair_once(k: str, v: str) -> None:
    log.info("K/V cache formats: K %s, V %s", k, v)
