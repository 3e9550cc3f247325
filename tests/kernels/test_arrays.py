"""Aligned arrays: where they start, and what the kernels rely on."""

from __future__ import annotations

import numpy as np
import pytest

from memra_pp.kernels import blocks
from memra_pp.kernels._arrays import LINE, aligned_empty, aligned_zeros
from memra_pp.kernels.matmul import PackedMatrix


@pytest.mark.parametrize("make", [aligned_empty, aligned_zeros])
@pytest.mark.parametrize("shape", [(1,), (3, 5), (7, 64, 64), (200, 640, 8)])
def test_arrays_start_on_a_line(make, shape):
    for array in [make(*shape) for _ in range(4)]:
        assert array.shape == shape
        assert array.dtype == np.float32
        assert array.flags.c_contiguous
        assert array.ctypes.data % LINE == 0
    assert not aligned_zeros(*shape).any()


def test_weights_and_values_are_aligned():
    for n_out in (64, 1000):
        assert PackedMatrix.empty(n_out, 640).panels.ctypes.data % LINE == 0
    assert blocks.dequantize("q8_0", np.zeros((9, 34), np.uint8)).ctypes.data % LINE == 0
