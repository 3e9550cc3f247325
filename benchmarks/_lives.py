"""What a session of the soak lives through: it streams a text to its end, or is cut off at a random moment."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from _rates import some_tokens

import memra_pp
from memra_pp.errors import InputError, SessionCancelled

PROMPTS, TOKENS = (1, 200), (4, 40)
"""Fewest and most tokens of a prompt, and of what follows it."""
DRAFTS, RIGHT = 4, 0.7
"""Most of a round, and the part of the guesses that are right."""
WHOLE = 0.5
"""The part of all sessions that stream to their end."""
STRUCK = ("cancelled", "closed")
"""Ended by `cancel()` or `close()` from elsewhere in the middle of a call."""
LEFT = ("abandoned", "dropped")
"""Nobody takes the tokens of `Pipeline.generate` any more, or holds the session, which was not closed."""
KILLED = "task cancelled"

log = logging.getLogger(__name__)


class Text(NamedTuple):
    """A prompt, how to continue it (`Pipeline.generate`), and the tokens that do when nothing else runs."""

    prompt: list[int]
    options: dict[str, Any]
    expected: list[int]


def drawn_text(pipe: memra_pp.Pipeline, rng: random.Random) -> Text:
    """A random text, sampled or greedy, with prompt lookup, guesses or no drafts; run alone, here and now, without drafts."""
    sampling = memra_pp.SamplingParams(temperature=rng.choice([0.0, 0.8]), seed=rng.randrange(100), eos_ids=())
    options = {"max_new_tokens": rng.randint(*TOKENS), "sampling": sampling}
    prompt = some_tokens(pipe, rng.randint(*PROMPTS), rng.randrange(100))
    expected = list(pipe.generate(prompt, **options))
    by: Any = rng.choice([None, "ngram", _guesser(len(prompt), expected, random.Random(rng.random()))])
    draft = by and memra_pp.Draft(k=DRAFTS, by=by, recurrent=rng.choice(["replay", "states"]))
    return Text(prompt, {**options, "draft": draft}, expected)


def _guesser(start: int, expected: Sequence[int], rng: random.Random) -> Callable[[Sequence[int], int], list[int]]:
    """A drafter that knows what comes, and is wrong now and then. The text begins at `start`."""

    def propose(tokens: Sequence[int], k: int) -> list[int]:
        at = len(tokens) - start
        return [token if rng.random() < RIGHT else 0 for token in expected[at : at + k]]

    return propose


@dataclass
class Findings:
    """What became of the sessions: how many ended how, gaps between tokens without drafts in seconds, and what went wrong."""

    ends: Counter[str] = field(default_factory=Counter)
    gaps: array[float] = field(default_factory=lambda: array("f"))
    wrong: list[str] = field(default_factory=list)
    tokens: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def step_s(self) -> float:
        """About what a step takes now."""
        return self.gaps[-1] if self.gaps else 0.01


class Life:
    """One session's stream.

    Attributes:
        how: `whole`, or what it is cut off by.
        strike: what cuts it off; it must not block.
    """

    def __init__(self, text: Text, how: str, rng: random.Random, found: Findings, loop: asyncio.AbstractEventLoop) -> None:
        self.text, self.how = text, how
        self.strike: Callable[[], object] | None = None
        self._found, self._loop = found, loop
        self._got: list[int] = []
        self._gaps: list[float] = []
        self._came = 0.0
        self._at, self._late = rng.randrange(len(text.expected)), 2 * rng.random()

    def begun(self) -> None:
        """Its strike is set, and no token has come yet."""
        self._strike_if_due()

    def take(self, token: int) -> bool:
        """Takes a token; whether more are wanted."""
        now, before = time.perf_counter(), self._came
        if before:
            self._gaps.append(now - before)
        self._came = now
        self._got.append(token)
        self._strike_if_due()
        return self.how not in LEFT or len(self._got) < self._at

    @contextmanager
    def judged(self) -> Iterator[None]:
        """Around the whole life: what came is a text's beginning, all of it unless it was cut off, and no other error."""
        error: BaseException | None = None
        try:
            yield
        except (SessionCancelled, InputError, asyncio.CancelledError) as cut:
            error = cut
        except Exception as unexpected:
            log.exception("a session that was to be %s failed", self.how)
            error = unexpected
        expected, got = self.text.expected, self._got
        ended = "whole" if error is None and len(got) == len(expected) else self.how
        with self._found.lock:
            self._found.ends[ended] += 1
            self._found.tokens += len(got)
            if self.text.options["draft"] is None:
                self._found.gaps.extend(self._gaps)
            if got != (expected if ended == "whole" else expected[: len(got)]):
                self._found.wrong.append(f"{ended}: {got} is not {expected}")
            if error is not None and not self._allows(error):
                self._found.wrong.append(f"{ended}: {type(error).__name__}: {error}")

    def _allows(self, error: BaseException) -> bool:
        match self.how:
            case "cancelled":
                return isinstance(error, SessionCancelled)
            case "closed":
                return isinstance(error, SessionCancelled) or "this session is closed" in str(error)
            case _:
                return self.how == KILLED and isinstance(error, asyncio.CancelledError)

    def _strike_if_due(self) -> None:
        """Strikes within about two steps, so that it falls in the middle of something."""
        if self.strike is not None and len(self._got) == self._at:
            self._loop.call_soon_threadsafe(self._loop.call_later, self._late * self._found.step_s, self.strike)
