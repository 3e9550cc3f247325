"""`Calls`: what a session's calls do, whoever waits for them: `Session` in a thread, `aio.Session` in a task.

Each method that crosses the stages is a generator of the outcomes that it must wait for (`work.Steps`), and returns its
result. What it takes, gives and raises is written where the two faces offer it, in `session`.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np

from ..admission import SessionShape
from ..admission.outcome import Outcome
from ..cache import DflashTapSink
from ..errors import InputError, MemraError, checked_int, require
from ..models.protocol import Array
from ..stage.frames import LOGITS, want_code
from . import handover, work
from .books import Books, Slot
from .sampling import Sampler, SamplingParams, judge
from .session_file import Header, Reader
from .speculation.drafters import Draft, checked_drafts
from .steps import Steps
from .tokens import checked_tokens, chunks
from .work import Rewired

if TYPE_CHECKING:
    from .pipeline import Pipeline

LOGITS_CHUNK_BYTES = 64 << 20
"""Logits carried by one frame of a prefill that asks for all of them."""

MAX_LOGITS_BYTES = 4 << 30
"""Logits that one prefill may return."""


Generation: TypeAlias = Generator[Outcome[Any] | int, None, None]


@dataclass(frozen=True)
class Round:
    """What a round gave: `accepted` of its drafts stand, `next` is the token sampled behind them, not fed yet, and `rows` are
    the answers judged: row `i` is the distribution after draft `i - 1`, row 0 the one before every draft."""

    accepted: int
    next: int
    rows: Array


class SessionSnapshot:
    """A place to roll back to, on every stage, as often as wanted. Close it, or leave its `with` or `async with`, to free it
    and its pin."""

    def __init__(self, calls: Calls, slot: Slot) -> None:
        self._calls, self._slot = calls, slot

    @property
    def pos(self) -> int:
        """How many tokens had been fed."""
        return self._slot.mark.pos

    def close(self) -> None:
        """Ends the snapshot; closing twice is fine."""
        self._calls.end_snapshot(self._slot)

    def slot_of(self, calls: Calls) -> Slot:
        """The slot, if the snapshot is this session's.

        Raises:
            InputError: it is another's.
        """
        if self._calls is not calls:
            raise InputError(f"{self._slot.mark.name} is another session's: use one that this session has taken")
        return self._slot

    def __enter__(self) -> SessionSnapshot:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    async def __aenter__(self) -> SessionSnapshot:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Calls:
    """One session's calls, one at a time.

    Attributes:
        taps: the sink that every forward fills, if any.
        books: what the driver knows of the session.
        closed: whether it was closed.
        parked: what it holds, where it was set aside.
        last_logits: the last row's, if they were asked for, f32 `[n_vocab]`.
    """

    def __init__(self, pipe: Pipeline, session_id: int, prompt: list[int], shape: SessionShape) -> None:
        self.shape = shape
        self.taps: DflashTapSink | None = None
        self.books = Books(pipe.cfg, pipe.policy, shape, session_id, pipe.chain.epoch)
        self.closed = False
        self.parked: bytes | None = None
        self._pipe = pipe
        self._prompt = prompt
        self._steps = Steps(pipe, self.books)
        self._next: int | None = None
        self._held: Slot | None = None
        self._drafts: list[int] = []
        self.last_logits: Array | None = None
        self._ended: deque[Slot] = deque()
        self._lock = threading.Lock()

    def drafts_possible(self) -> int:
        """The most drafts that fit in the next round."""
        with self._turn():
            return max(0, min(self.shape.speculate, self.books.rows_possible() - 1))

    def prefill(self, all_logits: bool, want: str) -> work.Steps[Array]:
        with self._turn():
            if self.books.tokens:
                raise InputError(f"the prompt of {len(self._prompt)} tokens was fed already: use extend, decode or verify")
            if not all_logits:
                return (yield from self._feed(self._prompt, self._code(want)))
            return (yield from self._prefill_all(self._code(want)))

    def extend(self, tokens: Iterable[int], want: str) -> work.Steps[Array]:
        with self._turn():
            return (yield from self._feed(self._checked(tokens), self._code(want)))

    def verify(self, tokens: Iterable[int], want: str) -> work.Steps[Array]:
        with self._turn():
            draft = self._checked(tokens)
            if len(draft) > self.shape.speculate + 1:
                raise InputError(
                    f"verify takes at most {self.shape.speculate + 1} tokens in this session, not {len(draft)}: "
                    "open it with a larger speculate"
                )
            self._check(len(draft))
            keep = len(draft) - 1 if self._keeps_states and any(self.books.slots) else 0
            return (yield from self._step(draft, logits=len(draft), want=self._code(want), keep=keep))

    def snapshot(self, pin: bool) -> SessionSnapshot:
        """Needs no stage, now: they are told with the next rows."""
        require(isinstance(pin, bool), InputError, "pin", pin, "True or False")
        with self._turn():
            self._require_fed()
            return SessionSnapshot(self, self.books.snapshot(pin))

    def rollback(self, snap: SessionSnapshot, accept: int) -> None:
        """As `snapshot`."""
        with self._turn():
            require(isinstance(snap, SessionSnapshot), InputError, "snap", snap, "a snapshot that this session has taken")
            self.books.rollback(snap.slot_of(self), checked_int(InputError, "accept", accept, 0, sys.maxsize))
            self._next = self.last_logits = None

    def round(self, drafts: Iterable[int], sampler: Sampler | SamplingParams | None, next: int | None) -> work.Steps[Round]:
        done = yield from self.begin_round(drafts, sampler, next)
        self.end_round(done, done.accepted)
        return done

    def begin_round(
        self, drafts: Iterable[int], sampler: Sampler | SamplingParams | None, next: int | None
    ) -> work.Steps[Round]:
        """A round whose snapshot stays, until `end_round` says how many of the accepted drafts are to stand."""
        with self._turn():
            sampler = sampler if isinstance(sampler, Sampler) else Sampler(sampler)
            first = self._next if next is None else next
            if first is None:
                raise InputError("no token to feed first: pass next=, the one sampled after the rows fed so far")
            tokens = self._checked([first, *checked_drafts(drafts, self.shape.speculate, self._pipe.cfg.n_vocab)])
            self._check(len(tokens))
            return (yield from self._round(tokens, sampler))

    def end_round(self, done: Round, accepted: int) -> None:
        """Ends a round: `accepted` of the drafts that were stand, and the token behind them is the one sampled."""
        slot, self._held = self._held, None
        if slot is None or self.closed or self._steps.ended:
            return
        with self._turn():
            if accepted < done.accepted:
                self.books.rollback(slot, accepted)
                self._next = self._drafts[accepted]
            self.books.end(slot)

    def pick(self, sampler: Sampler, answer: Array) -> int:
        """The token sampled behind the rows fed."""
        with self._turn():
            self._next = sampler.pick(answer, self.books.plan.pos)
            self._pipe.report.count(tokens=1)
            return self._next

    def generate(self, max_new_tokens: int, sampling: SamplingParams | None, draft: Draft | None) -> Generation:
        """Tokens, between what must be waited for."""
        from .generate import generate

        self._require_there()
        if self.books.tokens and self._next is None:
            raise InputError(
                "nothing was sampled behind the rows fed, for generate to go on from: decode, or open a fresh session"
            )
        return generate(self._pipe, self, max_new_tokens, sampling, draft)

    def sampled(self) -> int | None:
        """The token sampled behind the rows fed, which has not been fed; None if none was."""
        return self._next

    def export(self, out: BinaryIO) -> work.Steps[None]:
        """Writes the session to a file that can be sought, from its beginning again if a stage is lost meanwhile."""
        with self._turn():
            yield from self._export(out)

    def park(self) -> work.Steps[None]:
        """Keeps what the session holds in this process; its bytes on the stages are no longer needed."""
        held = io.BytesIO()
        with self._turn():
            yield from self._export(held)
            self.parked = held.getvalue()

    @contextlib.contextmanager
    def unparking(self) -> Iterator[bytes]:
        """The session to oneself, while it is parked; what it holds. It is parked no more if the block comes to its end."""
        with self._alone():
            if self.parked is None:
                raise InputError("this session is not parked")
            yield self.parked
            self.parked = None

    def adopt(self, reader: Reader) -> work.Steps[None]:
        """Has a fresh session, which is this caller's, stand where the file's does. If a stage is lost meanwhile, its tokens
        are fed instead."""
        header = reader.header
        self.books.adopt(list(header.tokens), self._pipe.chain.epoch)
        try:
            yield from handover.take_in(self._pipe, self._steps, self.books, reader)
        except Rewired:
            self.books.restart(None, self._pipe.chain.epoch, 1)
        if self.closed:
            raise InputError("this session was closed in the middle of the call")
        self._next = header.next
        self.last_logits = np.frombuffer(header.logits, np.float32) if header.logits else None

    def _export(self, out: BinaryIO) -> work.Steps[None]:
        self._require_fed()
        first = out.tell()
        while True:
            yield from self._steps.settle()
            try:
                yield from handover.send_out(self._pipe, self._steps, self._header(), self.books, out)
                return
            except Rewired:
                out.seek(first)
                out.truncate()

    def close(self) -> None:
        """Marks the session closed, and ends the call under way."""
        self.closed = True
        self.cancel()

    def cancel(self) -> None:
        """Ends the call under way, and each later one, with SessionCancelled; from any thread."""
        self._steps.cancel()

    def end_snapshot(self, slot: Slot) -> None:
        """Ends a snapshot of this session, if it is live, from any thread: the next call writes it down."""
        self._ended.append(slot)

    @property
    def _keeps_states(self) -> bool:
        return self.shape.recurrent == "states" and self._pipe.cfg.recurrent

    def _prefill_all(self, want: int) -> work.Steps[Array]:
        row_bytes = 4 * self._pipe.cfg.n_vocab
        if len(self._prompt) * row_bytes > MAX_LOGITS_BYTES:
            raise InputError(
                f"all logits of {len(self._prompt)} rows are {len(self._prompt) * row_bytes} bytes, more than "
                f"{MAX_LOGITS_BYTES}: prefill a shorter prompt, or take the last row only"
            )
        chunk = min(self._pipe.prefill_chunk, max(1, LOGITS_CHUNK_BYTES // row_bytes))
        self._check(len(self._prompt), chunk)
        answers = []
        for part in chunks(self._prompt, chunk):
            answers.append((yield from self._step(part, logits=len(part), want=want)))
        return np.concatenate(answers)

    def _feed(self, tokens: list[int], want: int) -> work.Steps[Array]:
        """Feeds tokens in pieces; the answer for the last row."""
        self._check(len(tokens))
        rows = yield from self._step(tokens, split=len(tokens) > 1, logits=1, want=want)
        answer: Array = rows[0]
        return answer

    def _round(self, tokens: list[int], sampler: Sampler) -> work.Steps[Round]:
        drafts, want, base = tokens[1:], self._code(sampler.want), self.books.plan.pos + 1
        if not drafts:
            rows = yield from self._step(tokens, logits=1, want=want)
            accepted, chosen = _judged(sampler, rows, drafts, base)
        else:
            keep = len(drafts) - 1 if self._keeps_states else 0
            rows, slot = yield from self._step_to_snapshot(tokens, logits=len(tokens), want=want, snapshot_at=1, keep=keep)
            accepted = 0
            try:
                accepted, chosen = _judged(sampler, rows, drafts, base)
            except BaseException:
                self.books.rollback(slot, 0)
                self.books.end(slot)
                raise
            self.books.rollback(slot, accepted)
            self._held, self._drafts = slot, drafts
        self._next = chosen
        self._pipe.report.count(tokens=accepted + 1, rounds=1, drafted=len(drafts), accepted=accepted)
        return Round(accepted, chosen, rows)

    def _step_to_snapshot(self, tokens: list[int], **asked: Any) -> work.Steps[tuple[Array, Slot]]:
        """A step that takes a snapshot: its answer rows, and the snapshot."""
        free = self.books.free_slot()
        rows = yield from self._step(tokens, **asked)
        return rows, self.books.held(free)

    def _step(self, tokens: list[int], **asked: Any) -> work.Steps[Array]:
        if tokens:
            self._next = self.last_logits = None
        rows = yield from self._steps.run(tokens, self.taps, **asked)
        if asked.get("want") == LOGITS and len(rows):
            self.last_logits = rows[-1]
        return rows

    def _header(self) -> Header:
        logits = b"" if self.last_logits is None else self.last_logits.tobytes()
        return handover.header_of(self._pipe, self.shape, self.books.tokens, self._next, logits)

    def _check(self, rows: int, chunk: int | None = None) -> None:
        self._steps.check(rows, self.taps, chunk)

    def _code(self, want: str) -> int:
        return want_code(want, self._pipe.cfg.n_vocab)

    def _require_fed(self) -> None:
        if not self.books.tokens:
            raise InputError("nothing has been fed yet: call prefill first")

    def _require_there(self) -> None:
        if self.closed:
            raise InputError("this session is closed: open another")
        if self.parked is not None:
            raise InputError("this session is parked: call unpark first")

    def _checked(self, tokens: Iterable[int]) -> list[int]:
        self._require_fed()
        return checked_tokens(tokens, self._pipe.cfg.n_vocab, "the list of tokens")

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """The session to oneself, if it is open and on the stages."""
        self._require_there()
        with self._alone():
            self._require_there()
            while self._ended:
                self.books.end(self._ended.popleft())
            try:
                yield
            except Exception:
                raise
            except BaseException:  # an interrupt: what stands is not known
                self._steps.failed = True
                raise

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if self.closed:
            raise InputError("this session is closed: open another")
        if not self._lock.acquire(blocking=False):
            raise InputError("this session is in the middle of another call: use one session a thread or task")
        try:
            self._steps.require_usable()
            yield
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
