"""The gated delta net on the CPU: short convolution, gates, recurrent scan.

The scan is sequential over rows, threads split channels and heads, and every sum has one order, so a row's bits and the
state after it do not depend on how rows are cut into calls, on the threads or on what else is in the batch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ._arrays import F32Array
from ._jit import kernel
from .ops import sigmoid
from .simd import LANES, fma, load, load_spread, splat, store, sum_lanes
from .threads import Threads

CHANNELS = 256
"""Channels of the convolution that are a unit of work."""
WIDTH = 32
"""Lanes of a v head that are updated together: what the registers of AVX2 hold of it."""
CHAIN = 16
"""Products over a head's keys that are summed in one chain; chains are added first to last."""
SHARE = 1 << 17
"""State elements read or products summed that are worth waking a thread for: some 50 microseconds of work."""
NORM_EPS = np.float32(1e-6)
"""What the published models add to the sum of squares of q and of k before its root is taken."""


class DeltaShape(NamedTuple):
    """Heads of a gated delta net: `n_k` of q and k, `d_k` wide, and `n_v` (a multiple) of v, `d_v` wide."""

    n_k: int
    n_v: int
    d_k: int
    d_v: int

    @property
    def conv_width(self) -> int:
        """Channels of q, k and v together."""
        return 2 * self.n_k * self.d_k + self.value_width

    @property
    def value_width(self) -> int:
        """Channels of v."""
        return self.n_v * self.d_v

    @property
    def state_width(self) -> int:
        """Elements of the recurrent state."""
        return self.n_v * self.d_k * self.d_v


