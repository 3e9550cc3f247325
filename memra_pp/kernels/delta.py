"""The gated delta net on the CPU: short convolution, gates, recurrent scan.

The scan is sequential over a session's rows, threads split sessions, channels and heads, and every sum has one order, so a
row's bits and the state after it do not depend on how rows are cut into calls, on the threads or on what else is in the batch.
A unit of work is done by the thread whose share holds the middle of it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ._arrays import F32Array, I64Array
from ._jit import kernel
from .batches import CAPTURE_CONV, CAPTURE_ROWS, CAPTURE_SESSION, CAPTURE_STATE, CONV, NEXT, STATE, StateBatch
from .ops import sigmoid
from .pointers import floats_at
from .shapes import DeltaShape
from .simd import LANES, fma, load, load_spread, splat, store, sum_lanes
from .spans import ROWS, START
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


def conv_silu(x: F32Array, weight: F32Array, states: StateBatch, threads: Threads) -> F32Array:
    """Silu of a causal convolution along each session's rows, channel by channel: f32 `[rows, width]`.

    Row `r` is `silu(weight[0] * x[r - taps + 1] + ... + weight[taps - 1] * x[r])`; rows before a session's first are in its
    `conv_state`, f32 `[width * (taps - 1)]`: each channel's last inputs, oldest first. It is moved on in place.

    Args:
        x: f32 `[rows, width]`, C-contiguous, the sessions' rows one after another as `states.spans` says.
        weight: f32 `[taps, width]`, the newest row's last.
        states: the sessions' states.
        threads: the threads to use.

    Raises:
        InputError: a shape, dtype or memory order is wrong; the states are untouched.
    """
    rows = states.spans.total
    _check("x", x, (rows, None))
    width = x.shape[1]
    _check("weight", weight, (None, width))
    taps = len(weight)
    for state in states.states:
        _check_size("conv_state", state.conv_state, width * (taps - 1))
    out = np.empty_like(x)
    threads.run(
        _conv_silu,
        rows * -(-width // CHANNELS),
        max(1, SHARE // (taps * CHANNELS)),
        x.reshape(-1),
        width,
        weight.reshape(-1),
        taps,
        states.spans.table,
        states.table,
        states.captures,
        out.reshape(-1),
    )
    return out


def delta_scan(
    qkv: F32Array, beta: F32Array, decay: F32Array, shape: DeltaShape, states: StateBatch, threads: Threads
) -> F32Array:
    """The gated delta rule over each session's rows, one after another: f32 `[rows, n_v * d_v]`.

    With `S` a v head's state, and q and k (of head `h // (n_v / n_k)`) brought to length 1, q divided by sqrt(d_k):
    `S = decay * S; S += outer(k, beta * (v - k @ S)); out = q @ S`. It reads a session's `ssm_state`, f32
    `[n_v * d_k * d_v]`, writes `ssm_state_alt` and swaps them.

    Args:
        qkv: f32 `[rows, n_k*d_k + n_k*d_k + n_v*d_v]`, C-contiguous: q, k and v of each row, the sessions' rows one after
            another as `states.spans` says.
        beta, decay: f32 `[rows, n_v]`, as of `delta_gates`.
        shape: the heads.
        states: the sessions' states.
        threads: the threads to use.

    Raises:
        InputError: a shape, dtype or memory order is wrong; the states are untouched.
    """
    n_k, n_v, d_k, d_v = shape
    if min(shape) < 1 or n_v % n_k:
        raise InputError(f"{shape}: every number must be at least 1 and n_v a multiple of n_k")
    rows = states.spans.total
    _check("qkv", qkv, (rows, shape.conv_width))
    _check("beta", beta, (rows, n_v))
    _check("decay", decay, (rows, n_v))
    for state in states.states:
        _check_size("ssm_state", state.ssm_state, shape.state_width)
        _check_size("ssm_state_alt", state.ssm_state_alt, shape.state_width)
    out = np.empty((rows, shape.value_width), np.float32)
    qk = np.empty(rows * 2 * n_k * d_k, np.float32)
    _to_length(qkv.reshape(-1), shape.conv_width, 2 * n_k, d_k, qk)
    threads.run(
        _scan,
        rows * n_v,
        max(1, SHARE // (2 * d_k * d_v)),
        qk,
        qkv.reshape(-1),
        beta.reshape(-1),
        decay.reshape(-1),
        (n_k, n_v, d_k, d_v),
        states.spans.table,
        states.table,
        states.captures,
        out.reshape(-1),
    )
    for state, count in zip(states.states, states.spans.rows, strict=True):
        if count:
            state.swap()
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


def _check_size(name: str, state: F32Array, size: int) -> None:
    if state.size != size:
        raise InputError(f"{name} has {state.size} elements; it must be of the model's shape, {size}")


@kernel
def _conv_silu(
    x: F32Array,
    width: int,
    weight: F32Array,
    taps: int,
    spans: I64Array,
    states: I64Array,
    captures: I64Array,
    out: F32Array,
    lo: int,
    hi: int,
) -> None:
    """Units with their middle in `[lo, hi)`: a session's rows in `CHANNELS` channels.

    `past` is the state there with a row a tap, so that lanes run over channels.
    """
    history = taps - 1
    past = np.empty(history * CHANNELS, np.float32)
    sums = np.empty(CHANNELS, np.float32)
    parts = (width + CHANNELS - 1) // CHANNELS
    for unit in range(len(spans) * parts):
        session, first = unit // parts, unit % parts * CHANNELS
        start, rows = spans[session, START], spans[session, ROWS]
        if not lo <= start * parts + unit % parts * rows + rows // 2 < hi:
            continue
        state = floats_at(states[session, CONV], width * history)
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
                    _tap(x, (start + source) * width + first, weight, tap * width + first, sums, channels, tap == 0)
            for channel in range(channels):
                value = np.float64(sums[channel])
                sums[channel] = np.float32(value * sigmoid(value))
            for channel in range(channels):
                out[(start + row) * width + first + channel] = sums[channel]
        _keep_last(past, x, start * width + first, width, rows, history, channels, state, first)
        for capture in captures:
            if capture[CAPTURE_SESSION] == session:
                copy = floats_at(capture[CAPTURE_CONV], width * history)
                _keep_last(past, x, start * width + first, width, capture[CAPTURE_ROWS], history, channels, copy, first)


@kernel
def _keep_last(
    past: F32Array, x: F32Array, at: int, width: int, rows: int, history: int, channels: int, state: F32Array, first: int
) -> None:
    """Writes the last `history` inputs after `rows` rows, of the channels from `first` on; the first row's are at `at`."""
    for age in range(history):
        source = rows + age - history
        for channel in range(channels):
            value = past[(rows + age) * CHANNELS + channel] if source < 0 else x[at + source * width + channel]
            state[(first + channel) * history + age] = value


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
    spans: I64Array,
    states: I64Array,
    captures: I64Array,
    out: F32Array,
    lo: int,
    hi: int,
) -> None:
    """Units with their middle in `[lo, hi)`: a session's rows in one v head.

    The first row reads the current state and writes the other, the rows after it work in the latter.
    """
    n_k, n_v, d_k, d_v = shape
    width, size = 2 * n_k * d_k + n_v * d_v, d_k * d_v
    change = np.empty(d_v, np.float32)
    for unit in range(len(spans) * n_v):
        session, head = unit // n_v, unit % n_v
        start, rows = spans[session, START], spans[session, ROWS]
        if not lo <= start * n_v + head * rows + rows // 2 < hi:
            continue
        at, key_head = head * size, head // (n_v // n_k)
        before, after = floats_at(states[session, STATE], n_v * size), floats_at(states[session, NEXT], n_v * size)
        for row in range(start, start + rows):
            q_at, v_at = (row * 2 * n_k + key_head) * d_k, row * width + 2 * n_k * d_k + head * d_v
            k_at, gate = q_at + n_k * d_k, row * n_v + head
            _recall(before, at, qk, k_at, d_k, change)
            for lane in range(d_v):
                change[lane] = fma(-decay[gate], change[lane], qkv[v_at + lane]) * beta[gate]
            _learn(before, after, at, decay[gate], qk, k_at, q_at, d_k, change, out, gate * d_v)
            before = after
            for capture in captures:
                if capture[CAPTURE_SESSION] == session and capture[CAPTURE_ROWS] == row + 1 - start:
                    copy = floats_at(capture[CAPTURE_STATE], n_v * size)
                    copy[at : at + size] = after[at : at + size]


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
