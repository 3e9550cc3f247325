"""`generate_many`: many generations at once.

One that was answered goes on in the scheduler's thread, which has the answer: its next rows are there before the stages are
free, whatever the other threads do. Where that could take long, or tokens of its own are still to be taken, it goes on in the
thread of whoever takes them, and all that were answered together, before their tokens are given out.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from ..admission.outcome import Outcome
from ..errors import AdmissionError, StageError
from .door import LOOK_S
from .sampling import SamplingParams
from .session import Session
from .speculation.drafters import Draft
from .tokens import checked_prompt
from .ushers import Ushers

if TYPE_CHECKING:
    from .pipeline import Pipeline

MOST_OPENING = 8
"""Sessions that are being opened at a time: an open crosses the stages behind whatever is on its way there."""

NOBODY = -1
"""No prompt's index: news that only wakes."""

QUICK_TOP_K = 256
"""Most tokens of a distribution that the scheduler's thread samples from."""

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

    @property
    def quick(self) -> bool:
        """Whether a generation goes on within a moment, in code of ours: it drafts nothing, looks for no text, and samples from
        few tokens."""
        params = SamplingParams(temperature=0.0) if self.sampling is None else self.sampling
        few = type(params) is SamplingParams and (params.temperature == 0 or 0 < params.top_k <= QUICK_TOP_K)
        return self.draft is None and few and not params.stop


class _News(NamedTuple):
    """A token of a prompt, or (None) that the prompt is to be looked after."""

    prompt: int
    token: int | None = None


