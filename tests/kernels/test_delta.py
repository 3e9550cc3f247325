"""The gated delta net's kernels: accurate, and a row's bits do not depend on chunks, threads or neighbours."""

from __future__ import annotations

import numpy as np
import pytest

from memra_pp.cache import RecurLayer
from memra_pp.config import RecurrentPlan
from memra_pp.errors import InputError
from memra_pp.kernels.addresses import state_row
from memra_pp.kernels.batches import NO_CAPTURES, StateBatch
from memra_pp.kernels.cpu import CpuDev
from memra_pp.kernels.delta import DeltaShape, conv_silu, delta_gates, delta_scan
from memra_pp.kernels.spans import Spans
from memra_pp.kernels.threads import Threads

SHAPES = [
    DeltaShape(1, 1, 1, 1),
    DeltaShape(2, 4, 32, 32),
    DeltaShape(2, 6, 24, 40),
    DeltaShape(3, 3, 17, 31),
    DeltaShape(1, 2, 128, 64),
    DeltaShape(2, 2, 64, 128),
]


@pytest.fixture(scope="module")
def one():
    return Threads(1)


@pytest.fixture(scope="module")
def two():
    with Threads(2) as threads:
        yield threads


@pytest.fixture(autouse=True)
def eager(monkeypatch):
    """Work is shared out however little there is."""
    monkeypatch.setattr("memra_pp.kernels.delta.SHARE", 1)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def uniform(*shape, seed=0):
    return np.random.default_rng(seed).random(shape, dtype=np.float32)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


NOTHING = np.empty(0, np.float32)


def alone(rows, conv=NOTHING, ssm=NOTHING, other=NOTHING):
    """The state of one session and its `rows` rows."""
    state = RecurLayer(CpuDev(1), RecurrentPlan(1, 1, 1), conv, ssm, other)
    return StateBatch([state], np.array([state_row(state)], np.int64), Spans((0,), (rows,)), NO_CAPTURES)


def convolved(x, weight, state, threads):
    return conv_silu(x, weight, alone(len(x), conv=state), threads)


def scanned(qkv, beta, decay, shape, state, next_state, threads):
    return delta_scan(qkv, beta, decay, shape, alone(len(qkv), ssm=state, other=next_state), threads)


def conv_reference(x, weight, state):
    taps = len(weight)
    past = state.reshape(x.shape[1], taps - 1).T
    joined = np.concatenate([past, x]).astype(np.float64)
    out = sum(joined[t : t + len(x)] * weight[t] for t in range(taps))
    return out * sigmoid(out), joined[len(x) :].T.astype(np.float32).reshape(-1)


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("width", [1, 40, 256, 531])
@pytest.mark.parametrize("rows", [1, 2, 3, 9])
def test_conv(width, taps, rows, one, two):
    x, weight, state = normal(rows, width), normal(taps, width, seed=1), normal(width * (taps - 1), seed=2)
    want, last = conv_reference(x, weight, state)
    moved, again, by_row = state.copy(), state.copy(), state.copy()
    out = convolved(x, weight, moved, one)
    np.testing.assert_allclose(out, want, rtol=2e-6, atol=2e-6)
    np.testing.assert_array_equal(moved, last)
    np.testing.assert_array_equal(convolved(x, weight, again, two), out)
    np.testing.assert_array_equal(again, last)
    np.testing.assert_array_equal(np.concatenate([convolved(x[r : r + 1], weight, by_row, one) for r in range(rows)]), out)
    np.testing.assert_array_equal(by_row, last)


def scan_reference(qkv, beta, decay, shape, state):
    n_k, n_v, d_k, d_v = shape
    q, k, v = np.split(qkv.astype(np.float64), [n_k * d_k, 2 * n_k * d_k], axis=1)
    q, k = (x.reshape(-1, n_k, d_k) for x in (q, k))
    q, k = (np.repeat(x / np.sqrt((x**2).sum(-1, keepdims=True) + 1e-6), n_v // n_k, axis=1) for x in (q, k))
    state, out = state.astype(np.float64).reshape(n_v, d_k, d_v), []
    for t in range(len(qkv)):
        state = state * decay[t, :, None, None]
        delta = (v[t].reshape(n_v, d_v) - np.einsum("hk,hkv->hv", k[t], state)) * beta[t, :, None]
        state = state + k[t][..., None] * delta[:, None]
        out.append(np.einsum("hk,hkv->hv", q[t] / np.sqrt(d_k), state).reshape(-1))
    return np.array(out), state.reshape(-1)


def scan_inputs(shape, rows):
    qkv, state = normal(rows, shape.conv_width), normal(shape.state_width, seed=1)
    return qkv, uniform(rows, shape.n_v, seed=2), uniform(rows, shape.n_v, seed=3), state


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 19])
def test_scan(shape, rows, one):
    qkv, beta, decay, state = scan_inputs(shape, rows)
    want, last = scan_reference(qkv, beta, decay, shape, state)
    before, after = state.copy(), np.full_like(state, np.nan)
    out = scanned(qkv, beta, decay, shape, before, after, one)
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-6 * np.abs(want).max())
    np.testing.assert_allclose(after, last, rtol=0, atol=1e-6 * np.abs(last).max())
    np.testing.assert_array_equal(before, state)


