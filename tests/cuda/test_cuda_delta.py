"""The gated delta net in CUDA, executed on the CPU: outputs, states and captured states have the bits of the CPU's kernels."""

from __future__ import annotations

import numpy as np
import pytest

from memra_pp.cache import RecurLayer
from memra_pp.cache.cache import StateCopy
from memra_pp.config import RecurrentPlan
from memra_pp.kernels import delta
from memra_pp.kernels.addresses import state_row
from memra_pp.kernels.batches import StateBatch, capture_table
from memra_pp.kernels.cpu import CpuDev
from memra_pp.kernels.delta import DeltaShape
from memra_pp.kernels.spans import Spans
from memra_pp.kernels.threads import Threads

SHAPES = [
    DeltaShape(1, 1, 1, 1),
    DeltaShape(2, 4, 32, 32),
    DeltaShape(2, 6, 24, 40),
    DeltaShape(3, 3, 17, 31),
    DeltaShape(1, 2, 128, 64),
]
ROWS = [3, 0, 1, 6]
"""Of the sessions of a batch."""
CAPTURES = [(0, 1), (0, 3), (3, 6), (3, 2), (3, 2)]
"""After so many rows of a session."""


@pytest.fixture(scope="module")
def threads():
    return Threads(1)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def uniform(*shape, seed=0):
    return np.random.default_rng(seed).random(shape, dtype=np.float32)


class Sessions:
    """Some sessions' states and the copies to take of them; two made of the same arguments are the same."""

    def __init__(self, conv_size, ssm_size, rows=ROWS, captures=CAPTURES):
        plan, device, spans = RecurrentPlan(1, 1, 1), CpuDev(1), Spans([5] * len(rows), rows)
        self.layers = [
            RecurLayer(device, plan, normal(conv_size, seed=i), normal(ssm_size, seed=10 + i), np.full(ssm_size, 7, np.float32))
            for i in range(len(rows))
        ]
        self.copies = [StateCopy(np.zeros(conv_size, np.float32), np.zeros(ssm_size, np.float32)) for _ in captures]
        table = np.array([state_row(layer) for layer in self.layers], np.int64)
        wanted = [(session, count, copy) for (session, count), copy in zip(captures, self.copies, strict=True)]
        self.batch = StateBatch(self.layers, table, spans, capture_table(wanted, self.layers, spans))

    def swap(self):
        for layer, rows in zip(self.layers, self.batch.spans.rows, strict=True):
            if rows:
                layer.swap()

    def arrays(self):
        """All that they hold, but for the states that are no longer current."""
        return [array for layer in self.layers for array in (layer.conv_state, layer.ssm_state)] + [
            array for copy in self.copies for array in (copy.conv, copy.ssm)
        ]


def assert_same_bits(found, wanted):
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def assert_same_sessions(found, wanted):
    for one, other in zip(found.arrays(), wanted.arrays(), strict=True):
        assert_same_bits(one, other)


