"""`Opener`: opens and closes sessions on the stages, each on all of them or on none. One open or close is under way at a time,
and takes every close with it that is due."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..admission import Admit, Defer, Request
from ..errors import AdmissionError, StageError
from ..stage.frames import CLOSE, OPEN, Entry, Note
from .chain import Chain
from .door import Door
from .locks import OwnedLock
from .scheduler import Scheduler
from .work import Reply, Work

log = logging.getLogger(__name__)

RETRY_S = 1.0
"""When to try again after a stage has refused what admission had given."""


class Opener:
    """The sessions that are on the stages, and those on their way out.

    After every open and every close the stages say what they hold, and it is compared with what was charged.
    """

    def __init__(self, chain: Chain, scheduler: Scheduler, door: Door, timeout_s: float) -> None:
        self._chain, self._scheduler, self._door, self._timeout_s = chain, scheduler, door, timeout_s
        self._gate = OwnedLock()
        self._ending: set[int] = set()
        self._opening: int | None = None
        self._charged: dict[int, Sequence[int]] = {}
        self._held = [0] * chain.stages
        self._torn = False

    def open(self, request: Request, timeout_s: float) -> None:
        """Admits a session, within `timeout_s`, and allocates it on every stage.

        Raises:
            AdmissionError: a stage's device cannot hold its share; nothing is held anywhere.
            StageError: a stage failed, or this thread is in the middle of another open or close.
        """
        self._require_free()
        self._end_now()
        with self._or_not_at_all(request.session):
            admit = self._door.enter(request, timeout_s, self._meanwhile)
            self._alone(lambda: self._open(request, admit))

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
                    self._alone(lambda: self._open(request, admit))
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
        if not self._busy and self._gate.try_run(lambda: out.append(read())):
            return out[0]
        return read()

    @property
    def held(self) -> tuple[int, ...]:
        """Bytes charged for the sessions that are open, on every stage."""
        return tuple(self._held)

    @property
    def _busy(self) -> bool:
        return self._gate.mine or self._door.mine or self._scheduler.mine

    def _finish(self) -> None:
        if self._ending and not self._busy:
            self._gate.try_run(self._whole(self._end_all))

    def _end_now(self) -> None:
        """Ends those that are ending, after whoever is at work."""
        if self._ending and not self._busy:
            self._alone(self._end_all)

    def _require_free(self) -> None:
        if self._busy:
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

    def _meanwhile(self) -> None:
        self._require_alive()
        self.finish()

    async def _meanwhile_async(self) -> None:
        self._require_alive()
        if self._ending:
            await asyncio.to_thread(self.finish)

    def _require_alive(self) -> None:
        if self._chain.failed:
            raise StageError("the pipeline has failed or was closed while this session waited to be admitted: launch it again")

    def _alone(self, action: Callable[[], None]) -> None:
        """Opens and closes are done one at a time: none ends what another is about to open."""
        self._gate.run(self._whole(action), self._timeout_s, "the pipeline was busy with other threads' opens and closes")

    def _whole(self, action: Callable[[], None]) -> Callable[[], None]:
        """`action`, after what an interrupt had cut short was put in order."""

        def work() -> None:
            if self._torn:
                self._held = [sum(column) for column in zip([0] * len(self._held), *self._charged.values(), strict=True)]
            if self._opening is not None:
                self._ending.add(self._opening)
                self._opening = None
            self._torn = True
            action()
            self._torn = False

        return work

    def _open(self, request: Request, admit: Admit) -> None:
        """Opens a session right behind the closes of those that are ending."""
        session, charges = request.session, list(admit.charges)
        self._opening = session  # until every stage has said that it is open
        note = {"args": asdict(request.shape), "offsets": list(admit.offsets), "charges": charges, "held": []}
        closing, opening = self._send_closes(), self._send(OPEN, session, note)
        self._closed(closing)
        self._scheduler.wait(opening)
        reply = opening.result()
        if (fault := reply.fault) is not None:
            self._ending.add(session)
            self._opening = None
            self._end_all()
            raise self._refused(fault, charges)
        self._charged[session] = charges
        self._held = [held + charge for held, charge in zip(self._held, charges, strict=True)]
        self._opening = None
        self._compare(reply)

    def _refused(self, fault: Sequence[Any], charges: Sequence[int]) -> AdmissionError | StageError:
        stage, kind, message = fault
        if kind != "CapacityExceeded":
            return StageError(f"stage {stage}: {message}")
        return AdmissionError(f"stage {stage}: {message}", Defer(stage, charges[stage], RETRY_S, "bytes", message))

    def _end_all(self) -> None:
        """Closes the sessions that are ending."""
        closing = self._send_closes()
        self._closed(closing)
        if closing:
            self._compare([*closing.values()][-1].result())

    def _send_closes(self) -> dict[int, Work]:
        return {session: self._send(CLOSE, session, {"held": []}) for session in list(self._ending)}

    def _closed(self, closing: Mapping[int, Work]) -> None:
        """Closes sessions in the books, once every stage has."""
        for session, work in closing.items():
            self._scheduler.wait(work)
            if (fault := work.result().fault) is not None:
                raise StageError(f"stage {fault[0]} could not close session {session}, whose bytes stay charged: {fault[2]}")
            charges = self._charged.pop(session, None)
            if charges is not None:
                self._held = [held - charge for held, charge in zip(self._held, charges, strict=True)]
            self._door.leave(session)
            self._ending.discard(session)

    def _send(self, op: int, session: int, note: Note) -> Work:
        work = Work(Entry(op, session, 0, self._chain.epoch), [], self._timeout_s, note)
        self._scheduler.submit(work)
        return work

    def _compare(self, reply: Reply) -> None:
        """What every stage holds for sessions is what was charged; what it has learned goes into the books."""
        said: list[Any] = reply.note.get("held", [])
        for stage, (held, learned) in enumerate(said):
            if learned:
                self._door.learn(stage, learned)
            if held != self._held[stage]:
                raise StageError(f"stage {stage} holds {held} bytes for sessions and {self._held[stage]} were charged: a bug")