class _Going:
    """A generation under way, and what it awaits: of those who see that it was told, the one who claims it goes on.

    Tokens must come in order though two threads may give them: whoever begins to go on sees that all before were taken.
    `given` counts the tokens, `taken` those that whoever takes them is done with. `ended` says that there are no more, and
    `error` what has ended it, if something has.
    """

    def __init__(self, session: Session, ask: Ask) -> None:
        self.session, self._tokens = session, session.calls.generate(*ask)
        self._awaited: Outcome[Any] | None = None
        self._unclaimed: deque[Outcome[Any]] = deque()  # none or one: `remove` is a test and a change in one
        self.given = self.taken = 0
        self.ended = False
        self.error: BaseException | None = None

    @property
    def behind(self) -> bool:
        """Whether tokens were given that are still to be taken."""
        return self.given != self.taken

    def claim(self, awaited: Outcome[Any]) -> bool:
        """Whether it was still awaited; then it is the caller who goes on."""
        try:
            self._unclaimed.remove(awaited)
        except ValueError:
            return False
        return True

    def claim_told(self) -> bool:
        """`claim` for what it awaits, if that was told."""
        awaited = self._awaited
        return awaited is not None and awaited.done() and self.claim(awaited)

    def run(self, give: Callable[[int], object], told: Callable[[Outcome[Any]], None]) -> None:
        """Goes on until it must wait, or to its end. Each token is given; `told` is told of what it has waited for."""
        for item in self._tokens:
            if isinstance(item, int):
                self.given += 1
                give(item)
                continue
            self._awaited = item
            self._unclaimed.append(item)
            item.on_told = partial(told, item)
            if not self.claim_told():
                return
        self.ended = True

    def close(self) -> None:
        """Ends it, unless somebody goes on with it right now."""
        if self._awaited is not None and self.claim(self._awaited):
            self._tokens.close()


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
        self._going: dict[int, _Going] = {}
        self._news: SimpleQueue[_News] = SimpleQueue()
        self._ushers = Ushers(MOST_OPENING + 1)
        self._quick = ask.quick
        self._stopped = False

    def run(self) -> Generator[tuple[int, int], None, None]:
        """The tokens as they come, each with the index of its prompt."""
        try:
            self._open_next()
            while self._going or self._opening:
                news = [self._news.get()]
                while not self._news.empty():
                    news.append(self._news.get())
                if self._stopped:
                    return
                yield from self._given_out(news)
                due, news = sorted({index for index, token in news if token is None}), []
                if due:
                    with self._pipe.scheduler.together():
                        for index in due:
                            self._look_after(index, news)
                    self._open_next()
                    yield from self._given_out(news)
        finally:
            self._end()

    def _given_out(self, news: Sequence[_News]) -> Generator[tuple[int, int], None, None]:
        """The tokens among news. One is taken when the next is asked for."""
        for index, token in news:
            if token is not None:
                yield index, token
                if (going := self._going.get(index)) is not None:
                    going.taken += 1

    def stop(self) -> None:
        """Ends `run` where it waits, from any thread, and the open that waits for bytes at its next look."""
        self._stopped = True
        self._news.put(_News(NOBODY))

    def _open_next(self) -> None:
        """Has the next prompts' sessions opened, as many as may be at a time. A prompt is read before the next one is taken:
        they may be parts of one stream."""
        while self._more and len(self._opening) < min(MOST_OPENING, self._concurrency - len(self._going)):
            index, prompt = next(self._prompts, (NOBODY, ()))
            self._more = index != NOBODY
            if self._more:
                read = checked_prompt(prompt, self._pipe.cfg.n_vocab, self._pipe.max_ctx)
                opening = self._opening[index] = self._ushers.submit(partial(self._open, read))
                opening.add_done_callback(partial(self._opened, index))

    def _opened(self, index: int, _: Future[Session]) -> None:
        self._news.put(_News(index))

    def _open(self, prompt: Sequence[int]) -> Session:
        while True:
            try:
                return self._pipe.open_wanted(prompt, self._ask, lambda: not self._stopped)
            except AdmissionError as error:
                if self._stopped or error.verdict is None or error.verdict.retry_after_s is None:
                    raise
                time.sleep(min(error.verdict.retry_after_s, LOOK_S))

    def _look_after(self, index: int, news: list[_News]) -> None:
        """Goes on with a prompt of which there was news, if it is due; they may come late, or twice. One that is behind has
        tokens on their way here, and what it awaits brings news of its own behind them."""
        going = self._going.get(index)
        if going is None:
            if index in self._opening and self._opening[index].done():
                going = self._going[index] = _Going(self._opening.pop(index).result(), self._ask)
                self._go_on(index, going, news.append)
        elif going.behind:
            return
        elif going.claim_told():
            self._go_on(index, going, news.append)
        elif going.ended:
            if going.error is not None:
                raise going.error
            del self._going[index]
            self._ushers.submit(partial(_close, going.session))

    def _go_on(self, index: int, going: _Going, give: Callable[[_News], object]) -> None:
        going.run(lambda token: give(_News(index, token)), partial(self._told, index, going))
        if going.ended:
            self._news.put(_News(index))

    def _told(self, index: int, going: _Going, awaited: Outcome[Any]) -> None:
        """Goes on at once with what was told, in the scheduler's thread, unless whoever takes the tokens should."""
        if not (self._quick and self._pipe.scheduler.mine) or going.behind:
            self._news.put(_News(index))
        elif going.claim(awaited):
            try:
                self._go_on(index, going, self._news.put)
                if self._stopped:
                    going.close()
            except BaseException as error:  # noqa: BLE001 - raised where the tokens are taken
                going.error, going.ended = error, True
                self._news.put(_News(index))

    def _end(self) -> None:
        """Closes what is open, or being opened, and waits until it is closed."""
        self._stopped = True
        if sys.is_finalizing():  # no other thread runs any more, and the stages end too
            return
        for going in self._going.values():
            going.close()
            self._ushers.submit(partial(_close, going.session))
        for opening in self._opening.values():
            self._ushers.submit(partial(_close_opened, opening))
        if not self._pipe.must_not_wait:
            self._ushers.finish()
        self._ushers.end()


def _close(session: Session) -> None:
    try:
        session.close()
    except StageError as error:
        log.warning("a session's close goes on later: %s", error)


def _close_opened(opening: Future[Session]) -> None:
    """Closes a session that nobody wants any more, once it is open."""
    if opening.exception() is None:
        _close(opening.result())
