"""`CudaBackend`: the operations of a forward as launches of the kernels in `src`, all on one stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ...cache.formats import BLOCK
from ...errors import InputError
from ..addresses import address_of
from ..backend import Backend, Rope
from ..batches import KvBatch, StateBatch
from ..places import cannot_keep, check_rows, commit_bases, place_of
from ..shapes import AttentionSpec, DeltaShape
from . import attention
from .gpu import DeviceArray, Gpu
from .matrix import DeviceMatrix, launch_matmul, pack

Rows: TypeAlias = DeviceArray
F32, I32, I64 = np.float32, np.int32, np.int64

THREADS, WARPS = 256, 8
"""Of a block, where nothing else is said."""
REBASE_BLOCKS = 16
"""Blocks that share the moving of one plane's rows."""
CHANNELS, CHAIN = 32, 16
"""Channels of a convolution's block, and keys of a scan's thread."""
MOST_KEYS = 512
"""Width of a key that `delta_scan` takes: a thread a chain, 1,024 threads."""
MOST_WIDTH = 12287
"""Of a row that is normalised: it waits in 48 KB of shared memory."""
MAX_APPENDS = 4096
"""Appends between two downloads: more layers than any model has."""
NOTHING_REFUSED = 2**64 - 1


class CudaBackend(Backend):
    """Bit for bit what `CpuBackend` computes, but for attention, which adds up in another order.

    A value that a format cannot keep is found on the device: nothing of its layer is written then, and the next `download`
    or `settle` raises `CacheError`.
    """

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._appends: list[KvBatch] = []
        self._forget()

    def begin(self) -> None:
        if self._appends:
            self._forget()

    def settle(self) -> None:
        if self._appends:
            self._require_kept()
        else:
            self.gpu.wait()

    def upload(self, array: NDArray[Any]) -> Rows:
        return self.gpu.upload(array)

    def download(self, rows: Rows) -> NDArray[Any]:
        """The rows on the host.

        Raises:
            CacheError: rows appended since the last download hold what their format cannot keep.
        """
        out = self.gpu.download(rows)
        self._require_kept()
        return out

    def take(self, x: Rows, rows: NDArray[np.int64]) -> Rows:
        count, width = len(rows), x.shape[1]
        out = self._empty(count, width)
        if count:
            args = [x, self.upload(rows), out, I64(count), I32(width)]
            self.gpu.launch("gather_rows", _blocks(count * width), (THREADS,), args)
        return out

    def pack(self, n_out: int, n_in: int, parts: Iterable[NDArray[Any]]) -> DeviceMatrix:
        return pack(self.gpu, n_out, n_in, parts)

    def matmul(self, x: Rows, weights: DeviceMatrix) -> Rows:
        out = self._empty(len(x), weights.n_out)
        if len(x):
            launch_matmul(self.gpu, x, weights, out)
        return out

    def rms_norm(self, x: Rows, weight: Rows, eps: float) -> Rows:
        out = self._empty(*x.shape)
        self._norm("rms_norm", x, weight, eps, out)
        return out

    def add_rms_norm(self, acc: Rows, x: Rows, weight: Rows, eps: float) -> None:
        self._norm("add_rms_norm", x, weight, eps, acc)

    def add_into(self, acc: Rows, x: Rows) -> None:
        self._each("add_into", acc, x)

    def gelu_tanh_mul(self, gate: Rows, up: Rows) -> None:
        self._each("gelu_tanh_mul", gate, up)

    def silu_mul(self, gate: Rows, up: Rows) -> None:
        self._each("silu_mul", gate, up)

    def sigmoid_mul(self, x: Rows, gate: Rows) -> None:
        self._each("sigmoid_mul", x, gate)

    def soft_cap(self, x: Rows, cap: float) -> None:
        self._each("soft_cap", x, F32(cap))

    def rope_tables(self, positions: NDArray[np.int64], inv_freq: NDArray[np.float32]) -> Rope:
        rows, pairs = len(positions), len(inv_freq)
        cosines, sines = self._empty(rows, pairs), self._empty(rows, pairs)
        args = [self.upload(positions), self.upload(inv_freq), cosines, sines, I64(rows), I32(pairs)]
        self.gpu.launch("rope_tables", _blocks(rows * pairs), (THREADS,), args)
        return cosines, sines

    def split_heads(
        self, qkv: Rows, spec: AttentionSpec, q_norm: Rows, k_norm: Rows, eps: float, rope: Rope
    ) -> tuple[Rows, Rows, Rows]:
        rows, width = qkv.shape
        k_width, v_width = spec.n_head_kv * spec.head_dim_k, spec.n_head_kv * spec.head_dim_v
        n_head = (width - k_width - v_width) // spec.head_dim_k
        q, k, v = self._empty(rows, n_head, spec.head_dim_k), self._empty(rows, k_width), self._empty(rows, v_width)
        cosines, sines = rope
        sizes = [I32(n) for n in (n_head, spec.n_head_kv, spec.head_dim_k, spec.head_dim_v, cosines.shape[1])]
        args = [qkv, q_norm, k_norm, F32(eps), cosines, sines, q, k, v, I64(rows), *sizes]
        self.gpu.launch("split_heads", (_ceil(rows * (n_head + 2 * spec.n_head_kv), WARPS),), (THREADS,), args)
        return q, k, v

    def append_rows(self, batch: KvBatch, k: Rows, v: Rows, retain_from: Sequence[int]) -> None:
        layers, spans, first = batch.layers, batch.spans, batch.layers[0]
        check_rows("K", k, spans.total, first.kv_dim_k, first.index)
        check_rows("V", v, spans.total, first.kv_dim_v, first.index)
        places = [place_of(*each) for each in zip(layers, spans.pos, spans.rows, retain_from, strict=True)]
        grown = [(layer, end) for layer, end in zip(layers, spans.ends, strict=True) if end > layer.len]
        lengths = np.array([(address_of("len_d", layer.len_d, I32), end) for layer, end in grown], I64)
        planes, at, set_to = self.gpu.upload_tables(batch.planes, np.array(places, I64), lengths)
        refused, count, rows = self._watch(batch), I32(len(layers)), I64(spans.total)
        table, widths = self._table(batch), [I32(x.shape[1]) for x in (k, v)]
        blocks = [I32(x.shape[1] // BLOCK) for x in (k, v)]
        args = [k, v, planes, table, count, rows, *widths, refused]
        self.gpu.launch("check_rows", _blocks(k.size + v.size), (THREADS,), args)
        if any(place.keep and place.source for place in places):
            args = [planes, at, *blocks, refused]
            self.gpu.launch("rebase_rows", (REBASE_BLOCKS, len(layers), 2), (THREADS,), args)
        args = [k, v, planes, table, at, count, rows, *blocks, refused]
        self.gpu.launch("append_rows", (_ceil((k.size + v.size) // BLOCK, WARPS),), (THREADS,), args)
        commit_bases(layers, places)
        for layer, end in grown:
            layer.len = end
        if grown:
            self.gpu.launch("set_words", _blocks(len(grown)), (THREADS,), [set_to, I32(len(grown))])

    def attend_rows(self, q: Rows, batch: KvBatch, spec: AttentionSpec) -> Rows:
        out = self._empty(len(q), q.shape[1] * spec.head_dim_v)
        attention.launch(self.gpu, q, batch, spec, out)
        return out

    def delta_gates(self, ba: Rows, rate: Rows, dt_bias: Rows) -> tuple[Rows, Rows]:
        rows, heads = len(ba), len(dt_bias)
        beta, decay = self._empty(rows, heads), self._empty(rows, heads)
        args = [ba, rate, dt_bias, beta, decay, I64(rows), I32(heads)]
        self.gpu.launch("delta_gates", _blocks(rows * heads), (THREADS,), args)
        return beta, decay

    def conv_silu(self, x: Rows, weight: Rows, states: StateBatch) -> Rows:
        out, (taps, width) = self._empty(*x.shape), weight.shape
        side_by_side = max(1, min(32, max(states.spans.rows)))
        args = [x, I32(width), weight, I32(taps), *self._states(states), out]
        grid = (_ceil(width, CHANNELS), len(states.states))
        self.gpu.launch("conv_silu", grid, (CHANNELS, side_by_side), args, 4 * CHANNELS * (taps - 1))
        return out

    def delta_scan(self, qkv: Rows, beta: Rows, decay: Rows, shape: DeltaShape, states: StateBatch) -> Rows:
        n_k, n_v, d_k, d_v = shape
        if d_k > MOST_KEYS:
            raise InputError(f"keys of {d_k} elements: this kernel takes at most {MOST_KEYS}")
        rows, chains = len(qkv), _ceil(d_k, CHAIN)
        qk, out = self._empty(rows, 2 * n_k * d_k), self._empty(rows, shape.value_width)
        args = [qkv, qk, I64(rows), I32(shape.conv_width), I32(2 * n_k), I32(d_k)]
        self.gpu.launch("to_length", (_ceil(rows * 2 * n_k, WARPS),), (THREADS,), args)
        args = [qk, qkv, beta, decay, I32(n_k), I32(n_v), I32(d_k), I32(d_v), *self._states(states), out]
        self.gpu.launch("delta_scan", (_ceil(d_v, 32), n_v, len(states.states)), (32, chains), args, 512 * chains)
        for state, count in zip(states.states, states.spans.rows, strict=True):
            if count:
                state.swap()
        return out

    def _empty(self, *shape: int) -> Rows:
        return self.gpu.empty(shape, F32)

    def _norm(self, kernel: str, x: Rows, weight: Rows, eps: float, out: Rows) -> None:
        rows, width = x.shape
        if width > MOST_WIDTH:
            raise InputError(f"rows of {width} elements: this kernel takes at most {MOST_WIDTH}")
        block = (32, 8) if width <= THREADS else (THREADS, 1)
        if rows:
            args = [x, weight, F32(eps), out, I64(rows), I32(width)]
            self.gpu.launch(kernel, (_ceil(rows, block[1]),), block, args, 4 * block[1] * (width + 1))

    def _each(self, kernel: str, x: Rows, *args: Any) -> None:
        """An operation of `x`, element by element, in place."""
        if x.size:
            self.gpu.launch(kernel, _blocks(x.size), (THREADS,), [x, *args, I64(x.size)])

    def _table(self, batch: KvBatch | StateBatch) -> DeviceArray:
        """The spans' table, uploaded once a step."""
        spans = batch.spans
        if spans.on_device is None:
            spans.on_device = self.upload(spans.table)
        return spans.on_device

    def _states(self, states: StateBatch) -> list[Any]:
        """The arguments that tell a kernel of the sessions' states."""
        captures = states.captures if len(states.captures) else np.zeros((1, 4), I64)
        table, copies = self.gpu.upload_tables(states.table, captures)
        return [self._table(states), table, copies, I32(len(states.captures))]

    def _watch(self, batch: KvBatch) -> DeviceArray:
        """The word that an append's kernels leave the index of a refused value in."""
        at = len(self._appends)
        if at == MAX_APPENDS:
            self._require_kept()
            at = 0
        self._appends.append(batch)
        return self._refused[at : at + 1]

    def _require_kept(self) -> None:
        appends, self._appends = self._appends, []
        if not appends:
            return
        refused = self.gpu.download(self._refused[: len(appends)])
        if (refused != NOTHING_REFUSED).any():
            first = int(np.flatnonzero(refused != NOTHING_REFUSED)[0])
            self._forget()
            raise cannot_keep(appends[first], int(refused[first]), "a value")

    def _forget(self) -> None:
        """No append is on its way, and none was refused."""
        self._appends = []
        self._refused: DeviceArray = self.gpu.upload(np.full(MAX_APPENDS, NOTHING_REFUSED, np.uint64))


def _ceil(n: int, unit: int) -> int:
    return -(-n // unit)


def _blocks(count: int) -> tuple[int, ...]:
    """The grid of a thread an element."""
    return (_ceil(count, THREADS),)
