"""Index arrays of a ragged batch."""

from __future__ import annotations

import pytest

from memra_pp.errors import InputError
from memra_pp.kernels.spans import Spans


def test_rows_follow_one_another():
    spans = Spans([5, 0, 9], [2, 0, 3])
    assert spans.total == 5
    assert spans.ends == (7, 0, 12)
    assert spans.table.tolist() == [[0, 2, 5], [2, 0, 0], [2, 3, 9]]
    assert spans.table.flags.c_contiguous


@pytest.mark.parametrize(("window", "keys"), [(None, [7, 11, 12]), (4, [5, 5, 4])])
def test_blocks_are_of_one_session_each_and_their_work_is_what_they_read(window, keys):
    table, work = Spans([5, 0, 9], [2, 0, 3]).blocks(2, window)
    costs = [keys[0] * 2, keys[1] * 2, keys[2]]
    assert table[:, :4].tolist() == [[0, 0, 2, 5], [2, 2, 2, 9], [2, 4, 1, 11]]
    assert table[:, 4:].tolist() == [[0, costs[0]], [costs[0], costs[1]], [costs[0] + costs[1], costs[2]]]
    assert work == sum(costs)


def test_the_first_keys_are_those_of_the_first_rows():
    spans = Spans([5, 0, 9], [2, 0, 3])
    assert spans.first_keys(None) == [0, 0, 0]
    assert spans.first_keys(4) == [2, 0, 6]


def test_no_session_and_no_row_is_a_batch():
    assert Spans([], []).total == 0
    table, work = Spans([3], [0]).blocks(4, None)
    assert (table.shape, work) == ((0, 6), 0)


@pytest.mark.parametrize(("pos", "rows"), [([-1, 3], [1, 1]), ([3], [-2])])
def test_nothing_is_negative(pos, rows):
    with pytest.raises(InputError, match="negative"):
        Spans(pos, rows)
