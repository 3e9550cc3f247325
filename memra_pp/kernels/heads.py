"""`split_heads`: all that lies between the product that gives q, k and v and the attention over them, in one call."""

from __future__ import annotations

import numpy as np

from ..errors import InputError
from ._arrays import F32Array
from ._jit import kernel
from .ops import _rms_norm, _rope_neox
from .shapes import AttentionSpec


def split_heads(
    qkv: F32Array, spec: AttentionSpec, q_norm: F32Array, k_norm: F32Array, eps: float, rope: tuple[F32Array, F32Array]
) -> tuple[F32Array, F32Array, F32Array]:
    """q f32 `[rows, n_head, head_dim_k]`, k f32 `[rows, n_head_kv * head_dim_k]` and v f32 `[rows, n_head_kv * head_dim_v]`.

    Each head of q and of k is RMS-normalised (`ops.rms_norm`) and rotated (`ops.rope_neox`); v is as it comes.

    Args:
        qkv: f32 `[rows, (n_head + n_head_kv) * head_dim_k + n_head_kv * head_dim_v]`, C-contiguous.
        spec: the layer's shape.
        q_norm, k_norm: f32 `[head_dim_k]`.
        eps: what is added to the mean of squares.
        rope: `ops.rope_tables` of the rows' positions.

    Raises:
        InputError: a shape, dtype or memory order is wrong.
    """
    dim, k_width, v_width = spec.head_dim_k, spec.n_head_kv * spec.head_dim_k, spec.n_head_kv * spec.head_dim_v
    if qkv.ndim != 2 or qkv.dtype != np.float32 or not qkv.flags.c_contiguous:
        raise InputError(
            f"qkv is {qkv.dtype} {qkv.shape} with strides {qkv.strides}; it must be C-contiguous float32 [rows, width]"
        )
    rows, width = qkv.shape
    q_width = width - k_width - v_width
    if q_width < dim or q_width % dim:
        raise InputError(f"qkv is {width} wide; {spec} takes whole heads of q, then {k_width} of k and {v_width} of v")
    cos, sin = rope
    for name, array, shape in (
        ("q_norm", q_norm, (dim,)),
        ("k_norm", k_norm, (dim,)),
        ("cos", cos, (rows, min(cos.shape[-1], dim // 2))),
        ("sin", sin, cos.shape),
    ):
        if array.shape != shape or array.dtype != np.float32 or not array.flags.c_contiguous:
            raise InputError(f"{name} is {array.dtype} {array.shape}; it must be C-contiguous float32 {shape}")
    q = np.empty((rows, q_width // dim, dim), np.float32)
    k = np.empty((rows, spec.n_head_kv, dim), np.float32)
    v = np.empty((rows, v_width), np.float32)
    _split(qkv, q_norm, k_norm, np.float32(eps), cos, sin, q, k, v)
    return q, k.reshape(rows, k_width), v


@kernel
def _split(
    qkv: F32Array,
    q_norm: F32Array,
    k_norm: F32Array,
    eps: np.float32,
    cos: F32Array,
    sin: F32Array,
    q: F32Array,
    k: F32Array,
    v: F32Array,
) -> None:
    flat_q, flat_k, flat_v = q.reshape(-1), k.reshape(-1), v.reshape(-1)
    q_width, k_width, v_width = q.shape[1] * q.shape[2], k.shape[1] * k.shape[2], v.shape[1]
    for row in range(len(qkv)):
        flat_q[row * q_width : (row + 1) * q_width] = qkv[row, :q_width]
        flat_k[row * k_width : (row + 1) * k_width] = qkv[row, q_width : q_width + k_width]
        flat_v[row * v_width : (row + 1) * v_width] = qkv[row, q_width + k_width :]
    for flat, norm, whole in ((flat_q, q_norm, q), (flat_k, k_norm, k)):
        _rms_norm(flat, norm, eps, flat)
        _rope_neox(whole, cos, sin)
