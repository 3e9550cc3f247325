"""`split_heads` gives the bits of the operations it is made of."""

from __future__ import annotations

import numpy as np
import pytest

from memra_pp.errors import InputError
from memra_pp.kernels import ops
from memra_pp.kernels.attention import AttentionSpec
from memra_pp.kernels.heads import split_heads

SPEC = AttentionSpec(n_head_kv=2, head_dim_k=32, head_dim_v=64, window=None, scale=1.0)


def inputs(rows=3, n_head=4, rotated=16):
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((rows, (n_head + 2) * 32 + 128), dtype=np.float32)
    q_norm, k_norm = rng.standard_normal((2, 32), dtype=np.float32)
    rope = ops.rope_tables(np.arange(7, 7 + rows), rng.random(rotated // 2, dtype=np.float32))
    return {"qkv": qkv, "q_norm": q_norm, "k_norm": k_norm, "rope": rope}


@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("rotated", [8, 32])
def test_the_bits_are_those_of_norm_and_rotation(rows, rotated):
    given = inputs(rows, rotated=rotated)
    q, k, v = split_heads(**given, spec=SPEC, eps=1e-6)
    for got, start, heads, norm in ((q, 0, 4, "q_norm"), (k, 128, 2, "k_norm")):
        part = np.ascontiguousarray(given["qkv"][:, start : start + heads * 32]).reshape(-1, 32)
        want = ops.rms_norm(part, given[norm], 1e-6).reshape(rows, heads, 32)
        ops.rope_neox(want, *given["rope"])
        np.testing.assert_array_equal(got.reshape(want.shape), want)
    np.testing.assert_array_equal(v, given["qkv"][:, 192:])
    assert (q.shape, k.shape, v.shape) == ((rows, 4, 32), (rows, 64), (rows, 128))


@pytest.mark.parametrize(
    "change",
    [
        {"qkv": np.zeros((3, 192), np.float32)},
        {"qkv": np.zeros((3, 200), np.float32)},
        {"qkv": np.zeros((3, 320))},
        {"qkv": np.zeros((3, 640), np.float32)[:, ::2]},
        {"qkv": np.zeros(320, np.float32)},
        {"q_norm": np.zeros(64, np.float32)},
        {"k_norm": np.zeros(32)},
        {"rope": inputs(4)["rope"]},
        {"rope": inputs(rotated=34)["rope"]},
        {"rope": (inputs()["rope"][0], inputs(rotated=8)["rope"][1])},
    ],
)
def test_what_does_not_fit_is_refused(change):
    with pytest.raises(InputError):
        split_heads(**inputs() | change, spec=SPEC, eps=1e-6)
