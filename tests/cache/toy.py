"""Model shapes and small caches that the tests of this folder share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from memra_pp.cache import Cache, KvLayer, KvPolicy
from memra_pp.config import KvPlan, LayerPlan, ModelConfig, RecurrentPlan, SharedKvPlan
from memra_pp.kernels import append

DATA = Path(__file__).parents[1] / "data"
SHAPES = sorted(path.stem for path in (DATA / "configs").glob("*.json"))

F32 = KvPolicy(k="f32", v="f32", ring="all")
PACKED = KvPolicy(ring="all")

FLAT = KvPlan(1, 32, 32)
RINGED = KvPlan(1, 32, 64, window=32, ring="reader")
RECURRENT = RecurrentPlan(conv_width=6, conv_kernel=4, state_width=20)
SHARED = SharedKvPlan(2)


def shape(name: str) -> ModelConfig:
    """A published model shape."""
    return ModelConfig.from_hf(DATA / "configs" / f"{name}.json")


def model(*layers: LayerPlan, n_trunk: int | None = None) -> ModelConfig:
    """A model of just these layers."""
    trunk = len(layers) if n_trunk is None else n_trunk
    return ModelConfig("toy", n_trunk=trunk, n_embd=32, n_vocab=50, max_ctx=1 << 20, layers=layers)


def rows_of(serials: np.ndarray, width: int) -> np.ndarray:
    """One recognisable f32 row a serial number."""
    return np.outer(serials + 1, 1.0 - np.arange(width) / (2 * width)).astype(np.float32)


def write(layer: KvLayer, pos: int, serials: np.ndarray, retain_from: int) -> None:
    """Appends one row a serial number to a layer."""
    append(layer, pos, rows_of(serials, layer.kv_dim_k), rows_of(-serials, layer.kv_dim_v), retain_from)


def feed(cache: Cache, serials: np.ndarray) -> None:
    """One step of a forward: rows into every K/V layer, and a scan over every recurrent state, all depending on `serials`."""
    for layer in cache.kv:
        if layer is not None:
            write(layer, cache.pos, serials, cache.retain_from(layer))
    for state in cache.recur:
        if state is not None:
            for serial in serials:
                state.conv_state[:] = np.roll(state.conv_state, 1) + serial
                state.ssm_state_alt[:] = state.ssm_state * 0.5 + serial
                state.swap()
    cache.pos += len(serials)


def states(cache: Cache) -> list[list[float]]:
    """The current conv and SSM state of every recurrent layer."""
    return [state.tolist() for layer in cache.recur if layer is not None for state in (layer.conv_state, layer.ssm_state)]


def image(cache: Cache) -> list[object]:
    """Everything a cache holds, to the byte, and where it stands."""
    layers = [layer for layer in (*cache.kv, *cache.recur) if layer is not None]
    books = [(layer.len, int(layer.len_d[0]), layer.base) for layer in cache.kv if layer is not None]
    return [cache.pos, books, *(buffer.tobytes() for layer in layers for buffer in layer.buffers())]
