"""`generate_many`: many generations driven from one thread. Whenever some have been answered, all of those go on first, so that
their next rows wait for the stages together; then their tokens are given out."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from ..admission.outcome import Outcome
from ..errors import AdmissionError, StageError
from .calls import Generation
from .sampling import SamplingParams
from .session import Session
from .speculation.drafters import Draft

if TYPE_CHECKING:
    from .pipeline import Pipeline

ADMIT_S = 5.0
"""How long an open waits at a time for bytes; then it looks whether it is still wanted."""

NOBODY = -1
"""No prompt's index: news that only wakes."""

log = logging.getLogger(__name__)


class Ask(NamedTuple):
    """How each prompt is to be continued."""

    most: int
    sampling: SamplingParams | None
    draft: Draft | None

    def options(self) -> dict[str, Any]:
        """What `Pipeline.open` is told."""
        draft = self.draft
        drafts = {"speculate": draft.k, "recurrent": draft.recurrent} if isinstance(draft, Draft) else {}
        return {"max_new_tokens": self.most, **drafts}


class Many:
    """Generations under way, at most `concurrency`, and the prompts still to come.

    Two threads of its own open and close sessions, one opening at a time, so that neither keeps the others waiting.
    """

    def __init__(self, pipe: Pipeline, prompts: Iterable[Iterable[int]], ask: Ask, concurrency: int) -> None:
        self._pipe, self._ask, self._concurrency = pipe, ask, concurrency
        self._prompts = enumerate(prompts)
        self._more = True
        self._opening: tuple[int, Future[Session]] | None = None
        self._going: dict[int, tuple[Session, Generation]] = {}
        self._awaited: dict[int, Outcome[Any]] = {}
        self._news: SimpleQueue[int] = SimpleQueue()
        self._ushers = ThreadPoolExecutor(2, "memra-usher")
        self._closing: list[Future[None]] = []
        self._stopped = False

    def run(self) -> Generator[tuple[int, int], None, None]:
        """The tokens as they come, each with the index of its prompt."""
        tokens: deque[tuple[int, int]] = deque()
        try:
            self._open_next()
            while self._going or self._opening is not None:
                told = {self._news.get()}
                while not self._news.empty():
                    told.add(self._news.get())
                if self._stopped:
                    return
                with self._pipe.scheduler.together():
                    for index in sorted(told):
                        self._go_on(index, tokens)
                while tokens:
                    yield tokens.popleft()
        finally:
            self._end()

    def stop(self) -> None:
        """Ends `run` where it waits, from any thread, and the open that waits for bytes at its next look."""
        self._stopped = True
        self._news.put(NOBODY)

    def _open_next(self) -> None:
        """Opens the next prompt's session, unless one is being opened, or enough are."""
        if self._opening is None and self._more and len(self._going) < self._concurrency:
            index, prompt = next(self._prompts, (-1, ()))
            self._more = index >= 0
            if self._more:
                opening = self._ushers.submit(self._open, prompt)
                self._opening = index, opening
                opening.add_done_callback(lambda _: self._news.put(index))

    def _open(self, prompt: Iterable[int]) -> Session:
        prompt = list(prompt)
        while True:
            try:
                return self._pipe.open(prompt, timeout=ADMIT_S, **self._ask.options())
            except AdmissionError as error:
                if self._stopped or error.verdict is None or error.verdict.retry_after_s is None:
                    raise

    def _go_on(self, index: int, tokens: deque[tuple[int, int]]) -> None:
        if index not in self._going and not self._begin(index):
            return
        session, generation = self._going[index]
        awaited = self._awaited.pop(index, None)
        if awaited is not None and not awaited.done():
            self._awaited[index] = awaited
            return
        for item in generation:
            if isinstance(item, int):
                tokens.append((index, item))
                continue
            item.on_told = partial(self._news.put, index)
            if not item.done():
                self._awaited[index] = item
                return
        del self._going[index]
        self._close_soon(session)
        self._open_next()

    def _begin(self, index: int) -> bool:
        """Takes over the session that was opened for a prompt, if it was; news of one that has ended may come late."""
        if self._opening is None or self._opening[0] != index or not self._opening[1].done():
            return False
        (_, opened), self._opening = self._opening, None
        session = opened.result()
        self._going[index] = session, session.calls.generate(*self._ask)
        self._open_next()
        return True

    def _close_soon(self, session: Session) -> None:
        """Has an usher close a session."""
        try:
            self._closing.append(self._ushers.submit(self._close, session))
        except RuntimeError:  # the interpreter is ending, and starts no thread any more
            self._close(session)
        self._closing = [closing for closing in self._closing if not closing.done()]

    def _close(self, session: Session) -> None:
        try:
            session.close()
        except StageError as error:
            log.warning("a session's close goes on later: %s", error)

    def _end(self) -> None:
        """Closes what is open, and waits until it is; a session that is still being opened is closed when it is."""
        self._stopped = True
        for session, generation in self._going.values():
            generation.close()
            self._close_soon(session)
        if self._opening is not None:
            self._opening[1].add_done_callback(_close_opened)
        wait(self._closing)
        self._ushers.shutdown(wait=False)


def _close_opened(opened: Future[Session]) -> None:
    """Closes a session that nobody wants any more, in the thread that has opened it."""
    if not opened.cancelled() and opened.exception() is None:
        with contextlib.suppress(StageError):
            opened.result().close()
