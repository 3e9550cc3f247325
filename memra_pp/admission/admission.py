"""`Admission`: decides who gets a slab on every stage, who waits for one, and who is told no."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from .cost import CostModel
from .holding import HoldTimes
from .ledger import Ledger, Shortage
from .outcome import Outcome
from .shape import SessionShape, longest_ctx, slack_rows
from .tenants import Tenants
from .verdicts import Admit, Defer, Reason, Refuse, Verdict

LOOKAHEAD = 16
"""Requests that do not fit, among which one that does is looked for when it may pass them."""

MAX_WAITING = 1024
"""Requests in the queue; of one tenant, no more than its share of them."""

VERDICTS: dict[type[Verdict], str] = {Admit: "admitted", Defer: "deferred", Refuse: "refused"}


@dataclass(frozen=True)
class Request:
    """A session that asks for its bytes."""

    session: int
    shape: SessionShape
    tenant: str = ""


@dataclass(eq=False)
class Ticket:
    """A request that waits. It is told its `outcome` once, `Admit` or `Refuse`; `passed` counts the later ones that went before
    it."""

    request: Request
    charges: tuple[int, ...]
    deadline: float
    passed: int = 0
    outcome: Outcome[Admit | Refuse] = field(default_factory=Outcome)


class Admission:
    """A strict FIFO queue before the ledger. Not thread-safe, and it waits for nothing: its owner locks and waits.

    The head is admitted as soon as it fits. One that does not fit may be passed by at most `bypass` others; one that only its
    tenant's cap holds back, by any number of other tenants' requests, and by none of its own. A decision looks at devices and
    at those waiting, never at live sessions.

    Args:
        ledger: the devices' books.
        cost: what a shape is charged.
        limit: the most rows of a context.
        bypass: how many later requests may pass one that waits.
        tenant_share: the part of every device that one tenant may hold, above 0 and up to 1 (None: no cap).
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        ledger: Ledger,
        cost: CostModel,
        limit: int,
        *,
        bypass: int = 0,
        tenant_share: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger, self.cost, self.limit, self.bypass = ledger, cost, limit, bypass
        self._counts: dict[type[Verdict], int] = dict.fromkeys(VERDICTS, 0)
        self._reasons: Counter[tuple[type[Verdict], int, Reason]] = Counter()
        self._clock = clock
        self._tenants = Tenants(ledger, tenant_share)
        self._holding = HoldTimes()
        self._waiting: dict[int, Ticket] = {}
        self._wanted = [0] * len(ledger.homes)
        self._queued: Counter[str] = Counter()
        self._admitted: dict[int, tuple[float, str, tuple[int, ...]]] = {}
        self._overtaken = 0

    def ask(self, request: Request) -> Verdict:
        """Whether the request is admitted now. One that is not leaves nothing behind."""
        verdict = self._decide(request, self.cost.charges(request.shape))
        self._count(verdict)
        return verdict

    def submit(self, request: Request, timeout_s: float) -> Admit | Refuse | Ticket:
        """The verdict, or a ticket that is told when its turn has come, or `timeout_s` have passed."""
        charges = self.cost.charges(request.shape)
        verdict = self._decide(request, charges)
        if isinstance(verdict, Defer):
            if self._room_for(request.tenant):
                ticket = Ticket(request, charges, self._clock() + timeout_s)
                self._queue(ticket)
                return ticket
            verdict = _refused(verdict, "waiting room", f"{len(self._waiting)} requests are waiting, and no more may")
        self._count(verdict)
        return verdict

    def release(self, session: int) -> None:
        """Gives a session's bytes back, or ends its wait; whoever fits then is admitted. A second release does nothing."""
        if session in self._waiting:
            self._waiting[session].outcome.cancel()
            self._unqueue(session)
        elif self.ledger.release(session):
            admitted = self._admitted.pop(session, None)
            if admitted is not None:
                since, tenant, charges = admitted
                self._holding.add(self._clock() - since)
                self._tenants.give_back(tenant, charges)
        if self._waiting:
            self._pump()

    def expire(self, session: int) -> None:
        """Ends the wait of a request whose time is up; whoever fits then is admitted."""
        if session in self._waiting:
            self._time_out(self._waiting[session])
            self._pump()

    def learn(self, stage: int, used: int) -> None:
        """Sets `used` bytes of a stage's device aside (see `Ledger.learn`); who waits and can no longer fit is told so."""
        self.ledger.learn(stage, used)
        self._pump()

    def send_away(self) -> None:
        """Ends every wait: the outcomes are cancelled."""
        for session, ticket in list(self._waiting.items()):
            ticket.outcome.cancel()
            self._unqueue(session)

    def repair(self) -> None:
        """Works everything out again from who has slabs and who waits, after an interrupt in the middle of a decision.

        Slabs that a waiting request was given and not told of go back; a request that was not to wait and was interrupted
        keeps them until it is released.
        """
        for session, ticket in list(self._waiting.items()):
            if ticket.outcome.done():
                del self._waiting[session]
            else:
                self.ledger.release(session)
        self.ledger.rebuild()
        self._admitted = {session: record for session, record in self._admitted.items() if self.ledger.holds(session)}
        self._tenants.rebuild((tenant, charges) for _, tenant, charges in self._admitted.values())
        self._wanted = self._sum(self._waiting.values())
        self._queued = Counter(ticket.request.tenant for ticket in self._waiting.values())
        self._pump()

    def stats(self) -> dict[str, Any]:
        """Verdicts so far, why those were not `admitted` that were not, by the stage and the reason that bound, requests in the
        queue, and how long a session typically keeps its bytes, in seconds."""
        return {
            **{name: self._counts[kind] for kind, name in VERDICTS.items()},
            "reasons": [
                {"verdict": VERDICTS[kind], "stage": stage, "reason": reason, "count": count}
                for (kind, stage, reason), count in self._reasons.items()
            ],
            "waiting": len(self._waiting),
            "typical_hold_s": self._holding.typical_s,
        }

    def _count(self, verdict: Verdict) -> None:
        self._counts[type(verdict)] += 1
        if not isinstance(verdict, Admit):
            self._reasons[type(verdict), verdict.stage, verdict.reason] += 1

    def _decide(self, request: Request, charges: tuple[int, ...]) -> Verdict:
        if request.shape.ctx > self.limit:
            why = f"a context of {request.shape.ctx} rows is longer than the {self.limit} of this pipeline"
            return self._never(request, 0, 0, "context", why)
        if self._waiting and self._comes_after(request.tenant):
            return self._impossible(request, charges) or self._behind(charges, self._wanted, len(self._waiting))
        verdict = self._try(request, charges)
        self._overtaken += isinstance(verdict, Admit) and bool(self._waiting)
        return verdict

    def _try(self, request: Request, charges: tuple[int, ...]) -> Verdict:
        """Reserves for a request whose turn it is."""
        if not self._tenants.allow(request.tenant, charges):
            return self._over_cap(request, charges)
        got = self.ledger.reserve(request.session, charges)
        if not isinstance(got, Shortage):
            self._admitted[request.session] = self._clock(), request.tenant, charges
            self._tenants.hold(request.tenant, charges)
            return Admit(got, charges)
        return self._impossible(request, charges) or self._later(got)

    def _pump(self) -> None:
        """Admits those in the queue whose turn it is and who fit; those whose time is up are told so."""
        now, ahead, blocked, held = self._clock(), list[Ticket](), list[Ticket](), set[str]()
        for ticket in list(self._waiting.values()):
            tenant = ticket.request.tenant
            if ticket.deadline <= now:
                self._time_out(ticket)
                continue
            if tenant not in held:
                if blocked and (self._passed(blocked[0]) >= self.bypass or len(blocked) > LOOKAHEAD):
                    return
                verdict = self._try(ticket.request, ticket.charges)
                if not isinstance(verdict, Defer):
                    self._tell(ticket, verdict)
                    self._unqueue(ticket.request.session)
                    for other in ahead if isinstance(verdict, Admit) else ():
                        other.passed += 1
                    continue
                if verdict.reason == "tenant":
                    held.add(tenant)
                else:
                    blocked.append(ticket)
            ahead.append(ticket)

    def _comes_after(self, tenant: str) -> bool:
        """Whether one of this tenant who comes now has to wait behind those in the queue."""
        first = self._first_blocked()
        if first is not None and first.deadline <= self._clock():
            self._pump()
            first = self._first_blocked()
        own = self._tenants.share is not None and tenant in self._queued
        return own or (first is not None and self._passed(first) >= self.bypass)

    def _first_blocked(self) -> Ticket | None:
        """The first in the queue that more than its tenant's cap holds back. Whoever passed one has passed all before it, so
        that none behind it was passed as often."""
        held = set[str]()
        for ticket in self._waiting.values():
            tenant = ticket.request.tenant
            if tenant not in held:
                if self._tenants.allow(tenant, ticket.charges):
                    return ticket
                held.add(tenant)
        return None

    def _passed(self, ticket: Ticket) -> int:
        return ticket.passed + self._overtaken

    def _room_for(self, tenant: str) -> bool:
        """Whether one more of this tenant may wait."""
        own = MAX_WAITING if self._tenants.share is None else max(1, int(MAX_WAITING * self._tenants.share))
        return len(self._waiting) < MAX_WAITING and self._queued[tenant] < own

    def _time_out(self, ticket: Ticket) -> None:
        ahead = list(takewhile(lambda other: other is not ticket, self._waiting.values()))
        short = self._behind(ticket.charges, self._sum(ahead), len(ahead))
        self._tell(ticket, _refused(short, "deadline", "its bytes did not come free in time"))
        self._unqueue(ticket.request.session)

    def _queue(self, ticket: Ticket) -> None:
        ticket.passed = -self._overtaken  # newcomers that pass, pass all that wait: they are counted in one place
        self._waiting[ticket.request.session] = ticket
        self._queued[ticket.request.tenant] += 1
        self._wanted = [w + c for w, c in zip(self._wanted, ticket.charges, strict=True)]

    def _unqueue(self, session: int) -> None:
        ticket = self._waiting.pop(session)
        self._queued -= Counter([ticket.request.tenant])
        self._wanted = [w - c for w, c in zip(self._wanted, ticket.charges, strict=True)]

    def _sum(self, tickets: Iterable[Ticket]) -> list[int]:
        """Bytes a stage that these want."""
        return [sum(column) for column in zip([0] * len(self.ledger.homes), *(t.charges for t in tickets), strict=True)]

    def _tell(self, ticket: Ticket, verdict: Admit | Refuse) -> None:
        self._count(verdict)
        ticket.outcome.tell(verdict)

    def _later(self, short: Shortage) -> Defer:
        reason: Reason = "fragmented" if short.of == "in one piece" else "bytes"
        return Defer(short.stage, short.short_by, self._retry_after(short.stage, short.short_by), reason, str(short))

    def _behind(self, charges: Sequence[int], wanted: Sequence[int], n: int) -> Defer:
        """For one that `n` others, who want `wanted`, are ahead of: what they and it need beyond what is free."""
        short = self.ledger.shortage([w + c for w, c in zip(wanted, charges, strict=True)])
        stage, short_by = (0, 0) if short is None else (short.stage, short.short_by)
        ahead = f" and those ahead of it ({n})" if n else ""
        message = f"stage {stage} is {short_by:,} bytes short for this session{ahead}"
        return Defer(stage, short_by, self._retry_after(stage, short_by), "queue", message)

    def _over_cap(self, request: Request, charges: tuple[int, ...]) -> Defer | Refuse:
        stage = max(range(len(charges)), key=charges.__getitem__)
        share, need = self._tenants.share, charges[stage]
        why = f"tenant {request.tenant!r:.40} may hold {share} of a device, and {need:,} bytes on stage {stage} are more"
        if not self._tenants.allow(None, charges):
            return self._never(request, stage, need, "tenant", why)
        return Defer(stage, need, self._retry_after(stage, need), "tenant", f"{why}, beside what it holds")

    def _impossible(self, request: Request, charges: tuple[int, ...]) -> Refuse | None:
        short = self.ledger.shortage(charges, empty=True)
        return None if short is None else self._never(request, short.stage, short.short_by, "bytes", str(short))

    def _never(self, request: Request, stage: int, short_by: int, reason: Reason, why: str) -> Refuse:
        shape = request.shape

        def fits(ctx: int) -> bool:
            charges = self.cost.charges(replace(shape, ctx=ctx))
            return self.ledger.shortage(charges, empty=True) is None and self._tenants.allow(None, charges)

        longest = longest_ctx(fits, min(self.limit, shape.ctx))
        slack = slack_rows(shape.speculate)
        rows = f"{max(0, longest - slack)} of prompt and new tokens, the rest slack"
        room = f"the longest context that fits is {longest} rows ({rows})" if longest else "no row fits"
        message = f"{why}: {room}; shorten the request, add stages or choose smaller K/V formats"
        return Refuse(stage, short_by, None, reason, message, longest)

    def _retry_after(self, stage: int, short_by: int) -> float:
        return self._holding.retry_after_s(short_by, self.ledger.reserved_at(stage))


def _refused(defer: Defer, reason: Reason, why: str) -> Refuse:
    return Refuse(defer.stage, defer.short_by, defer.retry_after_s, reason, f"{why}: {defer.message}")
