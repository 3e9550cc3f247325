"""Measures a pipeline in a bounded time: each part has its share of the seconds, and takes a step or two at least."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from ...config import WeightBytes
from ...driver.chain import Progress
from ...driver.pipeline import Pipeline
from ...driver.speculation.drafters import Draft
from ...errors import AdmissionError, StageError
from .figures import Figures, Prefill
from .probes import PROMPT, decode, hold, hop_times, prefill, roll_back, speculate

P = ParamSpec("P")
T = TypeVar("T")

SHARES = {"prefill": 0.3, "decode": 0.45, "hops": 0.05, "rollback": 0.05, "speculation": 0.15}
"""Parts of the seconds."""

PATIENCE = 2.0
"""A prompt is left out if, at the pace of the one before, it would take more than so many times its share."""


@dataclass(frozen=True)
class Asked:
    """What to measure, in so many seconds: prompts of these `rows`, up to so many sessions, and rounds of so many drafts (0: no
    rounds)."""

    seconds: float
    rows: tuple[int, ...]
    sessions: int
    drafts: int

    def share(self, part: str, among: int = 1) -> float:
        """The seconds of one of `among` measurements of a part."""
        return SHARES[part] * self.seconds / among


def measure(pipe: Pipeline, weights: WeightBytes | None, asked: Asked, progress: Progress) -> Figures:
    """Measures one thing after another. What the devices cannot hold, or would take too long, is left out, and told.

    Args:
        weights: what the model's files hold, if that is known.
        progress: called with a short text and the parts done and to do.

    Raises:
        AdmissionError: not even one session fits.
        StageError: a stage failed, or was lost and replaced meanwhile.
    """
    parts = _Parts(progress, 3 + len(asked.rows) + len(doubled(asked.sessions)) + (3 if asked.drafts else 0))
    parts.tell("warming up")
    began = time.perf_counter()
    prefill(pipe, PROMPT, 0)
    decode(pipe, 1, 0)
    warm = time.perf_counter()
    parts.tell("opening sessions")
    held, stages, refused = hold(pipe, weights, asked.sessions)
    if refused is not None:
        parts.left_out.append(f"more than {held.sessions} at a time: {refused}")
    prefills = tuple(_prefills(pipe, parts, asked))
    counts = doubled(held.sessions)
    share = asked.share("decode", len(counts))
    decodes = [found for n in counts for found in parts.run(f"decode, {n} at a time", decode, pipe, n, share)]
    hops = [hop for found in parts.run("hops", hop_times, pipe, asked.share("hops")) for hop in found]
    rounds, speculated = [], []
    if asked.drafts:
        rounds = parts.run("rollback", roll_back, pipe, asked.drafts, asked.share("rollback"))
        for draft in (None, Draft(k=asked.drafts, by="ngram")):
            name = "no speculation" if draft is None else "speculation, ngram"
            speculated += parts.run(name, speculate, pipe, draft, asked.drafts, asked.share("speculation", 2))
    if lost := pipe.health()["recoveries"]:
        raise StageError(f"stages were lost {lost} times while they were measured: the times are not theirs; bench again")
    return Figures(
        warm_s=warm - began,
        measured_s=time.perf_counter() - warm,
        held=held,
        stages=stages,
        prefill=prefills,
        decode=tuple(decodes),
        hops=tuple(hops),
        rollback=tuple(rounds),
        speculation=tuple(speculated),
        left_out=tuple(parts.left_out),
    )


def doubled(most: int) -> list[int]:
    """1, 2, 4 and so on below `most`, and `most`."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]


class _Parts:
    """The parts of a bench, as they are begun, and what was left out of it."""

    def __init__(self, progress: Progress, of: int) -> None:
        self.left_out: list[str] = []
        self._progress, self._of, self._begun = progress, of, 0

    def tell(self, name: str) -> None:
        """Says what begins."""
        self._progress(name, self._begun, self._of)
        self._begun += 1

    def run(self, name: str, part: Callable[P, T], *args: P.args, **options: P.kwargs) -> list[T]:
        """What a part has found; nothing if its session does not fit."""
        self.tell(name)
        try:
            return [part(*args, **options)]
        except AdmissionError as error:
            self.left_out.append(f"{name}: {error}")
            return []


def _prefills(pipe: Pipeline, parts: _Parts, asked: Asked) -> Iterator[Prefill]:
    """Prompts, from the shortest on, while they fit in context and time."""
    share, pace = asked.share("prefill", len(asked.rows)), 0.0
    for rows in sorted(asked.rows):
        name = f"prefill, {rows:,} rows"
        if rows > pipe.max_ctx:
            parts.left_out.append(f"{name}: the context has {pipe.max_ctx:,}")
        elif pace * rows > PATIENCE * share:
            parts.left_out.append(f"{name}: it would take some {pace * rows:.0f} s; give the bench more --seconds")
        else:
            for found in parts.run(name, prefill, pipe, rows, share):
                pace = found.seconds / rows
                yield found
