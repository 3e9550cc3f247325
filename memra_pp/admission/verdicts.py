"""What a request is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Reason: TypeAlias = Literal["bytes", "fragmented", "queue", "tenant", "deadline", "context", "waiting room"]
"""What binds: free bytes, their pieces, those who came first, the tenant's cap, the time to wait, the context, or the number
of those who may wait."""


@dataclass(frozen=True)
class Admit:
    """Yes: on each stage `s` a slab of `charges[s]` bytes at `offsets[s]` of its device's arena is reserved."""

    offsets: Sequence[int]
    charges: Sequence[int]


@dataclass(frozen=True)
class Defer:
    """Not now: `stage` is the one that binds, `short_by` bytes too few; worth asking again after `retry_after_s`."""

    stage: int
    short_by: int
    retry_after_s: float
    reason: Reason
    message: str


@dataclass(frozen=True)
class Refuse:
    """No. With `retry_after_s`, worth asking again; with None, never: then `longest_ctx` is the longest context (rows) that
    would fit (0: none)."""

    stage: int
    short_by: int
    retry_after_s: float | None
    reason: Reason
    message: str
    longest_ctx: int | None = None


Verdict: TypeAlias = Admit | Defer | Refuse
