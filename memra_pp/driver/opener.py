"""`Opener`: opens and closes sessions on the stages, each on all of them or on none. Any number may be on their way."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

from ..admission import Admit, Defer, Request
from ..errors import AdmissionError, SessionCancelled, StageError
from ..stage.frames import CLOSE, OPEN, Entry, Note
from .chain import Chain
from .door import Door
from .locks import OwnedLock
from .scheduler import Scheduler
from .work import Reply, Work

T = TypeVar("T")
log = logging.getLogger(__name__)

Wanted = Callable[[], bool]

NOBODY = 0
"""The number of no session: they count from 1."""

RETRY_S = 1.0
"""When to try again after a stage has refused what admission had given."""


class _Sent(NamedTuple):
    """An open or a close on its way; `charges` are an open's, a number of bytes a stage."""

    work: Work
    session: int
    charges: Sequence[int] | None


class Opener:
    """The sessions that are on the stages, and those on their way out.

    Opens and closes are sent under a lock, waited for without it, and written down under it in the order in which they were
    sent: whoever comes next writes down what has come back. With each the stages say what they hold, and it is compared with
    what was charged.
    """

    def __init__(self, chain: Chain, scheduler: Scheduler, door: Door, timeout_s: float) -> None:
        self._chain, self._scheduler, self._door, self._timeout_s = chain, scheduler, door, timeout_s
        self._gate = OwnedLock()
        self._ending: set[int] = set()
        self._sent: deque[_Sent] = deque()
        self._refused: dict[int, AdmissionError | StageError] = {}
        self._charged: dict[int, Sequence[int]] = {}
        self._held = [0] * chain.stages
        self._submitted: set[Work] = set()
        self._torn = False

    def open(self, request: Request, timeout_s: float, wanted: Wanted = lambda: True) -> None:
        """Admits a session, within `timeout_s` and as long as it is `wanted`, and allocates it on every stage.

        Raises:
            AdmissionError: a stage's device cannot hold its share; nothing is held anywhere.
            SessionCancelled: it waited, and was wanted no more.
            StageError: a stage failed, or this thread is in the middle of another open or close.
        """
        self._require_free()
        self._end_now()
        with self._or_not_at_all(request.session):
            self._open(request, self._door.enter(request, timeout_s, lambda: self._meanwhile(wanted)))

    async def open_async(self, request: Request, timeout_s: float) -> None:
        """As `open`, for a task. One that is cancelled while its stages open is closed by its thread, once they have."""
        self._require_free()
        if self._ending:
            await asyncio.to_thread(self._end_now)
        opened, given_up = threading.Event(), threading.Event()
        opening: asyncio.Future[None] | None = None

        def work(admit: Admit) -> None:
            with self._or_not_at_all(request.session):
                if not given_up.is_set():
                    self._open(request, admit)
            opened.set()
            if given_up.is_set():
                self.close(request.session)

        loop = asyncio.get_running_loop()
        try:
            admit = await self._door.enter_async(request, timeout_s, self._meanwhile_async)
            opening = loop.run_in_executor(None, work, admit)
            await asyncio.shield(opening)
        except AdmissionError:
            raise
        except BaseException:
            given_up.set()
            if opening is None:  # no thread has it
                self.end_later(request.session)
                raise
            opening.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard, though nobody waits
            if opened.is_set():
                loop.run_in_executor(None, self.close, request.session)
            raise

    def close(self, session: int) -> None:
        """Closes a session on every stage and gives its bytes back.

        Cut short, or begun by a finalizer in the middle of another, it goes on at the next open, close or `finish`.
        """
        self.end_later(session)
        self._end_now()

    def end_later(self, session: int) -> None:
        """Marks a session to be closed at the next open, close or `finish`: all that a finalizer should do."""
        self._ending.add(session)

    def end_if_open(self, session: int) -> None:
        """`end_later` for a session whose caller was interrupted when it had just been opened."""
        if session in self._charged:
            self.end_later(session)

    def finish(self) -> None:
        """Goes on with closes that were cut short or put off, unless somebody is at work: who ends a call, opens or closes
        does it then."""
        if self._scheduler.idle:
            self._finish()

    def after_call(self) -> None:
        """Goes on with such closes, for whoever has just ended a call; what fails goes on later."""
        try:
            self._finish()
        except StageError as error:
            log.warning("a close goes on later: %s", error)

    @property
    def ending(self) -> bool:
        """Whether there are closes to go on with."""
        return bool(self._ending)

    @property
    def live(self) -> int:
        """How many sessions are open."""
        return len(self._charged)

    def books(self, read: Callable[[], Any]) -> Any:
        """What `read` gives while nobody opens or closes; if somebody does, all the same."""
        out: list[Any] = []
        if not self.busy and self._gate.try_run(lambda: out.append(read())):
            return out[0]
        return read()

    @property
    def held(self) -> tuple[int, ...]:
        """Bytes charged for the sessions that are open, on every stage."""
        return tuple(self._held)

    @property
    def busy(self) -> bool:
        """Whether the calling thread is in the middle of an open, a close or the scheduler's work, so that it must not wait for
        another: a signal handler or a finalizer runs in it."""
        return self._gate.mine or self._door.mine or self._scheduler.mine

    def _finish(self) -> None:
        """Ends those whose close nobody else has sent."""
        if self._ending and not self.busy:
            self._wait_for(self._alone(self._send_due))

    def _end_now(self) -> None:
        """Ends those that are ending."""
        if self._ending and not self.busy:
            self._wait_for(self._alone(self._send_closes))

    def _wait_for(self, work: Work | None) -> None:
        """Waits for an open or a close, and with it for all before it, and writes them down."""
        if work is not None:
            self._scheduler.wait(work)
        self._alone(self._write_down)

    def _require_free(self) -> None:
        if self.busy:
            raise StageError("a session was opened in the middle of another open or close of this thread, by a signal handler")

    @contextlib.contextmanager
    def _or_not_at_all(self, session: int) -> Iterator[None]:
        """Closes a session whose opening was cut short. Where it was refused, there is nothing to close."""
        try:
            yield
        except AdmissionError:
            raise
        except BaseException:
            with contextlib.suppress(StageError):
                self.close(session)
            raise

    def _meanwhile(self, wanted: Wanted) -> None:
        self._require_alive()
        if not wanted():
            raise SessionCancelled("this session was wanted no more while it waited to be admitted")
        self.finish()

    async def _meanwhile_async(self) -> None:
        self._require_alive()
        if self._ending:
            await asyncio.to_thread(self.finish)

    def _require_alive(self) -> None:
        if self._chain.failed:
            raise StageError("the pipeline has failed or was closed while this session waited to be admitted: launch it again")

    def _alone(self, action: Callable[[], T]) -> T:
        """Sending and writing down are done by one thread at a time, in one order."""
        return self._gate.run(
            self._whole(action), self._timeout_s, "the pipeline was busy with other threads' opens and closes"
        )

    def _whole(self, action: Callable[[], T]) -> Callable[[], T]:
        """`action`, after what an interrupt had cut short was put in order."""

        def work() -> T:
            if self._torn:
                self._held = [sum(column) for column in zip([0] * len(self._held), *self._charged.values(), strict=True)]
                for sent in self._sent:
                    self._submit(sent.work)
            self._torn = True
            done = action()
            self._torn = False
            return done

        return work

    def _open(self, request: Request, admit: Admit) -> None:
        session = request.session
        note = {"args": asdict(request.shape), "offsets": list(admit.offsets), "charges": list(admit.charges), "held": []}

        def send() -> Work | None:
            wanted = session not in self._ending and self._door.holds(session)
            return self._send(OPEN, session, note, admit.charges) if wanted else None

        work = self._alone(send)
        self._wait_for(work)
        if work is None:
            raise SessionCancelled("this session was closed in the middle of the call")
        if (error := self._refused.pop(session, None)) is not None:
            self._end_now()
            raise error

    def _send_due(self) -> Work | None:
        """Sends the closes that are due and not on their way; the last one, if there is one."""
        on_way = {sent.session for sent in self._sent if sent.charges is None}
        last = None
        for session in self._ending - on_way:
            last = self._send(CLOSE, session, {"held": []}, None)
        return last

    def _send_closes(self) -> Work | None:
        """As `_send_due`; if others have sent all, a close of nobody, which comes back behind them: for each work one waits. A
        second close of theirs might come back when they are open again."""
        last = self._send_due()
        if last is None and self._ending:
            last = self._send(CLOSE, NOBODY, {"held": []}, None)
        return last

    def _send(self, op: int, session: int, note: Note, charges: Sequence[int] | None) -> Work:
        work = Work(Entry(op, session, 0, self._chain.epoch), [], self._timeout_s, note)
        self._sent.append(_Sent(work, session, charges))
        self._submit(work)
        return work

    def _submit(self, work: Work) -> None:
        """Sends what was not sent; what an interrupt has cut short here goes twice, and the stages apply it once."""
        if work not in self._submitted:
            self._scheduler.submit(work)
            self._submitted.add(work)

    def _write_down(self) -> None:
        """Writes down, in order, what has come back."""
        while self._sent and (sent := self._sent[0]).work.done():
            reply = sent.work.result()
            if sent.charges is None:
                self._closed(sent.session, reply)
            else:
                self._opened(sent.session, sent.charges, reply)
            self._sent.popleft()
            self._submitted.discard(sent.work)
            if reply.fault is None:
                self._compare(reply)
            elif sent.charges is None:
                stage, _, message = reply.fault
                raise StageError(f"stage {stage} could not close session {sent.session}, whose bytes stay charged: {message}")

    def _opened(self, session: int, charges: Sequence[int], reply: Reply) -> None:
        if reply.fault is not None:
            self._refused[session] = self._refusal(reply.fault, charges)
            self._ending.add(session)
        elif session not in self._charged:
            self._charged[session] = charges
            self._held = [held + charge for held, charge in zip(self._held, charges, strict=True)]

    def _closed(self, session: int, reply: Reply) -> None:
        if reply.fault is not None:
            return
        charges = self._charged.pop(session, None)
        if charges is not None:
            self._held = [held - charge for held, charge in zip(self._held, charges, strict=True)]
        self._door.leave(session)
        self._ending.discard(session)

    def _refusal(self, fault: Sequence[Any], charges: Sequence[int]) -> AdmissionError | StageError:
        stage, kind, message = fault
        if kind != "CapacityExceeded":
            return StageError(f"stage {stage}: {message}")
        return AdmissionError(f"stage {stage}: {message}", Defer(stage, charges[stage], RETRY_S, "bytes", message))

    def _compare(self, reply: Reply) -> None:
        """What every stage holds for sessions is what was charged; what it has learned goes into the books."""
        said: list[Any] = reply.note.get("held", [])
        for stage, (held, learned) in enumerate(said[-len(self._held) :]):  # twice as many if an interrupt had it sent twice
            if learned:
                self._door.learn(stage, learned)
            if held != self._held[stage]:
                raise StageError(f"stage {stage} holds {held} bytes for sessions and {self._held[stage]} were charged: a bug")
