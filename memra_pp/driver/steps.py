"""`Steps`: one session's steps through the stages, behind whatever is owed, and the one more try that a fault costs."""

from __future__ import annotations

import logging
import sys
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..cache import DflashTapSink
from ..errors import CacheError, InputError, SessionCancelled, StageError, checked_int, require
from ..models.protocol import Array
from ..stage.frames import ARGMAX, LOGITS, MAX_BODY_BYTES, RESET, TOPK, Entry, Note
from ..stage.taps import MAX_TAPS
from . import work
from .books import Books, Step
from .work import Reply, Rewired, Work

if TYPE_CHECKING:
    from .pipeline import Pipeline

MAX_TAP_BYTES = MAX_BODY_BYTES // 4
"""Taps that one frame carries, beside rows and answers."""

NO_ANSWER = np.empty(0, np.float32)

log = logging.getLogger(__name__)


class _Sent(NamedTuple):
    """A step on its way, and where its new rows begin in what is being fed."""

    step: Step
    work: Work
    at: int


class Steps:
    """Sends what `books` prepares.

    `failed` is true while a call is under way, and stays so where it is not known what the stages have applied: after an
    interrupt, a lost stage or a second fault.
    """

    def __init__(self, pipe: Pipeline, books: Books) -> None:
        self.failed = False
        self._pipe, self._books = pipe, books
        self._sent: deque[_Sent] = deque()
        self._cancelled: SessionCancelled | None = None
        self._asking: Work | None = None

    @property
    def ended(self) -> bool:
        """Whether no more steps can be taken."""
        return self.failed or self._cancelled is not None

    def require_usable(self) -> None:
        """Raises SessionCancelled or StageError if no more steps can be taken."""
        if self._cancelled is not None:
            raise self._cancelled
        if self.failed:
            raise StageError("this session failed or was interrupted in a step before: close it and open another")

    def check(self, rows: int, taps: DflashTapSink | None, chunk: int | None) -> None:
        """Whether `rows` new rows can be fed in steps of at most `chunk` (None: the pipeline's).

        Raises:
            CacheError: they do not fit the context, the rings, what a snapshot pins, or the taps.
            InputError: the taps are none of this model, or more than a frame carries.
        """
        chunk = chunk or self._pipe.prefill_chunk
        self._books.check(rows, chunk)
        if taps is not None:
            self._check_taps(taps, rows, chunk)

    def _check_taps(self, taps: DflashTapSink, rows: int, chunk: int) -> None:
        cfg = self._pipe.cfg
        require(isinstance(taps, DflashTapSink), InputError, "dflash_taps", taps, "a DflashTapSink, or None")
        for il in taps.layer_ids:
            checked_int(InputError, "a tapped layer", il, 0, cfg.n_trunk - 1)
        checked_int(InputError, "the base of the taps", taps.base, 0, sys.maxsize)
        width = len(taps.layer_ids) * cfg.n_embd
        wanted = taps.hidden == cfg.n_embd and taps.buf.shape == (taps.t, width) and taps.buf.dtype == np.float32
        if not wanted:
            raise InputError(
                f"taps of {len(taps.layer_ids)} layers, hidden={taps.hidden}, in {taps.buf.dtype} {taps.buf.shape}: it "
                f"must be float32 {(taps.t, width)} for this model, {cfg.n_embd} wide"
            )
        most = MAX_TAP_BYTES // (4 * width) if width else rows
        if len(taps.layer_ids) > MAX_TAPS or min(rows, chunk) > most:
            raise InputError(
                f"taps of {len(taps.layer_ids)} layers over steps of {min(rows, chunk)} rows: at most {MAX_TAPS} layers and "
                f"{most} rows travel; tap fewer layers, or launch with a smaller prefill_chunk"
            )
        if taps.base + rows > taps.t:
            raise CacheError(
                f"{rows} rows behind row {taps.base} do not fit in taps of {taps.t}: arm a larger sink, or set its base to 0"
            )

    def run(self, tokens: list[int], taps: DflashTapSink | None, *, split: bool = False, **asked: Any) -> work.Steps[Array]:
        """A step of `tokens`, as `Books.step` prepares it, behind whatever is owed; its answer rows, and the taps filled.

        With `split`, several steps one behind the other, one more than can be on their way at once, so that no stage waits for
        the next one; `asked` is of the last.
        A stage's fault costs a replay of every token before it and one more try, a stage that is lost a replay.

        Raises:
            StageError: it fails again, or a stage is lost.
            CacheError: as `Books.step`; nothing has changed.
            SessionCancelled: `cancel` was called.
        """
        sent, answers = self._sent, NO_ANSWER
        at, final, faulted = 0, False, False
        losses, lost_at, most_losses = 0, 0, self._pipe.chain.most_losses
        try:
            while sent or not final:
                if self._cancelled is not None:
                    raise self._cancelled
                if not sent:
                    self._follow()
                if not final and len(sent) <= self._pipe.chain.overlap:
                    alone = faulted or losses + 1 >= most_losses
                    part = tokens[at : at + self._pipe.scheduler.piece_rows(len(tokens) - at)] if split else tokens
                    final = at + len(part) == len(tokens)
                    self._begin(part, at, taps, asked if final else {}, prefill=split, alone=alone)
                    at += len(part)
                    continue
                yield sent[0].work
                first, reply = sent[0], _reply(sent[0].work)
                if isinstance(reply, Reply) and reply.fault is None:
                    sent.popleft()
                    answers = _answers(reply, asked.get("want", LOGITS), taps, len(first.step.fed))
                    if first.step.fed and first.at >= lost_at:
                        losses = 0
                    continue
                if isinstance(reply, Rewired):
                    losses, lost_at = losses + reply.on_its_way, first.at
                    if losses >= most_losses and reply.by_itself:
                        raise StageError(
                            f"{self}: {losses} stages in a row were lost at this step, the last at no other: close it"
                        )
                elif reply.fault is not None:
                    stage, kind, message = reply.fault
                    if faulted:
                        raise StageError(f"{self} failed on stage {stage}: {message} ({kind}); close it and open another")
                    log.warning("%s failed on stage %d (%s: %s): replaying its tokens", self, stage, kind, message)
                    faulted = True
                yield from self._restart(first.step)
                at, final = first.at, False
            self.failed = False
            return answers
        finally:
            self._withdraw()

    def settle(self) -> work.Steps[None]:
        """Tells the stages all that is owed, so that they stand where the caller does. Raises as `run`."""
        self._follow()
        if self._books.untold:
            yield from self.run([], None)

    def cancel(self) -> None:
        """Ends the call under way, from any thread, and every later one: they raise SessionCancelled."""
        self._cancelled = SessionCancelled(f"{self} was cancelled: close it")
        for sent in tuple(self._sent):
            sent.work.fail(self._cancelled)
        if (asking := self._asking) is not None:
            asking.fail(self._cancelled)

    def ask(self, entry: Entry, arrays: list[Array], note: Note | None) -> work.Steps[Reply]:
        """Sends an entry that is no step; what comes back.

        Raises:
            Rewired: a stage was lost meanwhile.
            SessionCancelled: `cancel` was called.
        """
        asking = self._asking = Work(entry, arrays, self._pipe.step_timeout, note)
        try:
            if self._cancelled is not None:
                raise self._cancelled
            self._pipe.scheduler.submit(asking)
            yield asking
            return asking.result()
        finally:
            self._asking = None

    def __str__(self) -> str:
        return f"session {self._books.session}"

    def _begin(
        self, part: list[int], at: int, taps: DflashTapSink | None, asked: dict[str, Any], *, prefill: bool, alone: bool
    ) -> None:
        """Sends what must go ahead of a step, then the step."""
        books, chunk = self._books, self._pipe.prefill_chunk
        while (ahead := books.ahead(len(part), chunk, "snapshot_at" in asked)) is not None:
            prefill = True  # the step behind it waits in the same queue
            self._send(books.replay_step(*ahead), at, None, prefill=prefill, alone=alone)
        note: Note | None = None
        if taps is not None and part:
            note = {"taps": {"layers": [int(il) for il in taps.layer_ids], "rows": len(part), "parts": []}}
        if part or books.untold:
            self._send(books.step(part, **asked), at, note, prefill=prefill, alone=alone)

    def _send(self, step: Step, at: int, note: Note | None, *, prefill: bool, alone: bool) -> None:
        arrays = [np.array(step.rows, np.int32)] if step.rows else []
        sent = Work(
            step.entry,
            arrays,
            self._pipe.step_timeout,
            note,
            prefill=prefill,
            alone=alone,
            n_bytes=self._bytes(step.entry, note),
        )
        self.failed = True
        self._books.commit(step)
        self._sent.append(_Sent(step, sent, at))
        self._pipe.scheduler.submit(sent)

    def _bytes(self, entry: Entry, note: Note | None) -> int:
        """The most that a step's rows, answers and taps take of a frame on any lane."""
        cfg = self._pipe.cfg
        width = 4 * cfg.n_vocab if entry.want == LOGITS else TOPK.itemsize * max(1, entry.want - ARGMAX)
        tapped = 4 * cfg.n_embd * entry.rows * len(note["taps"]["layers"]) if note else 0
        return max(4 * cfg.n_embd * entry.rows, width * entry.logits) + tapped

    def _follow(self) -> None:
        """Begins the epoch that the stages are in: they have the session, and it is empty."""
        books, epoch = self._books, self._pipe.chain.epoch
        if books.epoch != epoch:
            self._pipe.report.count(rebuilds=bool(books.tokens))
            books.restart(None, epoch, 1)

    def _restart(self, lost: Step) -> work.Steps[None]:
        """Empties the session on every stage, once all that was sent is back; what it held is owed. Stages that were wired anew
        have it empty already."""
        books, pipe, rewired = self._books, self._pipe, False
        while self._sent:
            yield self._sent[0].work
            rewired |= isinstance(_reply(self._sent.popleft().work), Rewired)
        if not rewired:
            reset = Work(Entry(RESET, books.session, books.seq, books.epoch), [], pipe.step_timeout)
            pipe.scheduler.submit(reset)
            yield reset
            reply = _reply(reset)
            rewired = isinstance(reply, Rewired)
            if isinstance(reply, Reply) and reply.fault is not None:
                stage, _, message = reply.fault
                raise StageError(f"{self} could not be reset on stage {stage}: {message}; close it and open another")
        books.restart(lost, *((pipe.chain.epoch, 1) if rewired else (books.epoch, books.seq + 1)))
        pipe.report.count(rebuilds=1)

    def _withdraw(self) -> None:
        """Takes back what has not left yet, and waits no more for what has."""
        for sent in self._sent:
            sent.work.cancel()
        self._sent.clear()


def _reply(sent: Work) -> Reply | Rewired:
    """What came back, or that it was lost and the stages were wired anew."""
    try:
        return sent.result()
    except Rewired as lost:
        return lost


def _answers(reply: Reply, want: int, taps: DflashTapSink | None, rows: int) -> Array:
    """The answer rows; the taps go where they belong."""
    if taps is not None:
        for array, slots in reply.taps:
            taps.place(slots, array)
        taps.base += rows
    if reply.answers is None:
        return NO_ANSWER
    return reply.answers.view(TOPK) if want > ARGMAX else reply.answers
