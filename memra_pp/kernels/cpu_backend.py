"""`CpuBackend`: the operations of a forward over NumPy arrays and compiled kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import ops
from ._arrays import F32Array
from .append import append_rows
from .attention import attend_rows
from .backend import Backend
from .batches import KvBatch, StateBatch
from .delta import conv_silu, delta_gates, delta_scan
from .heads import split_heads
from .matmul import Matrix, matmul, pack
from .shapes import AttentionSpec, DeltaShape
from .threads import Threads


class CpuBackend(Backend):
    """Runs kernels on `threads`."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads

    def begin(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def upload(self, array: NDArray[Any]) -> NDArray[Any]:
        return np.array(array, order="C")

    def download(self, rows: NDArray[Any]) -> NDArray[Any]:
        return rows

    def take(self, x: F32Array, rows: NDArray[np.int64]) -> F32Array:
        return np.ascontiguousarray(x[rows])

    def pack(self, n_out: int, n_in: int, parts: Iterable[NDArray[Any]]) -> Matrix:
        return pack(n_out, n_in, parts, self._threads)

    def matmul(self, x: F32Array, weights: Matrix) -> F32Array:
        return matmul(x, weights, self._threads)

    def rms_norm(self, x: F32Array, weight: F32Array, eps: float) -> F32Array:
        return ops.rms_norm(x, weight, eps)

    def add_rms_norm(self, acc: F32Array, x: F32Array, weight: F32Array, eps: float) -> None:
        ops.add_into(acc, ops.rms_norm(x, weight, eps))

    def add_into(self, acc: F32Array, x: F32Array) -> None:
        ops.add_into(acc, x)

    def gelu_tanh_mul(self, gate: F32Array, up: F32Array) -> None:
        ops.gelu_tanh_mul(gate, up)

    def silu_mul(self, gate: F32Array, up: F32Array) -> None:
        ops.silu_mul(gate, up)

    def sigmoid_mul(self, x: F32Array, gate: F32Array) -> None:
        ops.sigmoid_mul(x, gate)

    def soft_cap(self, x: F32Array, cap: float) -> None:
        x /= np.float32(cap)
        np.tanh(x, out=x)
        x *= np.float32(cap)

    def rope_tables(self, positions: NDArray[np.int64], inv_freq: F32Array) -> tuple[F32Array, F32Array]:
        return ops.rope_tables(positions, inv_freq)

    def split_heads(
        self,
        qkv: F32Array,
        spec: AttentionSpec,
        q_norm: F32Array,
        k_norm: F32Array,
        eps: float,
        rope: tuple[F32Array, F32Array],
    ) -> tuple[F32Array, F32Array, F32Array]:
        return split_heads(qkv, spec, q_norm, k_norm, eps, rope)

    def append_rows(self, batch: KvBatch, k: F32Array, v: F32Array, retain_from: Sequence[int]) -> None:
        append_rows(batch, k, v, retain_from)

    def attend_rows(self, q: F32Array, batch: KvBatch, spec: AttentionSpec) -> F32Array:
        return attend_rows(q, batch, spec, self._threads)

    def delta_gates(self, ba: F32Array, rate: NDArray[np.float64], dt_bias: F32Array) -> tuple[F32Array, F32Array]:
        return delta_gates(ba, rate, dt_bias)

    def conv_silu(self, x: F32Array, weight: F32Array, states: StateBatch) -> F32Array:
        return conv_silu(x, weight, states, self._threads)

    def delta_scan(self, qkv: F32Array, beta: F32Array, decay: F32Array, shape: DeltaShape, states: StateBatch) -> F32Array:
        return delta_scan(qkv, beta, decay, shape, states, self._threads)
