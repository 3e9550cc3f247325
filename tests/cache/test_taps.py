"""`DflashTapSink`: which rows go where."""

from __future__ import annotations

import numpy as np
import pytest

from memra_pp.cache import DflashTapSink
from memra_pp.errors import CacheError

HIDDEN = 4


def residual(layer: int, rows: int) -> np.ndarray:
    """Recognisable f32 rows of a layer, none of them zero."""
    return (100 * layer + np.arange(rows * HIDDEN, dtype=np.float32) + 1).reshape(rows, HIDDEN)


def slot(sink: DflashTapSink, s: int) -> np.ndarray:
    return sink.buf[:, s * HIDDEN : (s + 1) * HIDDEN]


def test_a_sink_is_f32_with_a_slot_a_tapped_layer():
    sink = DflashTapSink.armed((7, 2, 9), HIDDEN, 5)
    assert (sink.buf.shape, sink.buf.dtype) == ((5, 3 * HIDDEN), np.float32)
    assert (sink.layer_ids, sink.hidden, sink.t, sink.base) == ((7, 2, 9), HIDDEN, 5, 0)
    assert not sink.buf.any()


def test_rows_go_behind_base_in_the_slot_of_their_layer_and_nowhere_else():
    sink = DflashTapSink.armed((7, 2, 9), HIDDEN, 5)
    sink.base = 1
    sink.write(2, residual(2, 3))
    np.testing.assert_array_equal(slot(sink, 1)[1:4], residual(2, 3))
    assert np.count_nonzero(sink.buf) == 3 * HIDDEN


def test_slots_are_in_the_order_of_layer_ids_whatever_the_order_of_the_layers():
    sink = DflashTapSink.armed((7, 2), HIDDEN, 2)
    for layer in range(10):
        sink.write(layer, residual(layer, 2))
    np.testing.assert_array_equal(sink.buf, np.hstack([residual(7, 2), residual(2, 2)]))


def test_a_layer_tapped_in_two_slots_fills_both():
    sink = DflashTapSink.armed((3, 3), HIDDEN, 2)
    sink.write(3, residual(3, 2))
    np.testing.assert_array_equal(slot(sink, 0), slot(sink, 1))
    assert sink.buf.all()


def test_chunks_follow_each_other_by_base():
    sink = DflashTapSink.armed((3,), HIDDEN, 6)
    rows = residual(3, 6)
    for start in (0, 2, 4):
        sink.base = start
        sink.write(3, rows[start : start + 2])
    np.testing.assert_array_equal(sink.buf, rows)


def test_each_stage_fills_its_own_layers_slots_and_their_sum_is_the_whole():
    stages = [DflashTapSink.armed((1, 6), HIDDEN, 2) for _ in range(2)]
    for sink, layers in zip(stages, (range(4), range(4, 8)), strict=True):
        for layer in layers:
            sink.write(layer, residual(layer, 2))
    assert not slot(stages[0], 1).any() and not slot(stages[1], 0).any()
    np.testing.assert_array_equal(stages[0].buf + stages[1].buf, np.hstack([residual(1, 2), residual(6, 2)]))


def test_rows_that_do_not_fit_are_an_error_and_change_nothing():
    sink = DflashTapSink.armed((3,), HIDDEN, 4)
    sink.base = 2
    with pytest.raises(CacheError, match=r"\[2, 5\).*4 rows"):
        sink.write(3, residual(3, 3))
    assert not sink.buf.any()
    sink.write(8, residual(8, 3))
    sink.write(3, residual(3, 2))