def conv_silu(x: F32Array, weight: F32Array, state: F32Array, threads: Threads) -> F32Array:
    """Silu of a causal convolution along the rows, channel by channel: f32 `[rows, width]`.

    Row `r` is `silu(weight[0] * x[r - taps + 1] + ... + weight[taps - 1] * x[r])`; rows before the first are in `state`.

    Args:
        x: f32 `[rows, width]`, C-contiguous.
        weight: f32 `[taps, width]`, the newest row's last.
        state: f32 `[width * (taps - 1)]`: each channel's last inputs, oldest first. Moved on in place.
        threads: the threads to use.

    Raises:
        InputError: a shape, dtype or memory order is wrong; `state` is untouched.
    """
    _check("x", x, (None, None))
    rows, width = x.shape
    _check("weight", weight, (None, width))
    taps = len(weight)
    _check("state", state, (width * (taps - 1),))
    out = np.empty_like(x)
    grain = max(1, SHARE // max(1, rows * taps * CHANNELS))
    threads.run(
        _conv_silu, -(-width // CHANNELS), grain, x.reshape(-1), width, weight.reshape(-1), taps, state, out.reshape(-1)
    )
    return out


def delta_scan(
    qkv: F32Array,
    beta: F32Array,
    decay: F32Array,
    shape: DeltaShape,
    state: F32Array,
    next_state: F32Array,
    threads: Threads,
    out: F32Array | None = None,
) -> F32Array:
    """The gated delta rule over rows, one after another: f32 `[rows, n_v * d_v]`, in `out` if given.

    With `S` a v head's state, and q and k (of head `h // (n_v / n_k)`) brought to length 1, q divided by sqrt(d_k):
    `S = decay * S; S += outer(k, beta * (v - k @ S)); out = q @ S`.

    Args:
        qkv: f32 `[rows, n_k*d_k + n_k*d_k + n_v*d_v]`, C-contiguous: q, k and v of each row.
        beta, decay: f32 `[rows, n_v]`, as of `delta_gates`.
        shape: the heads.
        state: f32 `[n_v * d_k * d_v]`, the state before the first row.
        next_state: the same size, gets the state after the last row; may be `state`.
        threads: the threads to use.

    Raises:
        InputError: a shape, dtype or memory order is wrong, or there is no row; `next_state` is untouched.
    """
    n_k, n_v, d_k, d_v = shape
    if min(shape) < 1 or n_v % n_k:
        raise InputError(f"{shape}: every number must be at least 1 and n_v a multiple of n_k")
    _check("qkv", qkv, (None, shape.conv_width))
    rows = len(qkv)
    if not rows:
        raise InputError("qkv has no rows: the state after it would not be written; pass at least one")
    _check("beta", beta, (rows, n_v))
    _check("decay", decay, (rows, n_v))
    _check("state", state, (shape.state_width,))
    _check("next_state", next_state, (shape.state_width,))
    if out is None:
        out = np.empty((rows, shape.value_width), np.float32)
    _check("out", out, (rows, shape.value_width))
    grain = max(1, SHARE // (rows * 2 * d_k * d_v))
    qk = np.empty(rows * 2 * n_k * d_k, np.float32)
    _to_length(qkv.reshape(-1), shape.conv_width, 2 * n_k, d_k, qk)
    flat = qk, qkv.reshape(-1), beta.reshape(-1), decay.reshape(-1)
    threads.run(_scan, n_v, grain, *flat, (n_k, n_v, d_k, d_v), state, next_state, out.reshape(-1))
    return out


def delta_gates(ba: F32Array, rate: NDArray[np.float64], dt_bias: F32Array) -> tuple[F32Array, F32Array]:
    """`beta = sigmoid(b)` and `decay = exp(-rate * softplus(a + dt_bias))`, f32 `[rows, n_v]` each.

    `ba` is f32 `[rows, 2 * n_v]`, b before a; `rate` f64 `[n_v]` is e to the power of the weights' `A_log`. Both are
    computed in f64 and rounded once.

    Raises:
        InputError: a shape, dtype or memory order is wrong.
    """
    _check("dt_bias", dt_bias, (None,))
    heads = len(dt_bias)
    _check("ba", ba, (None, 2 * heads))
    if rate.dtype != np.float64 or rate.shape != (heads,):
        raise InputError(f"rate is {rate.dtype} {rate.shape}; it must be float64 [{heads}]")
    beta, decay = (np.empty((len(ba), heads), np.float32) for _ in range(2))
    _gates(ba, rate, dt_bias, beta, decay)
    return beta, decay


def _check(name: str, array: NDArray[Any], shape: tuple[int | None, ...]) -> None:
    fits = array.ndim == len(shape) and all(want in (None, have) for want, have in zip(shape, array.shape, strict=False))
    if array.dtype != np.float32 or not fits or not array.flags.c_contiguous:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise InputError(
            f"{name} is {array.dtype} {array.shape} with strides {array.strides};"
            f" it must be a C-contiguous float32 array [{wanted}]"
        )


@kernel
def _conv_silu(x: F32Array, width: int, weight: F32Array, taps: int, state: F32Array, out: F32Array, lo: int, hi: int) -> None:
    """Units `[lo, hi)` of `CHANNELS` channels. `past` is their state with a row a tap, so that lanes run over channels."""
    rows, history = x.size // width, taps - 1
    past = np.empty(history * CHANNELS, np.float32)
    sums = np.empty(CHANNELS, np.float32)
    for first in range(lo * CHANNELS, min(hi * CHANNELS, width), CHANNELS):
        channels = min(CHANNELS, width - first)
        for age in range(history):
            for channel in range(channels):
                past[age * CHANNELS + channel] = state[(first + channel) * history + age]
        for row in range(rows):
            for tap in range(taps):
                source = row + tap - history
                if source < 0:
                    _tap(past, (row + tap) * CHANNELS, weight, tap * width + first, sums, channels, tap == 0)
                else:
                    _tap(x, source * width + first, weight, tap * width + first, sums, channels, tap == 0)
            for channel in range(channels):
                value = np.float64(sums[channel])
                sums[channel] = np.float32(value * sigmoid(value))
            for channel in range(channels):
                out[row * width + first + channel] = sums[channel]
        for age in range(history):
            source = rows + age - history
            for channel in range(channels):
                at = (first + channel) * history + age
                state[at] = past[(rows + age) * CHANNELS + channel] if source < 0 else x[source * width + first + channel]


@kernel
def _tap(x: F32Array, at: int, weight: F32Array, weight_at: int, sums: F32Array, channels: int, starts: bool) -> None:
    """Adds one tap's products to the sums, or starts them."""
    whole = channels // LANES * LANES
    for lane in range(0, whole, LANES):
        before = splat(np.float32(0), 16) if starts else load(sums, lane, 16)
        store(sums, lane, fma(load(weight, weight_at + lane, 16), load(x, at + lane, 16), before))
    for lane in range(whole, channels):
        sums[lane] = fma(weight[weight_at + lane], x[at + lane], np.float32(0) if starts else sums[lane])


@kernel
def _gates(ba: F32Array, rate: NDArray[np.float64], dt_bias: F32Array, beta: F32Array, decay: F32Array) -> None:
    heads = len(dt_bias)
    for row in range(len(ba)):
        for head in range(heads):
            step = np.float64(ba[row, heads + head]) + np.float64(dt_bias[head])
            softplus = max(step, 0.0) + math.log1p(math.exp(-abs(step)))
            beta[row, head] = np.float32(sigmoid(np.float64(ba[row, head])))
            decay[row, head] = np.float32(math.exp(-rate[head] * softplus))


@kernel
def _to_length(qkv: F32Array, width: int, heads: int, d_k: int, out: F32Array) -> None:
    """The first `heads` heads of each row, those of q before those of k, at their lengths."""
    whole = d_k // LANES * LANES
    for row in range(qkv.size // width):
        for head in range(heads):
            at, to = row * width + head * d_k, (row * heads + head) * d_k
            squares = splat(np.float32(0), 16)
            for lane in range(0, whole, LANES):
                values = load(qkv, at + lane, 16)
                squares = fma(values, values, squares)
            total = sum_lanes(squares)
            for lane in range(whole, d_k):
                total = fma(qkv[at + lane], qkv[at + lane], total)
            factor = np.float32(1) / np.sqrt(total + NORM_EPS)
            if head < heads // 2:
                factor *= np.float32(1 / math.sqrt(d_k))
            for lane in range(d_k):
                out[to + lane] = qkv[at + lane] * factor


@kernel
def _scan(
    qk: F32Array,
    qkv: F32Array,
    beta: F32Array,
    decay: F32Array,
    shape: tuple[int, int, int, int],
    state: F32Array,
    next_state: F32Array,
    out: F32Array,
    lo: int,
    hi: int,
) -> None:
    """Heads `[lo, hi)`. The first row reads `state` and writes `next_state`, the others work in the latter."""
    n_k, n_v, d_k, d_v = shape
    rows, width = beta.size // n_v, 2 * n_k * d_k + n_v * d_v
    change = np.empty(d_v, np.float32)
    for head in range(lo, hi):
        at, key_head, before = head * d_k * d_v, head // (n_v // n_k), state
        for row in range(rows):
            q_at, v_at = (row * 2 * n_k + key_head) * d_k, row * width + 2 * n_k * d_k + head * d_v
            k_at, gate = q_at + n_k * d_k, row * n_v + head
            _recall(before, at, qk, k_at, d_k, change)
            for lane in range(d_v):
                change[lane] = fma(-decay[gate], change[lane], qkv[v_at + lane]) * beta[gate]
            _learn(before, next_state, at, decay[gate], qk, k_at, q_at, d_k, change, out, gate * d_v)
            before = next_state


@kernel
def _recall(state: F32Array, at: int, qk: F32Array, k_at: int, d_k: int, out: F32Array) -> None:
    """`out = k @ S`."""
    d_v = out.size
    whole = d_v // WIDTH * WIDTH
    for first in range(0, d_k, CHAIN):
        last = min(first + CHAIN, d_k)
        for lane in range(0, whole, WIDTH):
            chain = splat(np.float32(0), WIDTH)
            for k in range(first, last):
                chain = fma(load_spread(qk, k_at + k, WIDTH), load(state, at + k * d_v + lane, WIDTH), chain)
            store(out, lane, chain if first == 0 else load(out, lane, WIDTH) + chain)
        for lane in range(whole, d_v):
            link = np.float32(0)
            for k in range(first, last):
                link = fma(qk[k_at + k], state[at + k * d_v + lane], link)
            out[lane] = link if first == 0 else out[lane] + link


@kernel
def _learn(
    state: F32Array,
    next_state: F32Array,
    at: int,
    decay: np.float32,
    qk: F32Array,
    k_at: int,
    q_at: int,
    d_k: int,
    change: F32Array,
    out: F32Array,
    out_at: int,
) -> None:
    """`S = decay * S + outer(k, change); out = q @ S`, from `state` to `next_state`."""
    d_v = change.size
    whole = d_v // WIDTH * WIDTH
    for first in range(0, d_k, CHAIN):
        last = min(first + CHAIN, d_k)
        for lane in range(0, whole, WIDTH):
            delta, chain = load(change, lane, WIDTH), splat(np.float32(0), WIDTH)
            for k in range(first, last):
                place = at + k * d_v + lane
                values = fma(load_spread(qk, k_at + k, WIDTH), delta, load(state, place, WIDTH) * decay)
                store(next_state, place, values)
                chain = fma(load_spread(qk, q_at + k, WIDTH), values, chain)
            store(out, out_at + lane, chain if first == 0 else load(out, out_at + lane, WIDTH) + chain)
        for lane in range(whole, d_v):
            link = np.float32(0)
            for k in range(first, last):
                place = at + k * d_v + lane
                value = fma(qk[k_at + k], change[lane], state[place] * decay)
                next_state[place] = value
                link = fma(qk[q_at + k], value, link)
            out[out_at + lane] = link if first == 0 else out[out_at + lane] + link
