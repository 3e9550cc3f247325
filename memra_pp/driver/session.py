"""`Session`: one sequence's tokens through the pipeline. What goes in are token ids, what comes back are logits rows."""

from __future__ import annotations

import contextlib
import operator
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..cache import CachePlan
from ..cache.sizing import Recurrent
from ..errors import InputError, StageError, checked_int
from ..models.protocol import Array, LogitRows
from ..stage.frames import step

if TYPE_CHECKING:
    from .pipeline import Pipeline

F32 = NDArray[np.float32]

LOGITS_CHUNK_BYTES = 64 << 20
"""Logits carried by one frame of a prefill that asks for all of them."""

MAX_LOGITS_BYTES = 4 << 30
"""Logits that one prefill may return."""


@dataclass(frozen=True)
class SessionShape:
    """What a session was opened for: rows of context, most drafts in a verify, how recurrent state rolls back, snapshots."""

    ctx: int
    speculate: int
    recurrent: Recurrent
    snapshots: int


class Session:
    """A sequence on every stage. Open one with `Pipeline.open`; use it as a context manager.

    A call that is refused (`InputError`, `CacheError`) has changed nothing. After a `StageError` the session is failed:
    close it and open another.
    """

    def __init__(self, pipe: Pipeline, session_id: int, prompt: list[int], shape: SessionShape) -> None:
        self.id = session_id
        self.shape = shape
        self._pipe = pipe
        self._prompt = prompt
        self._plan = CachePlan.of(pipe.cfg, shape.ctx, pipe.policy, shape.snapshots)
        self._tokens: list[int] = []
        self._seq = 1
        self._state = "open"
        self._lock = threading.Lock()

    @property
    def tokens(self) -> list[int]:
        """The tokens fed, oldest first."""
        return list(self._tokens)

    @property
    def pos(self) -> int:
        """How many tokens were fed."""
        return self._plan.pos

    def prefill(self, all_logits: bool = False) -> F32:
        """Feeds the prompt, in chunks; f32 `[n_vocab]` of its last row, or `[len(prompt), n_vocab]` of all.

        Raises:
            InputError: it was fed already, or all logits are more than 4 GiB.
            StageError: a stage failed.
        """
        with self._turn():
            return self._prefill(all_logits)

    def _prefill(self, all_logits: bool) -> F32:
        if self._tokens:
            raise InputError(f"the prompt of {len(self._prompt)} tokens was fed already: use extend, decode or verify")
        if not all_logits:
            return self._feed(self._prompt)
        row_bytes = 4 * self._pipe.cfg.n_vocab
        if len(self._prompt) * row_bytes > MAX_LOGITS_BYTES:
            raise InputError(
                f"all logits of {len(self._prompt)} rows are {len(self._prompt) * row_bytes} bytes, more than "
                f"{MAX_LOGITS_BYTES}: prefill a shorter prompt, or take the last row only"
            )
        chunk = min(self._pipe.prefill_chunk, max(1, LOGITS_CHUNK_BYTES // row_bytes))
        self._plan.check_append(len(self._prompt), chunk)
        return np.concatenate([self._step(part, "all") for part in _chunks(self._prompt, chunk)])

    def extend(self, tokens: Iterable[int]) -> F32:
        """Feeds more tokens, in chunks: the next turn of a dialogue, say. f32 `[n_vocab]` of the last row.

        Raises:
            InputError: no tokens, or bad ones; nothing was fed.
            CapacityExceeded: they do not fit the session's context; nothing was fed.
            StageError: a stage failed.
        """
        with self._turn():
            return self._feed(self._checked(tokens))

    def decode(self, token: int) -> F32:
        """Feeds one token; f32 `[n_vocab]`, the distribution after it."""
        with self._turn():
            return self._feed(self._checked([token]))

    def verify(self, tokens: Iterable[int]) -> F32:
        """Feeds a draft in one step; f32 `[len(tokens), n_vocab]`, row `i` being the distribution after token `i`.

        All rows stand.

        Raises:
            InputError: no tokens, bad ones, or more than `speculate + 1`; nothing was fed.
            CacheError: they do not fit the session's context or its rings; nothing was fed.
            StageError: a stage failed.
        """
        with self._turn():
            draft = self._checked(tokens)
            if len(draft) > self.shape.speculate + 1:
                raise InputError(
                    f"verify takes at most {self.shape.speculate + 1} tokens in this session, not {len(draft)}: "
                    "open it with a larger speculate"
                )
            self._plan.check_append(len(draft))
            return self._step(draft, "all")

    def generate(self, max_new_tokens: int, eos_ids: Iterable[int] | None = None) -> Iterator[int]:
        """Greedy tokens, from a fresh session, until one of `eos_ids` (default: the model's own), which
        is not given out. Only token ids cross the lanes."""
        stop = self._pipe.cfg.eos_ids if eos_ids is None else frozenset(checked_ids(eos_ids, "eos_ids"))
        if self._tokens:
            raise InputError("generate begins with the prompt, which was fed already: open a fresh session, or decode")
        feed = self._prompt
        for _ in range(checked_int(InputError, "max_new_tokens", max_new_tokens, 0, sys.maxsize)):
            with self._turn():
                token = int(self._feed(feed, "argmax"))
            if token in stop:
                return
            yield token
            if self.pos >= self.shape.ctx:
                return
            feed = [token]

    def close(self) -> None:
        """Gives the session's bytes back on every stage; closing twice is fine."""
        if self._state == "closed":
            return
        self._state = "closed"
        try:
            self._pipe.release(self)
        except StageError:
            if not self._pipe.chain.failed:
                raise

    def abandon(self) -> None:
        """Marks the session closed because its pipeline closes."""
        self._state = "closed"

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _feed(self, tokens: list[int], want: str = "logits") -> Array:
        """Feeds tokens in chunks; the answer for the last row: its logits, or i32 `[]` with `want="argmax"`."""
        chunk = self._pipe.prefill_chunk
        self._plan.check_append(len(tokens), chunk)
        *head, last = _chunks(tokens, chunk)
        for part in head:
            self._step(part, "none")
        return np.asarray(self._step(last, "last", want)[0])

    def _step(self, tokens: list[int], logits: LogitRows, want: str = "logits") -> Array:
        """One entry through the chain; its answer rows (none for `logits="none"`). The caller has checked that they fit."""
        pipe = self._pipe
        entry = step(self.id, self._seq, pipe.chain.epoch, self.pos, len(tokens), logits, want)
        self._state = "failed"
        try:
            reply = pipe.chain.roundtrip(entry, [np.array(tokens, np.int32)], pipe.step_timeout)
        except InputError:
            self._state = "open"
            raise
        if (fault := reply.fault(0)) is not None:
            stage, kind, message = fault
            raise StageError(f"session {self.id} failed on stage {stage}: {message} ({kind}); close it and open another")
        self._plan.append(len(tokens))
        if reply.hops != len(pipe.chain.budgets):
            raise StageError(f"{reply.hops} of {len(pipe.chain.budgets)} stages applied a step of session {self.id}; close it")
        self._seq += 1
        self._tokens += tokens
        self._state = "open"
        return reply.arrays[0] if reply.arrays else np.empty(0, np.float32)

    def _checked(self, tokens: Iterable[int]) -> list[int]:
        if not self._tokens:
            raise InputError("nothing has been fed yet: call prefill first")
        return checked_tokens(tokens, self._pipe.cfg.n_vocab, "the list of tokens")

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """The session to oneself, if it is open."""
        if self._state == "closed":
            raise InputError("this session is closed: open another")
        if not self._lock.acquire(blocking=False):
            raise InputError("this session is in the middle of a call from another thread: use one session a thread")
        try:
            if self._state == "failed":
                raise StageError("this session failed or was interrupted in a step before: close it and open another")
            yield
        finally:
            self._lock.release()


def checked_prompt(prompt: Iterable[int], n_vocab: int, max_ctx: int) -> list[int]:
    """A prompt's ids as plain integers.

    Raises:
        InputError: as `checked_tokens`, or it is longer than the context.
    """
    tokens = checked_tokens(prompt, n_vocab, "the prompt")
    if len(tokens) > max_ctx:
        raise InputError(f"a prompt of {len(tokens)} tokens: the context is {max_ctx}; shorten the prompt")
    return tokens


def checked_tokens(tokens: Iterable[int], n_vocab: int, name: str) -> list[int]:
    """Token ids as plain integers.

    Raises:
        InputError: none, not integers, or outside `[0, n_vocab)`.
    """
    ids = checked_ids(tokens, name)
    if not ids:
        raise InputError(f"{name} is empty: pass at least one token")
    bad = next((t for t in ids if not 0 <= t < n_vocab), None)
    if bad is not None:
        raise InputError(f"{name}: there is no token {bad}; the model's vocabulary is 0 to {n_vocab - 1}")
    return ids


def checked_ids(tokens: Iterable[int], name: str) -> list[int]:
    """Token ids as plain integers, of any size.

    Raises:
        InputError: not an iterable of integers.
    """
    try:
        return [operator.index(t) for t in tokens]
    except TypeError:
        raise InputError(f"{name} must be token ids, integers from the tokenizer") from None


def _chunks(tokens: list[int], size: int) -> list[list[int]]:
    return [tokens[at : at + size] for at in range(0, len(tokens), size)]
