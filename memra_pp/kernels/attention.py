"""Attention over the quantised rows of a K/V layer, for one row or a chunk of them.

A row's output bits depend on its query, its position and the stored rows alone: keys are visited in tiles that lie on
multiples of `TILE` of their *absolute* row, a row takes part only in the tiles it sees, and every sum has one order.
The number of rows in the call, the threads (they split heads and rows) and the ring's base do not enter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..cache.formats import BLOCK, BLOCK_BYTES
from ..errors import ConfigError, InputError
from .attention_numba import FORMAT_CODES, attend
from .threads import Threads

VECTORS = 64
"""Query vectors (rows x heads that share a K/V head) served by one reading of the stored rows."""
SHARE = 1 << 17
"""Products that are worth waking a thread for: some 50 microseconds of work."""


@dataclass(frozen=True)
class AttentionSpec:
    """What attention needs to know of a layer.

    `head_dim_k` and `head_dim_v` are elements a head, multiples of 32. `k_fmt` and `v_fmt` are names in `BLOCK_BYTES`.
    `window` is the number of positions a row sees, itself included (None: all). `scale` multiplies the scores.

    Raises:
        ConfigError: a dimension, format, window or scale that cannot be.
    """

    n_head_kv: int
    head_dim_k: int
    head_dim_v: int
    k_fmt: str
    v_fmt: str
    window: int | None
    scale: float

    def __post_init__(self) -> None:
        if self.n_head_kv < 1:
            raise ConfigError(f"AttentionSpec(n_head_kv={self.n_head_kv}): must be at least 1")
        for name, dim in (("head_dim_k", self.head_dim_k), ("head_dim_v", self.head_dim_v)):
            if dim < BLOCK or dim % BLOCK:
                raise ConfigError(f"AttentionSpec({name}={dim}): must be a positive multiple of {BLOCK}")
        for name, fmt in (("k_fmt", self.k_fmt), ("v_fmt", self.v_fmt)):
            if fmt not in BLOCK_BYTES:
                raise ConfigError(f"AttentionSpec({name}={fmt!r}): use one of {', '.join(BLOCK_BYTES)}")
        if self.window is not None and self.window < 1:
            raise ConfigError(f"AttentionSpec(window={self.window}): must be at least 1, or None to see every position")
        if not math.isfinite(self.scale):
            raise ConfigError(f"AttentionSpec(scale={self.scale}): must be finite")

    @property
    def k_token_bytes(self) -> int:
        """Bytes of K a token."""
        return self.n_head_kv * self.head_dim_k // BLOCK * BLOCK_BYTES[self.k_fmt]

    @property
    def v_token_bytes(self) -> int:
        """Bytes of V a token."""
        return self.n_head_kv * self.head_dim_v // BLOCK * BLOCK_BYTES[self.v_fmt]

    def first_key(self, pos: int) -> int:
        """The first absolute row that position `pos` sees."""
        return 0 if self.window is None else max(0, pos - self.window + 1)


def attention(
    q: NDArray[np.float32],
    k_plane: NDArray[np.uint8],
    v_plane: NDArray[np.uint8],
    spec: AttentionSpec,
    pos: int,
    base: int,
    threads: Threads,
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Softmax attention of query rows at positions `pos, pos + 1, ...`: f32 `[rows, n_head * head_dim_v]`.

    Args:
        q: f32 `[rows, n_head, head_dim_k]`, rotated, C-contiguous. Head `h` reads K/V head `h // (n_head / n_head_kv)`.
        k_plane, v_plane: u8, 1-D; absolute row `a` starts at byte `(a - base) * token_bytes`. The rows of these very
            positions are already stored.
        spec: the layer's shape and formats.
        pos: the absolute position of `q`'s first row.
        base: the absolute row at the start of the planes; 0 unless they are a ring.
        threads: the threads to use.
        out: where to write, if not to a new array.

    Raises:
        InputError: shapes, dtypes or positions disagree with the planes; `out` is untouched.
    """
    _check_queries(q, spec)
    rows, n_head, _ = q.shape
    _check_plane("k_plane", k_plane, spec.k_token_bytes, pos + rows - base)
    _check_plane("v_plane", v_plane, spec.v_token_bytes, pos + rows - base)
    if pos < 0 or base < 0 or base > spec.first_key(pos):
        raise InputError(
            f"position {pos} sees rows from {spec.first_key(pos)} on, the planes start at row {base};"
            " keep more rows or re-prime"
        )
    shape = (rows, n_head * spec.head_dim_v)
    if out is None:
        out = np.empty(shape, np.float32)
    elif out.dtype != np.float32 or out.shape != shape or not out.flags.c_contiguous:
        raise InputError(f"out is {out.dtype} {out.shape}; it must be C-contiguous float32 {shape}")
    if rows:
        block = max(1, min(VECTORS * spec.n_head_kv // n_head, -(-rows // threads.n)))
        units = -(-rows // block) * spec.n_head_kv
        keys = pos + rows - spec.first_key(pos)
        unit_work = keys * (spec.head_dim_k + spec.head_dim_v) * block * (n_head // spec.n_head_kv)
        grain = max(1, SHARE // unit_work)
        threads.run(
            attend,
            units,
            grain,
            q.reshape(-1),
            k_plane,
            v_plane,
            (FORMAT_CODES[spec.k_fmt], FORMAT_CODES[spec.v_fmt]),
            (spec.k_token_bytes, spec.v_token_bytes),
            (rows, n_head, spec.n_head_kv, spec.head_dim_k, spec.head_dim_v),
            spec.window or 0,
            np.float32(spec.scale),
            pos,
            base,
            block,
            out.reshape(-1),
        )
    return out


def _check_queries(q: NDArray[np.float32], spec: AttentionSpec) -> None:
    good = q.dtype == np.float32 and q.ndim == 3 and q.shape[2] == spec.head_dim_k and q.flags.c_contiguous
    if not good or q.shape[1] < 1 or q.shape[1] % spec.n_head_kv:
        raise InputError(
            f"q is {q.dtype} {q.shape} with strides {q.strides}; it must be C-contiguous float32 [rows, n_head,"
            f" {spec.head_dim_k}] with n_head a multiple of {spec.n_head_kv}"
        )


def _check_plane(name: str, plane: NDArray[np.uint8], token_bytes: int, rows: int) -> None:
    if plane.dtype != np.uint8 or plane.ndim != 1 or not plane.flags.c_contiguous:
        raise InputError(f"{name} is {plane.dtype} {plane.shape}; it must be a C-contiguous 1-D uint8 array")
    if plane.size < rows * token_bytes:
        raise InputError(f"{name} holds {plane.size // token_bytes} rows, row {rows - 1} is needed; store the rows first")
