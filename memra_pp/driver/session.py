"""`Session`: one sequence's tokens through the pipeline. What goes in are token ids, what comes back are logits rows."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..admission import SessionShape
from ..cache import DflashTapSink
from ..errors import InputError, MemraError, StageError, checked_int, require
from ..models.protocol import Array
from ..stage.frames import want_code
from .books import Books, Slot
from .drafters import Draft, checked_drafts
from .sampling import Sampler, SamplingParams, judge
from .steps import Steps
from .tokens import checked_tokens, chunks

if TYPE_CHECKING:
    from .pipeline import Pipeline

LOGITS_CHUNK_BYTES = 64 << 20
"""Logits carried by one frame of a prefill that asks for all of them."""

MAX_LOGITS_BYTES = 4 << 30
"""Logits that one prefill may return."""


@dataclass(frozen=True)
class Round:
    """What a round gave: `accepted` of its drafts stand, `next` is the token sampled behind them, not fed yet, and `rows` are
    the answers judged: row `i` is the distribution after draft `i - 1`, row 0 the one before every draft."""

    accepted: int
    next: int
    rows: Array


class SessionSnapshot:
    """A place to roll back to, on every stage, as often as wanted. Close it, or leave its `with`, to free it and its pin."""

    def __init__(self, session: Session, slot: Slot) -> None:
        self._session, self._slot = session, slot

    @property
    def pos(self) -> int:
        """How many tokens had been fed."""
        return self._slot.mark.pos

    def close(self) -> None:
        """Ends the snapshot; closing twice is fine."""
        self._session.end_snapshot(self._slot)

    def slot_of(self, session: Session) -> Slot:
        """The slot, if the snapshot is this session's.

        Raises:
            InputError: it is another's.
        """
        if self._session is not session:
            raise InputError(f"{self._slot.mark.name} is another session's: use one that this session has taken")
        return self._slot

    def __enter__(self) -> SessionSnapshot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Session:
    """A sequence on every stage. Open one with `Pipeline.open`; use it as a context manager.

    A call that is refused (`InputError`, `CacheError`) has changed nothing. A step that a stage's device fails is made good by
    replaying the tokens once; if it fails again, `StageError`: close the session and open another.

    `want` of a call says what is answered for a row: its `logits` (f32 `[n_vocab]`), their `argmax` (i32 `[]`), or `topk:n`
    (`[n]` with the fields `id`, i4, and `logit`, f4, best first). Only that crosses the lanes.

    `dflash_taps`, when set, is a sink that every forward fills: the residual rows of the tokens fed, from row `base` on, which
    moves on with them.
    """

    def __init__(self, pipe: Pipeline, session_id: int, prompt: list[int], shape: SessionShape) -> None:
        self.id = session_id
        self.shape = shape
        self.dflash_taps: DflashTapSink | None = None
        self._pipe = pipe
        self._prompt = prompt
        self._books = Books(pipe.cfg, pipe.policy, shape, session_id)
        self._steps = Steps(pipe, self._books)
        self._next: int | None = None
        self._closed = False
        self._ended: deque[Slot] = deque()
        self._lock = threading.Lock()

    @property
    def tokens(self) -> list[int]:
        """The tokens fed and not rolled back, oldest first."""
        return list(self._books.tokens)

    @property
    def pos(self) -> int:
        """How many they are."""
        return self._books.plan.pos

    @property
    def drafts_possible(self) -> int:
        """The most drafts that fit in the next round: its base, the context and the rings allow no more."""
        with self._turn():
            return max(0, min(self.shape.speculate, self._books.rows_possible() - 1))

    def prefill(self, all_logits: bool = False, want: str = "logits") -> Array:
        """Feeds the prompt, in chunks; the answer for its last row, f32 `[n_vocab]`, or for all, `[len(prompt), n_vocab]`.

        Raises:
            InputError: it was fed already, or all logits are more than 4 GiB.
            StageError: a stage failed.
        """
        with self._turn():
            if self._books.tokens:
                raise InputError(f"the prompt of {len(self._prompt)} tokens was fed already: use extend, decode or verify")
            if not all_logits:
                return self._feed(self._prompt, self._code(want))
            return self._prefill_all(self._code(want))

    def extend(self, tokens: Iterable[int], want: str = "logits") -> Array:
        """Feeds more tokens, in chunks: the next turn of a dialogue, say. The answer for the last row, f32 `[n_vocab]`.

        Raises:
            InputError: no tokens, or bad ones; nothing was fed.
            CacheError: they do not fit the session's context, or a live snapshot's rows; nothing was fed.
            StageError: a stage failed.
        """
        with self._turn():
            return self._feed(self._checked(tokens), self._code(want))

    def decode(self, token: int, want: str = "logits") -> Array:
        """Feeds one token; f32 `[n_vocab]`, the distribution after it. Raises as `extend`."""
        with self._turn():
            return self._feed(self._checked([token]), self._code(want))

    def verify(self, tokens: Iterable[int], want: str = "logits") -> Array:
        """Feeds a draft in one step; f32 `[len(tokens), n_vocab]`, row `i` being the distribution after token `i`.

        All rows stand until `rollback` to a snapshot taken before.

        Raises:
            InputError: no tokens, bad ones, or more than `speculate + 1`; nothing was fed.
            CacheError: they do not fit the session's context, its rings or a live snapshot; nothing was fed.
            StageError: a stage failed.
        """
        with self._turn():
            draft = self._checked(tokens)
            if len(draft) > self.shape.speculate + 1:
                raise InputError(
                    f"verify takes at most {self.shape.speculate + 1} tokens in this session, not {len(draft)}: "
                    "open it with a larger speculate"
                )
            self._check(len(draft))
            keep = len(draft) - 1 if self._keeps_states and any(self._books.slots) else 0
            return self._step(draft, logits=len(draft), want=self._code(want), keep=keep)

    def snapshot(self, pin: bool = True) -> SessionSnapshot:
        """Takes a snapshot where the session stands, on every stage, in one traversal.

        A pinned one keeps the rows it needs: appends that would overwrite them are refused. One that is not pinned can be
        lapped, and then no longer restored.

        Raises:
            InputError: nothing has been fed yet, or `pin` is not a bool.
            CapacityExceeded: as many are live as the session was opened with.
        """
        require(isinstance(pin, bool), InputError, "pin", pin, "True or False")
        with self._turn():
            self._require_fed()
            _, slot = self._step_to_snapshot([], snapshot_at=0, pin=pin)
            return SessionSnapshot(self, slot)

    def rollback(self, snap: SessionSnapshot, accept: int) -> None:
        """Stands at `snap.pos + accept` again, state and all; snapshots taken since `snap` have ended.

        Costs no traversal: the stages go back when the next rows come, replaying the accepted ones where the model has
        recurrent state and did not keep the state wanted.

        Raises:
            InputError: the snapshot is another session's, or `accept` is not an integer.
            RingLapped: rows it needs are overwritten: full re-prime required. Nothing has changed.
            CacheError: it has ended, or fewer than `accept` tokens were fed since. Nothing has changed.
        """
        with self._turn():
            require(isinstance(snap, SessionSnapshot), InputError, "snap", snap, "a snapshot that this session has taken")
            self._books.rollback(snap.slot_of(self), checked_int(InputError, "accept", accept, 0, sys.maxsize))
            self._next = None

    def round(
        self, drafts: Iterable[int], sampler: Sampler | SamplingParams | None = None, *, next: int | None = None
    ) -> Round:
        """One draft/verify round, in one traversal: feeds the token sampled last and `drafts` behind it, keeps the drafts that
        `sampler` would have sampled itself, rolls the others back, and samples the token after them.

        What is rolled back rides in front of the next step; so does its replay, which a round never lets grow.

        Args:
            drafts: at most `speculate` (see `drafts_possible`); none makes it a plain decode.
            sampler: how tokens are picked (None: greedily).
            next: the token to feed first (None: `next` of the round before).

        Raises:
            InputError: a bad token or draft, or no token to feed first: nothing was fed. Or the sampler failed: `next` was
                fed, and no draft stands.
            CacheError: the rows do not fit, or no snapshot is free for the round; nothing was fed.
            StageError: a stage failed.
        """
        with self._turn():
            sampler = sampler if isinstance(sampler, Sampler) else Sampler(sampler)
            first = self._next if next is None else next
            if first is None:
                raise InputError("no token to feed first: pass next=, the one sampled after the rows fed so far")
            tokens = self._checked([first, *checked_drafts(drafts, self.shape.speculate, self._pipe.cfg.n_vocab)])
            self._check(len(tokens))
            return self._round(tokens, sampler)

    def generate(
        self, max_new_tokens: int, sampling: SamplingParams | None = None, draft: Draft | None = None
    ) -> Iterator[int]:
        """Tokens after the prompt of a fresh session, one by one: see `Pipeline.generate`. `draft.k` may not exceed the
        session's `speculate`."""
        from .generate import generate

        if self._books.tokens:
            raise InputError("generate begins with the prompt, which was fed already: open a fresh session, or decode")
        return generate(self._pipe, self, max_new_tokens, sampling, draft)

    def close(self) -> None:
        """Gives the session's bytes back on every stage; closing twice is fine."""
        if self._closed:
            return
        self._pipe.end_later(self)  # first of all, so that an interrupt finds it either open or ending
        self._closed = True
        try:
            self._pipe.release(self)
        except StageError:
            if not self._pipe.chain.failed:
                raise

    def abandon(self) -> None:
        """Marks the session closed because its pipeline closes."""
        self._closed = True

    def end_snapshot(self, slot: Slot) -> None:
        """Ends a snapshot of this session, if it is live, from any thread: the next call writes it down."""
        self._ended.append(slot)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def _keeps_states(self) -> bool:
        return self.shape.recurrent == "states" and self._pipe.cfg.recurrent

    def _prefill_all(self, want: int) -> Array:
        row_bytes = 4 * self._pipe.cfg.n_vocab
        if len(self._prompt) * row_bytes > MAX_LOGITS_BYTES:
            raise InputError(
                f"all logits of {len(self._prompt)} rows are {len(self._prompt) * row_bytes} bytes, more than "
                f"{MAX_LOGITS_BYTES}: prefill a shorter prompt, or take the last row only"
            )
        chunk = min(self._pipe.prefill_chunk, max(1, LOGITS_CHUNK_BYTES // row_bytes))
        self._check(len(self._prompt), chunk)
        return np.concatenate([self._step(part, logits=len(part), want=want) for part in chunks(self._prompt, chunk)])

    def _feed(self, tokens: list[int], want: int) -> Array:
        """Feeds tokens in chunks; the answer for the last row."""
        chunk = self._pipe.prefill_chunk
        self._check(len(tokens))
        *head, last = chunks(tokens, chunk)
        for part in head:
            self._step(part)
        answer: Array = self._step(last, logits=1, want=want)[0]
        return answer

    def _round(self, tokens: list[int], sampler: Sampler) -> Round:
        drafts, want, base = tokens[1:], self._code(sampler.want), self.pos + 1
        if not drafts:
            rows = self._step(tokens, logits=1, want=want)
            accepted, chosen = _judged(sampler, rows, drafts, base)
        else:
            keep = len(drafts) - 1 if self._keeps_states else 0
            rows, slot = self._step_to_snapshot(tokens, logits=len(tokens), want=want, snapshot_at=1, keep=keep)
            accepted = 0
            try:
                accepted, chosen = _judged(sampler, rows, drafts, base)
            finally:
                self._books.rollback(slot, accepted)
                self._books.end(slot)
        self._next = chosen
        self._pipe.count(rounds=1, drafted=len(drafts), accepted=accepted)
        return Round(accepted, chosen, rows)

    def _step_to_snapshot(self, tokens: list[int], **asked: Any) -> tuple[Array, Slot]:
        """A step that takes a snapshot: its answer rows, and the snapshot."""
        free = self._books.free_slot()
        rows = self._step(tokens, **asked)
        return rows, self._books.held(free)

    def _step(self, tokens: list[int], **asked: Any) -> Array:
        if tokens:
            self._next = None
        return self._steps.run(tokens, self.dflash_taps, **asked)

    def _check(self, rows: int, chunk: int | None = None) -> None:
        self._steps.check(rows, self.dflash_taps, chunk)

    def _code(self, want: str) -> int:
        return want_code(want, self._pipe.cfg.n_vocab)

    def _require_fed(self) -> None:
        if not self._books.tokens:
            raise InputError("nothing has been fed yet: call prefill first")

    def _checked(self, tokens: Iterable[int]) -> list[int]:
        self._require_fed()
        return checked_tokens(tokens, self._pipe.cfg.n_vocab, "the list of tokens")

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """The session to oneself, if it is open."""
        if self._closed:
            raise InputError("this session is closed: open another")
        if not self._lock.acquire(blocking=False):
            raise InputError("this session is in the middle of a call from another thread: use one session a thread")
        try:
            if self._steps.failed:
                raise StageError("this session failed or was interrupted in a step before: close it and open another")
            while self._ended:
                self._books.end(self._ended.popleft())
            yield
        except Exception:
            raise
        except BaseException:  # an interrupt: what stands is not known
            self._steps.failed = True
            raise
        finally:
            self._lock.release()


def _judged(sampler: Sampler, rows: Array, drafts: list[int], position: int) -> tuple[int, int]:
    """`judge`, with what a sampler of the user's raises as an `InputError`."""
    try:
        return judge(sampler, rows, drafts, position)
    except MemraError:
        raise
    except Exception as error:
        raise InputError(f"the sampler failed ({type(error).__name__}: {error}): no draft of this round stands") from error
