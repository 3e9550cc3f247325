"""`Steps`: one session's steps through the chain, behind whatever is owed, and the one more try that a fault costs."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from ..cache import DflashTapSink
from ..errors import CacheError, InputError, StageError, checked_int, require
from ..models.protocol import Array
from ..stage.frames import ARGMAX, LOGITS, MAX_BODY_BYTES, RESET, TOPK, Entry, Frame, Note
from ..stage.taps import MAX_TAPS
from .books import Books, Step

if TYPE_CHECKING:
    from .pipeline import Pipeline

MAX_TAP_BYTES = MAX_BODY_BYTES // 4
"""Taps that one frame carries, beside rows and answers."""

log = logging.getLogger(__name__)


class Steps:
    """Sends what `books` prepares, and writes it down there once every stage has applied it.

    `failed` is true once it is not known what the stages have applied: after an interrupt, a lost stage or a second fault.
    """

    def __init__(self, pipe: Pipeline, books: Books) -> None:
        self.failed = False
        self._pipe, self._books = pipe, books

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

    def run(self, tokens: list[int], taps: DflashTapSink | None, **asked: Any) -> Array:
        """A step of `tokens`, as `Books.step` prepares it, behind whatever is owed; its answer rows, and the taps filled.

        A stage's fault costs a replay of every token and one more try.

        Raises:
            StageError: it fails again, or a stage is lost.
            CacheError: as `Books.step`; nothing has changed.
        """
        reply = self._try(tokens, taps, asked)
        if (fault := reply.fault(0)) is not None:
            log.warning("%s failed on stage %d (%s: %s): replaying its tokens", self, *fault)
            self._reset()
            reply = self._try(tokens, taps, asked)
        if (fault := reply.fault(0)) is not None:
            stage, kind, message = fault
            raise StageError(f"{self} failed on stage {stage}: {message} ({kind}); close it and open another")
        return _answers(reply, asked.get("want", LOGITS), taps, len(tokens))

    def __str__(self) -> str:
        return f"session {self._books.session}"

    def _try(self, tokens: list[int], taps: DflashTapSink | None, asked: dict[str, Any]) -> Frame:
        """Sends what must go ahead of the step, then the step: its reply, or the first that has a fault."""
        books, epoch, chunk = self._books, self._pipe.chain.epoch, self._pipe.prefill_chunk
        while (ahead := books.ahead(len(tokens), chunk)) is not None:
            reply = self._send(books.replay_step(epoch, *ahead), None)
            if reply.fault(0) is not None:
                return reply
        note: Note | None = None
        if taps is not None and tokens:
            note = {"taps": {"layers": [int(il) for il in taps.layer_ids], "rows": len(tokens), "parts": []}}
        return self._send(books.step(epoch, tokens, **asked), note)

    def _send(self, step: Step, note: Note | None) -> Frame:
        """One step through the chain, written down if every stage has applied it."""
        chain, before = self._pipe.chain, self.failed
        arrays = [np.array(step.rows, np.int32)] if step.rows else []
        self.failed = True
        try:
            reply = chain.roundtrip(step.entry, arrays, self._pipe.step_timeout, note)
        except InputError:
            self.failed = before
            raise
        if reply.fault(0) is not None:
            return reply
        if reply.hops != chain.stages:
            raise StageError(f"{reply.hops} of {chain.stages} stages applied a step of {self}; close it")
        self._books.commit(step)
        self.failed = False
        return reply

    def _reset(self) -> None:
        """Empties the session on every stage; what it held is owed."""
        books, chain = self._books, self._pipe.chain
        reply = chain.roundtrip(Entry(RESET, books.session, books.seq + 1, chain.epoch), [], self._pipe.step_timeout)
        if (fault := reply.fault(0)) is not None:
            raise StageError(f"{self} could not be reset on stage {fault[0]}: {fault[2]}; close it and open another")
        books.restart()
        self._pipe.count(rebuilds=1)


def _answers(reply: Frame, want: int, taps: DflashTapSink | None, rows: int) -> Array:
    """The answer rows; behind them came the taps, which go where they belong."""
    parts = reply.notes.get(0, {}).get("taps", {}).get("parts", [])
    n_answers = len(reply.arrays) - len(parts)
    if taps is not None:
        for array, slots in parts:
            taps.place(slots, reply.arrays[n_answers + array])
        taps.base += rows
    if not n_answers:
        return np.empty(0, np.float32)
    return reply.arrays[0].view(TOPK) if want > ARGMAX else reply.arrays[0]
