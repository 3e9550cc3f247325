"""`Door`: admission for many threads and tasks. One lock around the decisions, and waits that end."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from ..admission import Admission, Admit, Defer, Refuse, Request, Ticket, Verdict
from ..errors import AdmissionError, InputError, SessionCancelled, StageError, require
from .locks import OwnedLock

MAX_WAIT_S = 86400.0
LOCK_S = 60.0
LOOK_S = 0.5
"""How often one that waits looks after what else has to be done."""

T = TypeVar("T")


class Door:
    """Lets sessions in, or has them wait."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._lock = OwnedLock()
        self._torn = self._closed = False

    @property
    def mine(self) -> bool:
        """Whether this thread is in the middle of a decision: in a signal handler, or a finalizer that ran meanwhile."""
        return self._lock.mine

    def enter(self, request: Request, timeout_s: float, meanwhile: Callable[[], None]) -> Admit:
        """The request's slabs, now or within `timeout_s`; `meanwhile` is called now and then, and may raise.

        Raises:
            AdmissionError: it was refused, or its time is up; the verdict is its `verdict`.
            SessionCancelled: the session was closed meanwhile.
            StageError: the pipeline was closed meanwhile.
        """
        asked = self._ask(request, timeout_s)
        if not isinstance(asked, Ticket):
            return _admitted(asked)
        end = time.monotonic() + timeout_s
        while not asked.outcome.done() and (left := end - time.monotonic()) > 0:
            meanwhile()
            asked.outcome.wait(min(LOOK_S, left))
        return self._outcome(asked)

    async def enter_async(self, request: Request, timeout_s: float, meanwhile: Callable[[], Awaitable[None]]) -> Admit:
        """As `enter`, for a task. One that is cancelled leaves the queue, and gives back what it was given meanwhile."""
        asked = self._ask(request, timeout_s)
        if not isinstance(asked, Ticket):
            return _admitted(asked)
        end = time.monotonic() + timeout_s
        try:
            while not asked.outcome.done() and (left := end - time.monotonic()) > 0:
                await meanwhile()
                await asked.outcome.wait_async(min(LOOK_S, left))
        except BaseException:
            self.leave(request.session)
            raise
        return self._outcome(asked)

    def leave(self, session: int) -> None:
        """Gives a session's bytes back, or ends its wait."""
        self._locked(lambda: self._admission.release(session))

    def holds(self, session: int) -> bool:
        """Whether a session has bytes, and nobody has given them back."""
        return self._locked(lambda: self._admission.ledger.holds(session))

    def learn(self, stage: int, used: int) -> None:
        """Sets bytes aside that a stage's device was seen to use (see `Ledger.learn`)."""
        self._locked(lambda: self._admission.learn(stage, used))

    def close(self) -> None:
        """Sends everyone away who waits, and lets nobody in."""
        self._closed = True
        if not self._lock.mine:
            self._locked(self._admission.send_away)

    def stats(self) -> dict[str, Any]:
        """The devices' books (`Ledger.devices`), and the verdicts so far (`Admission.stats`)."""
        return self._locked(lambda: {"devices": self._admission.ledger.devices(), "admission": self._admission.stats()})

    def _outcome(self, ticket: Ticket) -> Admit:
        """What a ticket was told, or is told now that its time is up."""
        if not ticket.outcome.done():
            self._locked(lambda: self._admission.expire(ticket.request.session))
        try:
            return _admitted(ticket.outcome.result())
        except CancelledError:
            if self._closed:
                raise StageError("the pipeline was closed while this session waited to be admitted: launch it again") from None
            raise SessionCancelled("this session was closed while it waited to be admitted") from None

    def _ask(self, request: Request, timeout_s: float) -> Verdict | Ticket:
        if self._closed:
            raise StageError("this pipeline is closed: launch it again")
        admission = self._admission
        return self._locked(lambda: admission.submit(request, timeout_s) if timeout_s > 0 else admission.ask(request))

    def _locked(self, action: Callable[[], T]) -> T:
        """One decision at a time. What an interrupt has cut short is repaired before the next."""
        if self._lock.mine:
            raise StageError(
                "admission was asked in the middle of a decision of this thread, by a signal handler or a finalizer"
            )

        def decide() -> T:
            if self._torn:
                self._admission.repair()
            self._torn = True
            done = action()
            self._torn = False
            return done

        return self._lock.run(decide, LOCK_S, "admission was busy")


def _admitted(verdict: Verdict) -> Admit:
    match verdict:
        case Admit():
            return verdict
        case Defer():
            advice = f"try again in about {verdict.retry_after_s:.2f} s, or wait for your turn with open(timeout=...)"
        case Refuse(retry_after_s=None):
            raise AdmissionError(verdict.message, verdict)
        case Refuse():
            advice = f"try again in about {verdict.retry_after_s:.2f} s"
    raise AdmissionError(f"{verdict.message}: {advice}", verdict)


def checked_wait(timeout: float | None) -> float:
    """Seconds to wait for bytes; raises InputError for a bad number of them."""
    timed = timeout is None or (type(timeout) in (int, float) and 0 <= timeout <= MAX_WAIT_S)
    require(timed, InputError, "timeout", timeout, f"None, or 0 to {MAX_WAIT_S:.0f} seconds")
    return timeout or 0.0
