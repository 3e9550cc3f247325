"""`StageModel`: what a stage asks of a model, and `StepBatch`: the rows of one step."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..cache import Cache, CacheSnapshot
from ..config import ModelConfig
from ..kernels.backend import Rows

Array = NDArray[Any]


class Segment(NamedTuple):
    """The rows of one session in a step: `rows` of them at positions `pos, pos + 1, ...`.

    The last stage computes logits for the last `logits` of them. Each `(r, snapshot)` in `captures`, ascending in
    `1 <= r <= rows`, asks every recurrent layer `il` to copy its state after the first `r` rows into
    `snapshot.states[il]`; attention layers have nothing to do.
    """

    pos: int
    rows: int
    logits: int = 1
    captures: tuple[tuple[int, CacheSnapshot], ...] = ()


class StepBatch(NamedTuple):
    """The rows of one step, session after session. `segments[i]` goes with `caches[i]`."""

    segments: tuple[Segment, ...]

    @property
    def n_logits(self) -> int:
        """Rows of logits in all."""
        return sum([s.logits for s in self.segments])

    @property
    def slices(self) -> tuple[slice, ...]:
        """Each session's rows in the batch."""
        ends = np.cumsum([s.rows for s in self.segments]).tolist()
        return tuple(slice(end - s.rows, end) for s, end in zip(self.segments, ends, strict=True))

    @property
    def positions(self) -> NDArray[np.int64]:
        """The absolute position of every row, `[rows]`."""
        return np.concatenate([np.arange(s.pos, s.pos + s.rows) for s in self.segments])

    @property
    def logit_rows(self) -> NDArray[np.int64]:
        """Batch rows that logits are wanted for, in order."""
        rows: list[int] = []
        for segment, where in zip(self.segments, self.slices, strict=True):
            rows += range(where.stop - segment.logits, where.stop)
        return np.array(rows, np.int64)


class StageModel(Protocol):
    """A model's layers `[lo, hi)`, with the embedding on the first stage and the head on the last."""

    cfg: ModelConfig

    @classmethod
    def load(cls, path: str | PathLike[str], layers: range, device: Any) -> StageModel:
        """Reads the tensors of `layers` from `path`, and no others."""

    def workspace_bytes(self, max_rows: int) -> int:
        """An upper bound of what `forward` allocates for `max_rows` rows, beyond the cache."""

    def forward(self, batch: StepBatch, x: Rows, caches: Sequence[Cache]) -> Rows:
        """Runs the layers over `x` and appends each session's rows to its cache at `cache.pos`; the caller moves `pos`.

        `x` is i32 `[rows]` tokens on the first stage, f32 `[rows, n_embd]` after it. Returns f32 `[rows, n_embd]`, or on
        the last stage f32 `[len(batch.logit_rows), n_vocab]`.

        On a CPU all are NumPy arrays. On a GPU the tokens and the logits are; hidden rows may come as an array there, where
        the stage before has written them, which `forward` may write to, and may be returned as either.
        """
