"""`StageModel`: what a stage asks of a model, and `StepBatch`: the rows of one step."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..cache import Cache
from ..config import ModelConfig

Array = NDArray[Any]
LogitRows = Literal["none", "last", "all"]


class Segment(NamedTuple):
    """The rows of one session in a step: `rows` of them at positions `pos, pos + 1, ...`.

    `logits` says which of them the last stage computes logits for. `snapshot_at = r` asks a recurrent layer for its state
    after the first `r` rows.
    """

    pos: int
    rows: int
    logits: LogitRows = "last"
    snapshot_at: int | None = None

    @property
    def logit_count(self) -> int:
        """How many of the rows, the last ones, logits are computed for."""
        return self.rows if self.logits == "all" else int(self.logits == "last")


class StepBatch(NamedTuple):
    """The rows of one step, session after session. `segments[i]` goes with `caches[i]`."""

    segments: tuple[Segment, ...]

    @property
    def n_logits(self) -> int:
        """Rows of logits in all."""
        return sum([s.logit_count for s in self.segments])

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
            rows += range(where.stop - segment.logit_count, where.stop)
        return np.array(rows, np.int64)


class StageModel(Protocol):
    """A model's layers `[lo, hi)`, with the embedding on the first stage and the head on the last."""

    cfg: ModelConfig

    @classmethod
    def load(cls, path: str | PathLike[str], layers: range, device: Any) -> StageModel:
        """Reads the tensors of `layers` from `path`, and no others."""

    def workspace_bytes(self, max_rows: int) -> int:
        """An upper bound of what `forward` allocates for `max_rows` rows, beyond the cache."""

    def forward(self, batch: StepBatch, x: Array, caches: Sequence[Cache]) -> Array:
        """Runs the layers over `x` and appends each session's rows to its cache at `cache.pos`; the caller moves `pos`.

        `x` is i32 `[rows]` tokens on the first stage, f32 `[rows, n_embd]` after it. Returns f32 `[rows, n_embd]`, or on
        the last stage f32 `[len(batch.logit_rows), n_vocab]`.
        """