def conv_silu(kernels, x, weight, sessions, order, rows_a_step=2):
    (taps, width), batch, out = weight.shape, sessions.batch, np.full_like(x, np.nan)
    grid, block, shared = (-(-width // 32), len(sessions.layers)), (32, rows_a_step), 4 * 32 * (taps - 1)
    tables = batch.spans.table, batch.table, batch.captures, np.int32(len(batch.captures))
    kernels.launch("conv_silu", grid, block, [x, np.int32(width), weight, np.int32(taps), *tables, out], shared, order)
    return out


def delta_scan(kernels, qkv, beta, decay, shape, sessions, order):
    n_k, n_v, d_k, d_v = shape
    rows, batch, heads, chains = len(qkv), sessions.batch, 2 * n_k, -(-d_k // 16)
    qk, out = np.full((rows, heads, d_k), np.nan, np.float32), np.full((rows, n_v * d_v), np.nan, np.float32)
    sizes = np.int64(rows), np.int32(shape.conv_width), np.int32(heads), np.int32(d_k)
    kernels.launch("to_length", -(-rows * heads // 8), 256, [qkv, qk, *sizes], order=order)
    tables = batch.spans.table, batch.table, batch.captures, np.int32(len(batch.captures))
    args = [qk, qkv, beta, decay, *map(np.int32, shape), *tables, out]
    kernels.launch("delta_scan", (-(-d_v // 32), n_v, len(sessions.layers)), (32, chains), args, 512 * chains, order)
    sessions.swap()
    return out


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("taps", [1, 2, 4, 9])
@pytest.mark.parametrize("width", [1, 70])
def test_conv(kernels, threads, order, width, taps):
    x, weight = normal(sum(ROWS), width, seed=8), normal(taps, width, seed=9)
    found, wanted = (Sessions(width * (taps - 1), 1) for _ in range(2))
    assert_same_bits(conv_silu(kernels, x, weight, found, order), delta.conv_silu(x, weight, wanted.batch, threads))
    if taps > 1:
        assert_same_sessions(found, wanted)


@pytest.mark.parametrize("rows_a_step", [1, 8])
def test_conv_rows_side_by_side(kernels, threads, rows_a_step):
    x, weight = normal(20, 64, seed=8), normal(4, 64, seed=9)
    found, wanted = (Sessions(64 * 3, 1, [20], [(0, 11)]) for _ in range(2))
    assert_same_bits(conv_silu(kernels, x, weight, found, 2, rows_a_step), delta.conv_silu(x, weight, wanted.batch, threads))
    assert_same_sessions(found, wanted)


@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_scan(kernels, threads, order, shape):
    rows = sum(ROWS)
    qkv, beta, decay = normal(rows, shape.conv_width), uniform(rows, shape.n_v, seed=1), uniform(rows, shape.n_v, seed=2)
    found, wanted = (Sessions(1, shape.state_width) for _ in range(2))
    out = delta_scan(kernels, qkv, beta, decay, shape, found, order)
    assert_same_bits(out, delta.delta_scan(qkv, beta, decay, shape, wanted.batch, threads))
    assert_same_sessions(found, wanted)
    assert (found.layers[1].ssm_state_alt == 7).all()


@pytest.mark.parametrize("scale", [0, 1e-25, 1e15])
def test_scan_of_extreme_values(kernels, threads, scale):
    shape = DeltaShape(1, 2, 20, 33)
    qkv, gates = normal(4, shape.conv_width) * np.float32(scale), np.resize(np.array([0, 1, 1e-38], np.float32), (4, 2))
    found, wanted = (Sessions(1, shape.state_width, [4], []) for _ in range(2))
    out = delta_scan(kernels, qkv, gates, gates[::-1].copy(), shape, found, 0)
    assert_same_bits(out, delta.delta_scan(qkv, gates, gates[::-1].copy(), shape, wanted.batch, threads))
    assert_same_sessions(found, wanted)


def test_scan_in_place(kernels, threads):
    """The state that is read and the one that is written may be the same."""
    shape = DeltaShape(1, 1, 40, 40)
    qkv, gates = normal(5, shape.conv_width), uniform(5, 1)
    found, wanted = (Sessions(1, shape.state_width, [5], []) for _ in range(2))
    found.batch.table[:, 2] = found.batch.table[:, 1]
    out = delta_scan(kernels, qkv, gates, gates, shape, found, 2)
    assert_same_bits(out, delta.delta_scan(qkv, gates, gates, shape, wanted.batch, threads))
    assert_same_bits(found.layers[0].ssm_state_alt, wanted.layers[0].ssm_state)


@pytest.mark.parametrize("order", [0, 1, 2])
def test_gates(kernels, order):
    heads = 45
    ba, dt_bias = normal(7, 2 * heads) * np.float32(8), normal(heads, seed=1)
    ba[0, :6] = ba[0, heads : heads + 6] = [0, -0.0, 1e-30, -800, 800, -1e30]
    rate = np.random.default_rng(2).random(heads) * 16
    beta, decay = (np.empty((7, heads), np.float32) for _ in range(2))
    kernels.launch(
        "delta_gates", -(-7 * heads // 256), 256, [ba, rate, dt_bias, beta, decay, np.int64(7), np.int32(heads)], order=order
    )
    wanted_beta, wanted_decay = delta.delta_gates(ba, rate, dt_bias)
    assert_same_bits(beta, wanted_beta)
    # The C library's f64 exponential is not CUDA's: either may be rounded to the f32 next to the other's.
    np.testing.assert_array_max_ulp(decay, wanted_decay, maxulp=1)
