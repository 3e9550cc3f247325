"""`Backend`: the array operations of a forward on one device. The reference forwards are written over it alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .batches import KvBatch, StateBatch
from .shapes import AttentionSpec, DeltaShape

Rows: TypeAlias = Any
"""An array on the backend's device, C-contiguous and f32 unless said otherwise: NumPy's on a CPU, CuPy's on a GPU."""
Matrix: TypeAlias = Any
"""A matrix as the backend keeps it for `matmul`: `n_out` outputs of `n_in` inputs."""
Rope: TypeAlias = tuple[Rows, Rows]
"""Cosines and sines, `[rows, d / 2]` each."""


class Backend(ABC):
    """Each operation is exact: a row's bits depend on that row, its position and its session's cache alone.

    Shapes are those of the functions of the same names in `ops`, `heads`, `attention`, `append` and `delta`, which say what is
    raised for others.
    """

    @abstractmethod
    def begin(self) -> None:
        """Begins a forward: what one that was cut short has left is forgotten."""

    @abstractmethod
    def settle(self) -> None:
        """Ends a forward: waits until all of it is done.

        Raises:
            CacheError: rows were appended that hold what their format cannot keep, and that was not raised before.
        """

    @abstractmethod
    def upload(self, array: NDArray[Any]) -> Rows:
        """A copy of a host array, of its dtype."""

    @abstractmethod
    def download(self, rows: Rows) -> NDArray[Any]:
        """The rows on the host."""

    @abstractmethod
    def take(self, x: Rows, rows: NDArray[np.int64]) -> Rows:
        """A copy of some rows of `x [rows, width]`."""

    @abstractmethod
    def pack(self, n_out: int, n_in: int, parts: Iterable[NDArray[Any]]) -> Matrix:
        """A matrix `[n_out, n_in]` of parts of one dtype, one below another, each `[rows, n_in]` of f32, or of bf16 as its bits
        in u16, or `[rows, n_in / 32]` of q8_0 blocks (`panels.Q8_0`). Products have the bits of those with its f32 values.

        Raises:
            InputError: the parts are not such, or not `n_out` rows.
        """

    @abstractmethod
    def matmul(self, x: Rows, weights: Matrix) -> Rows:
        """`x @ w.T`: `[rows, n_out]`."""

    @abstractmethod
    def rms_norm(self, x: Rows, weight: Rows, eps: float) -> Rows:
        """`x / sqrt(mean(x^2) + eps) * weight` of each row of `x [rows, width]`."""

    @abstractmethod
    def add_rms_norm(self, acc: Rows, x: Rows, weight: Rows, eps: float) -> None:
        """`acc += rms_norm(x, weight, eps)`."""

    @abstractmethod
    def add_into(self, acc: Rows, x: Rows) -> None:
        """`acc += x`."""

    @abstractmethod
    def gelu_tanh_mul(self, gate: Rows, up: Rows) -> None:
        """`gate = gelu_tanh(gate) * up`."""

    @abstractmethod
    def silu_mul(self, gate: Rows, up: Rows) -> None:
        """`gate = silu(gate) * up`."""

    @abstractmethod
    def sigmoid_mul(self, x: Rows, gate: Rows) -> None:
        """`x *= sigmoid(gate)`."""

    @abstractmethod
    def soft_cap(self, x: Rows, cap: float) -> None:
        """`x = tanh(x / cap) * cap`."""

    @abstractmethod
    def rope_tables(self, positions: NDArray[np.int64], inv_freq: NDArray[np.float32]) -> Rope:
        """Of host positions and frequencies."""

    @abstractmethod
    def split_heads(
        self, qkv: Rows, spec: AttentionSpec, q_norm: Rows, k_norm: Rows, eps: float, rope: Rope
    ) -> tuple[Rows, Rows, Rows]:
        """q `[rows, n_head, head_dim_k]`, k and v `[rows, their width]`: normalised and rotated."""

    @abstractmethod
    def append_rows(self, batch: KvBatch, k: Rows, v: Rows, retain_from: Sequence[int]) -> None:
        """Quantises the rows of every session of a batch into its planes."""

    @abstractmethod
    def attend_rows(self, q: Rows, batch: KvBatch, spec: AttentionSpec) -> Rows:
        """Attention of every session of a batch to its own rows: `[rows, n_head * head_dim_v]`."""

    @abstractmethod
    def delta_gates(self, ba: Rows, rate: Rows, dt_bias: Rows) -> tuple[Rows, Rows]:
        """beta and decay, `[rows, n_v]` each; `rate` is f64."""

    @abstractmethod
    def conv_silu(self, x: Rows, weight: Rows, states: StateBatch) -> Rows:
        """Silu of the short convolution, and the state moved on."""

    @abstractmethod
    def delta_scan(self, qkv: Rows, beta: Rows, decay: Rows, shape: DeltaShape, states: StateBatch) -> Rows:
        """The gated delta rule, and the state moved on: `[rows, n_v * d_v]`."""
