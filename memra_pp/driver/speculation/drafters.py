"""Who proposes drafts, and how many: the drafters, the fact `Draft`, and `DraftControl`, which chooses a round's number."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from ...cache.sizing import Recurrent
from ...errors import InputError, checked_int, require

MAX_DRAFTS = 256

MULTIPLIER = 0x9E3779B97F4A7C15
"""Odd, so that no power of it is lost mod 2**64."""


class Drafter(Protocol):
    """Whoever guesses tokens. It may be wrong: every draft is judged by the model."""

    def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        """At most `k` tokens that may follow `tokens`, the whole text so far; fewer, or none, without a guess."""


class CallableDrafter:
    """A function `(tokens, k) -> tokens` as a `Drafter`. What it returns is checked with the drafts of all others."""

    def __init__(self, fn: Callable[[Sequence[int], int], Iterable[int]]) -> None:
        self._fn = fn

    def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        drafts: Any = self._fn(tokens, k)
        return list(drafts) if isinstance(drafts, Iterable) else drafts


class NgramDrafter:
    """Prompt lookup: what followed the last time that the text ran as it does now. No model, no memory of other texts.

    It takes the longest end of the text that occurred before, of at least `min_match` tokens, in its most recent
    occurrence, and copies what followed; where the copy reaches the end of the text it goes round, as a repetition does.
    (Saxena, "Prompt lookup decoding", 2023.) It copies only as far as the next best occurrence agrees, if that one ran at
    least a quarter as far with the text: in a table or a list, what differed from line to line before will do so again.

    Windows of any length are compared at once by their polynomial hash mod 2**64, kept as prefix sums: a collision, or a
    new text that agrees with the old one wherever it was sampled, can only cost acceptance. The text is kept between calls
    (20 bytes a token), so one that grows costs only what is new; use one drafter a text.

    Raises:
        InputError: `min_match` is not from 1 to 256.
    """

    def __init__(self, min_match: int = 1) -> None:
        self._min_match = checked_int(InputError, "min_match", min_match, 1, 256)
        self._n = 0
        self._tokens: NDArray[np.int32] = np.zeros(0, np.int32)
        self._powers: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._hash: NDArray[np.uint64] = np.zeros(1, np.uint64)

    def propose(self, tokens: Sequence[int], k: int) -> list[int]:
        """At most `k` tokens; none if the last `min_match` tokens did not occur before."""
        self._read(tokens)
        n, least = self._n, self._min_match
        if n <= least:
            return []
        ends = np.flatnonzero(self._tokens[least - 1 : n - 1] == self._tokens[n - 1]) + least
        best, length = self._longest(ends, least)
        if not length:
            return []
        follow = self._after(best[-1], k)
        rivals = best[:-1] if best.size > 1 else self._longest(ends[ends != best[-1]], max(least, -(-length // 4)))[0]
        if rivals.size:
            differs = np.flatnonzero(follow != self._after(rivals[-1], k))
            follow = follow[: differs[0]] if differs.size else follow
        drafts: list[int] = follow.tolist()
        return drafts

    def _after(self, end: int, k: int) -> NDArray[np.int32]:
        """The `k` tokens after the position `end`."""
        return np.resize(self._tokens[end : self._n], k)

    def _longest(self, ends: NDArray[np.int64], least: int) -> tuple[NDArray[np.int64], int]:
        """Those of the positions `ends` before which the text's end stands at its longest, and its length; none and 0 if it
        is less than `least`."""
        ends = self._matching(ends, least)
        if not ends.size:
            return ends, 0
        length, grow = least, 1
        while (longer := self._matching(ends, length + grow)).size:
            ends, length, grow = longer, length + grow, 2 * grow
        while grow := grow // 2:
            if (longer := self._matching(ends, length + grow)).size:
                ends, length = longer, length + grow
        return ends, length

    def _matching(self, ends: NDArray[np.int64], length: int) -> NDArray[np.int64]:
        """Those of the positions `ends` before which the last `length` tokens of the text stand too."""
        n, sums = self._n, self._hash
        ends = ends[ends >= length]
        windows = (sums[ends] - sums[ends - length]) * self._powers[n - ends]
        same: NDArray[np.bool_] = windows == sums[n : n + 1] - sums[n - length : n - length + 1]
        return ends[same]

    def _read(self, tokens: Sequence[int]) -> None:
        """Brings the arrays up to `tokens`, from where it left those of the last call."""
        n, kept = len(tokens), min(self._n, len(tokens))
        for part in (slice(0, kept, max(1, kept // 64)), slice(max(0, kept - 64), kept)):
            if list(tokens[part]) != self._tokens[part].tolist():
                kept = 0
                break
        if n > self._tokens.size:
            room = 2 * n
            self._tokens = np.concatenate([self._tokens[:kept], np.zeros(room - kept, np.int32)])
            self._hash = np.concatenate([self._hash[: kept + 1], np.zeros(room - kept, np.uint64)])
            powers = np.full(room, MULTIPLIER, np.uint64)
            powers[0] = 1
            self._powers = np.cumprod(powers)
        new = np.array(tokens[kept:], np.int32)
        self._tokens[kept:n] = new
        self._hash[kept + 1 : n + 1] = self._hash[kept] + np.cumsum(new.astype(np.uint64) * self._powers[kept:n])
        self._n = n


def checked_drafts(drafts: Any, k: int, n_vocab: int) -> list[int]:
    """What a drafter proposed, as plain integers.

    Raises:
        InputError: not a list of integers, more than `k`, or outside the vocabulary; the message names the drafter.
    """
    name = "the drafter's proposal"
    require(isinstance(drafts, Iterable), InputError, name, drafts, f"a list of at most {k} token ids, empty without a guess")
    ids = list(drafts)
    require(len(ids) <= k, InputError, f"the length of {name}", len(ids), f"at most the k={k} that it was asked for")
    return [checked_int(InputError, f"{name}[{i}]", token, 0, n_vocab - 1) for i, token in enumerate(ids)]


@dataclass(frozen=True)
class Draft:
    """How to speculate: at most `k` drafts a round, `by` whom, and how recurrent state goes back to what was accepted.

    `by` is "ngram" (the text itself, see `NgramDrafter`), the path of a smaller model of the same vocabulary, an object
    with `propose` (see `Drafter`), or a function `(tokens, k) -> tokens`. `recurrent` is "replay" (feed the accepted drafts
    again) or "states" (keep the state after every draft); models without recurrent layers need neither.

    Raises:
        InputError: a value outside its bounds; the message names it.
    """

    k: int = 4
    by: str | os.PathLike[str] | Drafter | Callable[[Sequence[int], int], Iterable[int]] = "ngram"
    recurrent: Recurrent = "replay"

    def __post_init__(self) -> None:
        object.__setattr__(self, "k", checked_int(InputError, "k", self.k, 1, MAX_DRAFTS))
        named = isinstance(self.by, str | os.PathLike) and str(self.by) != ""
        able = callable(getattr(self.by, "propose", self.by)) and not isinstance(self.by, type)
        allowed = '"ngram", the path of a model, an object with propose(tokens, k), or a function (tokens, k) -> tokens'
        require(named or able, InputError, "by", self.by, allowed)
        require(self.recurrent in get_args(Recurrent), InputError, "recurrent", self.recurrent, '"replay" or "states"')


class DraftControl:
    """Chooses how many drafts a round should have, from what the rounds before brought and cost.

    With acceptance `a` a draft, `k` drafts bring `1 + a + ... + a**k` tokens on average, in a traversal of `1 + k` rows plus
    `k` times the drafter's own time; the best `k` has the most tokens a second. `a` is estimated from accepted drafts and
    first rejections, discounted, and begins as if 1.6 of 2 had been right. A traversal of `r` rows is taken to cost
    `t1 + m * (r - 1)`: `t1` the median of the last 16 single rows, `m` the median of what the last 16 of more rows say and
    of two guesses of 20 % of `t1`. The first traversal of each number of rows is left out, since that is where kernels are
    compiled. One round goes without drafts, for `t1`, when the first 16 timings had no single row, or 64 since the last.

    When no draft pays, it asks for none for 4 rounds, then probes with one, and waits twice as long after each probe that
    changes nothing, 64 rounds at most. An accepted probe makes it forget the rejections.

    Arithmetic only, a function of what was recorded.

    Raises:
        InputError: `k_max` is not from 1 to 256.
    """

    WINDOW = 16
    STALE = 64
    DISCOUNT = 0.95
    PRIOR = (1.6, 0.4)
    ROW_GUESS = 0.2
    PAUSES = (4, 64)

    def __init__(self, k_max: int) -> None:
        self.k_max = checked_int(InputError, "k_max", k_max, 1, MAX_DRAFTS)
        self._right, self._wrong = self.PRIOR
        self._met: set[int] = set()
        self._singles: deque[float] = deque(maxlen=self.WINDOW)
        self._others: deque[tuple[int, float]] = deque(maxlen=self.WINDOW)
        self._since_single = 0
        self._draft_seconds: deque[float] = deque(maxlen=self.WINDOW)
        self._pause = self._quiet = 0

    @property
    def acceptance(self) -> float:
        """The estimated probability that a draft is right, given that those before it are."""
        return self._right / (self._right + self._wrong)

    def next_k(self) -> int:
        """How many drafts to ask for in the next round, 0 to `k_max`."""
        if self._pause:
            return 0 if self._quiet else 1
        return 0 if self._since_single >= (self.STALE if self._singles else self.WINDOW) else self._best()

    def record(self, proposed: int, accepted: int, rows: int, seconds: float, draft_seconds: float) -> None:
        """Takes note of a round, also of one without drafts: `accepted` of `proposed` drafts, a traversal of `rows` rows in
        `seconds`, and `draft_seconds` of drafting before it."""
        if rows not in self._met:
            self._met.add(rows)
        elif rows == 1:
            self._singles.append(seconds)
            self._since_single = 0
        else:
            self._others.append((rows, seconds))
            self._since_single += 1
        if proposed:
            if self._pause and accepted == proposed:
                self._right, self._wrong = self.PRIOR
            self._right = self.DISCOUNT * self._right + accepted
            self._wrong = self.DISCOUNT * self._wrong + (accepted < proposed)
            self._draft_seconds.append(draft_seconds / proposed)
        if self._best():
            self._pause = 0
        elif not self._pause:
            self._pause = self._quiet = self.PAUSES[0]
        elif proposed:
            self._pause = self._quiet = min(2 * self._pause, self.PAUSES[1])
        else:
            self._quiet = max(0, self._quiet - 1)

    def _best(self) -> int:
        """The `k` of most tokens a second; `k_max` before anything was timed."""
        if not self._singles and not self._others:
            return self.k_max
        row, per_draft = self._costs()
        a, best, most, tokens = self.acceptance, 0, 0.0, 0.0
        for k in range(self.k_max + 1):
            tokens += a**k
            if (rate := tokens / (row + k * per_draft)) > most:
                best, most = k, rate
        return best

    def _costs(self) -> tuple[float, float]:
        """Seconds of a traversal of one row, and of each draft more, its drafting included."""
        row = median_low(self._singles or [seconds / (1 + self.ROW_GUESS * (rows - 1)) for rows, seconds in self._others])
        more = [(seconds - row) / (rows - 1) for rows, seconds in self._others]
        per_row = median([self.ROW_GUESS * row] * 2 + more)
        return max(row, 1e-9), max(0.0, per_row) + median_low([0.0, *self._draft_seconds])
