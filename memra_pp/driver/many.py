"""`generate_many`: many generations driven from one thread. Whenever some have been answered, all of those go on first, so that
their next rows wait for the stages together; then their tokens are given out."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from ..admission.outcome import Outcome
from ..errors import AdmissionError, StageError
from .calls import Generation
from .door import LOOK_S
from .sampling import SamplingParams
from .session import Session
from .speculation.drafters import Draft

if TYPE_CHECKING:
    from .pipeline import Pipeline

MOST_OPENING = 8
"""Sessions that are being opened at a time: an open crosses the stages behind whatever is on its way there."""

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

    Threads of its own open and close sessions, so that neither keeps the others waiting; some may wait for bytes, and one is
    always left to give some back.
    """

    def __init__(self, pipe: Pipeline, prompts: Iterable[Iterable[int]], ask: Ask, concurrency: int) -> None:
        self._pipe, self._ask, self._concurrency = pipe, ask, concurrency
        self._prompts = enumerate(prompts)
        self._more = True
        self._opening: dict[int, Future[Session]] = {}
        self._going: dict[int, tuple[Session, Generation]] = {}
        self._awaited: dict[int, Outcome[Any]] = {}
        self._news: SimpleQueue[int] = SimpleQueue()
        self._ushers = ThreadPoolExecutor(MOST_OPENING + 1, "memra-usher")
        self._closing: list[Future[None]] = []
        self._stopped = False

    def run(self) -> Generator[tuple[int, int], None, None]:
        """The tokens as they come, each with the index of its prompt."""
        tokens: deque[tuple[int, int]] = deque()
        try:
            self._open_next()
            while self._going or self._opening:
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
        """Has the next prompts' sessions opened, as many as may be at a time."""
        while self._more and len(self._opening) < min(MOST_OPENING, self._concurrency - len(self._going)):
            index, prompt = next(self._prompts, (NOBODY, ()))
            self._more = index != NOBODY
            if self._more:
                opening = self._opening[index] = self._ushers.submit(self._open, prompt)
                opening.add_done_callback(partial(self._opened, index))

    def _opened(self, index: int, _: Future[Session]) -> None:
        self._news.put(index)

    def _open(self, prompt: Iterable[int]) -> Session:
        prompt = list(prompt)
        while True:
            try:
                return self._pipe.open_wanted(prompt, self._ask, lambda: not self._stopped)
            except AdmissionError as error:
                if self._stopped or error.verdict is None or error.verdict.retry_after_s is None:
                    raise
                time.sleep(min(error.verdict.retry_after_s, LOOK_S))

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
        self._close_soon(session.close)
        self._open_next()

    def _begin(self, index: int) -> bool:
        """Takes over the session that was opened for a prompt, if it was; news of one that has ended may come late."""
        if index not in self._opening or not self._opening[index].done():
            return False
        opened = self._opening.pop(index)
        session = opened.result()
        self._going[index] = session, session.calls.generate(*self._ask)
        self._open_next()
        return True

    def _close_soon(self, close: Callable[[], None]) -> None:
        """Has an usher close a session."""
        try:
            self._closing.append(self._ushers.submit(_whatever_it_meets, close))
        except RuntimeError:  # the interpreter is ending, and starts no thread any more
            _whatever_it_meets(close)
        self._closing = [closing for closing in self._closing if not closing.done()]

    def _end(self) -> None:
        """Closes what is open, or being opened, and waits until it is closed."""
        self._stopped = True
        for session, generation in self._going.values():
            generation.close()
            self._close_soon(session.close)
        for opening in self._opening.values():
            self._close_soon(partial(_close_opened, opening))
        wait(self._closing)
        self._ushers.shutdown(wait=False)


def _whatever_it_meets(close: Callable[[], None]) -> None:
    try:
        close()
    except StageError as error:
        log.warning("a session's close goes on later: %s", error)


def _close_opened(opening: Future[Session]) -> None:
    """Closes a session that nobody wants any more, once it is open."""
    if opening.exception() is None:
        opening.result().close()
