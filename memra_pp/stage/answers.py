"""What the last stage answers for logits rows: the rows, the best token, or the few best."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import StageError
from ..models.protocol import Array, StepBatch
from .frames import ARGMAX, LOGITS, TOPK


def answers(batch: StepBatch, wants: Sequence[int], logits: Array) -> list[Array]:
    """One array a step that asked for something: its logits rows f32 `[n, n_vocab]`, their argmax i32 `[n]`, or the m best
    of each, `TOPK` as i32 `[n, 2 * m]`. `wants` has a code a segment (`want_code`).

    Raises:
        StageError: a choice among logits that are not numbers.
    """
    given: list[Array] = []
    at = 0
    for segment, want in zip(batch.segments, wants, strict=True):
        if segment.logits:
            rows = np.ascontiguousarray(logits[at : at + segment.logits])
            given.append(_answer(rows, want))
            at += segment.logits
    return given


def _answer(rows: Array, want: int) -> Array:
    if want == LOGITS:
        return rows
    if want == ARGMAX:
        ids: Array = rows.argmax(-1).astype(np.int32)
        _require_numbers(np.take_along_axis(rows, ids[:, None], 1))
        return ids
    _require_numbers(rows)
    best = np.empty((len(rows), want - ARGMAX), TOPK)
    for row, out in zip(rows, best, strict=True):
        least = np.partition(row, -len(out))[-len(out)]
        above = np.flatnonzero(row > least)
        some = np.concatenate([above, np.flatnonzero(row == least)[: len(out) - len(above)]])
        out["id"] = some[np.lexsort((some, -row[some]))]
        out["logit"] = row[out["id"]]
    return best.view(np.int32)


def _require_numbers(logits: Array) -> None:
    """No choice is made among logits that are not numbers (argmax picks a NaN if there is one)."""
    if np.isnan(logits).any():
        raise StageError("the logits hold a NaN, so none is the best: check the model's weights and its numbers")