@pytest.mark.parametrize("shape", SHAPES)
def test_scan_bits_do_not_depend_on_pieces_threads_or_place(shape, one, two):
    qkv, beta, decay, state = scan_inputs(shape, 19)
    after = np.empty_like(state)
    want = scanned(qkv, beta, decay, shape, state, after, one)
    shared = np.empty_like(state)
    np.testing.assert_array_equal(scanned(qkv, beta, decay, shape, state, shared, two), want)
    np.testing.assert_array_equal(shared, after)
    in_place = state.copy()
    np.testing.assert_array_equal(scanned(qkv, beta, decay, shape, in_place, in_place, one), want)
    np.testing.assert_array_equal(in_place, after)
    current, other, out = state.copy(), np.empty_like(state), []
    for lo, hi in ((0, 1), (1, 3), (3, 18), (18, 19)):
        part = qkv[lo:hi], beta[lo:hi], decay[lo:hi]
        out.append(scanned(*part, shape, current, other, one))
        current, other = other, current
    np.testing.assert_array_equal(np.concatenate(out), want)
    np.testing.assert_array_equal(current, after)


def test_scan_of_a_silent_key_only_forgets(one):
    shape = DeltaShape(1, 1, 32, 32)
    qkv, state = np.zeros((1, shape.conv_width), np.float32), normal(shape.state_width)
    half = np.full((1, 1), 0.5, np.float32)
    after = np.empty_like(state)
    np.testing.assert_array_equal(scanned(qkv, half, half, shape, state, after, one), np.zeros((1, 32)))
    np.testing.assert_array_equal(after, state / 2)


def test_gates_round_once():
    ba = np.concatenate([normal(50, 14) * 20, normal(50, 14, seed=1) * 1e3, np.zeros((1, 14), np.float32)])
    rate, dt_bias = np.exp(normal(7, seed=2).astype(np.float64)), normal(7, seed=3)
    beta, decay = delta_gates(ba, rate, dt_bias)
    b, a = np.split(ba.astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(beta, sigmoid(b), rtol=7e-8, atol=1e-40)
    np.testing.assert_allclose(decay, np.exp(-rate * np.logaddexp(0, a + dt_bias)), rtol=7e-8, atol=1e-40)
    for row in range(0, 101, 7):
        for got, whole in zip(delta_gates(ba[row : row + 1], rate, dt_bias), (beta, decay), strict=True):
            np.testing.assert_array_equal(got[0], whole[row])


def f32(*shape):
    return np.zeros(shape, np.float32)


TINY = DeltaShape(1, 2, 4, 4)
GOOD = {
    "qkv": f32(3, 16), "beta": f32(3, 2), "decay": f32(3, 2), "shape": TINY, "state": f32(32), "next_state": f32(32),
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"qkv": f32(3, 17)},
        {"qkv": f32(3, 32)[:, ::2]},
        {"qkv": np.zeros((3, 16))},
        {"beta": f32(2, 2)},
        {"decay": f32(3, 1)},
        {"state": f32(31)},
        {"next_state": f32(33)},
        {"shape": DeltaShape(2, 3, 4, 4)},
        {"shape": DeltaShape(1, 0, 4, 4)},
    ],
)
def test_scan_refuses_what_does_not_fit(change, one):
    with pytest.raises(InputError, match="must be"):
        scanned(**GOOD | change, threads=one)


@pytest.mark.parametrize(
    "call",
    [
        lambda one: convolved(f32(2, 8), f32(4, 9), f32(24), one),
        lambda one: convolved(f32(2, 8), f32(4, 8), f32(23), one),
        lambda one: convolved(f32(16), f32(4, 8), f32(24), one),
        lambda one: convolved(np.zeros((2, 8)), f32(4, 8), f32(24), one),
        lambda one: delta_gates(f32(2, 8), np.zeros(4), f32(5)),
        lambda one: delta_gates(f32(2, 8), f32(4), f32(4)),
        lambda one: delta_gates(f32(2, 8), np.zeros(3), f32(4)),
    ],
)
def test_bad_arguments_are_refused(call, one):
    with pytest.raises(InputError, match="must be"):
        call(one)
