"""`Admission`: first come, first served; what may pass, what is refused at once, and what each verdict says."""

from __future__ import annotations

from concurrent.futures import CancelledError
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memra_pp.admission import Admission, Admit, CostModel, Defer, Device, Ledger, Refuse, Request, SessionShape, Ticket
from memra_pp.admission.admission import MAX_WAITING
from memra_pp.admission.holding import HoldTimes
from memra_pp.cache import KvPolicy
from memra_pp.config import KvPlan, ModelConfig, RecurrentPlan

KV = KvPlan(1, 32, 32)
CFG = ModelConfig("toy", 4, 32, 40, 4096, (KV, RecurrentPlan(8, 4, 64), KV, KV))
FENCE = (0, 2, 4)
POLICY = KvPolicy()
COST = CostModel(CFG, FENCE, POLICY)
LIMIT = 4096


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Desk:
    """An admission whose devices hold `sessions` sessions of `ctx` rows."""

    def __init__(self, sessions: float, ctx: int = 100, **options: Any) -> None:
        self.clock = Clock()
        budgets = [int(sessions * charge) for charge in COST.charges(SessionShape(ctx))]
        self.ledger = Ledger([Device(f"cpu:{i}", budget) for i, budget in enumerate(budgets)])
        self.admission = Admission(self.ledger, COST, LIMIT, clock=self.clock, **options)
        self.ctx = ctx

    def request(self, session: int, ctx: int | None = None, tenant: str = "") -> Request:
        return Request(session, SessionShape(ctx or self.ctx), tenant)

    def ask(self, session: int, ctx: int | None = None, tenant: str = "") -> Any:
        return self.admission.ask(self.request(session, ctx, tenant))

    def wait(self, session: int, ctx: int | None = None, tenant: str = "", timeout_s: float = 60.0) -> Ticket:
        ticket = self.admission.submit(self.request(session, ctx, tenant), timeout_s)
        assert isinstance(ticket, Ticket) and not ticket.outcome.done()
        return ticket


def admitted(ticket: Ticket) -> bool:
    return ticket.outcome.done() and isinstance(ticket.outcome.result(), Admit)


def test_a_request_of_exactly_the_free_bytes_is_admitted_and_one_byte_more_is_not():
    charges = COST.charges(SessionShape(100))
    for stage in range(2):
        for missing in (0, 1):
            devices = [Device(f"d{i}", charge - missing * (i == stage)) for i, charge in enumerate(charges)]
            verdict = Admission(Ledger(devices), COST, LIMIT).ask(Request(1, SessionShape(100)))
            if missing:
                assert isinstance(verdict, Refuse)
                assert (verdict.stage, verdict.short_by, verdict.retry_after_s) == (stage, 1, None)
            else:
                assert verdict == Admit([0, 0], charges)


@pytest.mark.parametrize("speculate", [0, 4])
@pytest.mark.parametrize("recurrent", ["replay", "states"])
@pytest.mark.parametrize("budgets", [(50_000, 90_000), (20_000, 30_000), (100_000, 9_000), (10_000, 9_000)])
def test_the_longest_context_that_a_refusal_names_is_admitted_and_one_row_more_is_not(budgets, speculate, recurrent):
    def verdict(ctx: int) -> Any:
        ledger = Ledger([Device(f"d{i}", budget) for i, budget in enumerate(budgets)])
        return Admission(ledger, COST, LIMIT).ask(Request(1, SessionShape(ctx, 1, recurrent, speculate)))

    refused = verdict(LIMIT)
    assert isinstance(refused, Refuse) and refused.longest_ctx and f" {refused.longest_ctx} rows" in refused.message
    assert isinstance(verdict(refused.longest_ctx), Admit)
    again = verdict(refused.longest_ctx + 1)
    assert isinstance(again, Refuse) and again.longest_ctx == refused.longest_ctx and again.short_by > 0


def test_where_no_row_fits_the_refusal_says_so():
    refused = Admission(Ledger([Device("a", 10), Device("b", 1 << 30)]), COST, LIMIT).ask(Request(1, SessionShape(8)))
    assert isinstance(refused, Refuse) and refused.longest_ctx == 0 and "no row fits" in refused.message


def test_a_context_past_the_limit_is_refused_with_the_longest_that_would_fit():
    refused = Desk(1e6).ask(1, LIMIT + 1)
    assert isinstance(refused, Refuse) and (refused.reason, refused.longest_ctx) == ("context", LIMIT)
    refused = Desk(1, ctx=100).ask(1, LIMIT + 1)
    assert isinstance(refused, Refuse) and 100 <= refused.longest_ctx < 120


def test_one_that_never_fits_is_refused_also_behind_a_queue():
    desk = Desk(2)
    desk.ask(1), desk.ask(2)
    desk.wait(3)
    assert isinstance(desk.ask(4, 500), Refuse) and desk.admission.stats()["waiting"] == 1


def test_a_deferral_names_the_stage_that_binds_and_a_refusal_in_the_queue_leaves_nothing():
    desk = Desk(1.5)
    desk.ask(1)
    deferred = desk.ask(2)
    assert isinstance(deferred, Defer) and deferred.reason == "bytes" and deferred.retry_after_s > 0
    charges = COST.charges(SessionShape(100))
    short = [2 * c - int(1.5 * c) for c in charges]
    assert deferred.short_by == max(short) and deferred.stage == short.index(max(short))
    assert f"{deferred.short_by:,} short" in deferred.message
    desk.admission.release(1)
    assert isinstance(desk.ask(3), Admit)


def test_verdicts_are_counted_by_the_stage_and_the_reason_that_bound():
    desk = Desk(1)
    assert isinstance(desk.ask(1), Admit)
    deferred = desk.ask(2)
    assert desk.ask(3).stage == deferred.stage
    never = desk.ask(4, LIMIT + 1)
    waits = desk.wait(5, timeout_s=1.0)
    desk.clock.now += 2
    desk.admission.expire(5)
    late = waits.outcome.result()
    stats = desk.admission.stats()
    assert (stats["admitted"], stats["deferred"], stats["refused"], stats["waiting"]) == (1, 2, 2, 0)
    assert stats["reasons"] == [
        {"verdict": "deferred", "stage": deferred.stage, "reason": "bytes", "count": 2},
        {"verdict": "refused", "stage": never.stage, "reason": "context", "count": 1},
        {"verdict": "refused", "stage": late.stage, "reason": "deadline", "count": 1},
    ]


def test_the_queue_is_first_come_first_served():
    desk = Desk(2)
    desk.ask(1), desk.ask(2)
    large, small = desk.wait(3, 150), desk.wait(4, 10)
    desk.admission.release(1)
    assert not admitted(large) and not admitted(small)  # the small one fits, and is not first
    newcomer = desk.ask(5, 1)
    assert isinstance(newcomer, Defer) and newcomer.reason == "queue" and "ahead of it (2)" in newcomer.message
    desk.admission.release(2)
    assert admitted(large) and admitted(small)
    assert isinstance(desk.ask(5, 1), Admit)


@pytest.mark.parametrize("bypass", [1, 2, 3])
def test_at_most_bypass_others_pass_one_that_waits(bypass):
    desk = Desk(4, bypass=bypass)
    for session in range(3):
        desk.ask(session)
    large = desk.wait(10, 150)
    passed = [isinstance(desk.ask(20 + i, 10), Admit) for i in range(5)]
    assert passed == [True] * bypass + [False] * (5 - bypass)
    for session in range(3):
        desk.admission.release(session)
    assert admitted(large)


def test_those_who_wait_pass_one_another_within_the_same_bound():
    desk = Desk(2, bypass=2)
    desk.ask(1), desk.ask(2)
    large = desk.wait(3, 150)
    small = [desk.wait(4 + i, 99) for i in range(4)]
    desk.admission.release(1)
    assert [admitted(t) for t in (large, *small)] == [False, True, False, False, False]
    desk.admission.release(4)
    assert [admitted(t) for t in (large, *small)] == [False, True, True, False, False]
    desk.admission.release(5)
    assert [admitted(t) for t in (large, *small)] == [False, True, True, False, False]
    desk.admission.release(2)
    assert [admitted(t) for t in (large, *small)] == [True, True, True, False, False]


def test_a_wait_ends_at_its_deadline_also_where_nobody_asks():
    desk = Desk(1)
    desk.ask(1)
    first, second = desk.wait(2, timeout_s=5), desk.wait(3, timeout_s=50)
    desk.clock.now += 6
    desk.admission.release(1)
    assert admitted(second)
    refused = first.outcome.result()
    assert isinstance(refused, Refuse) and refused.reason == "deadline" and refused.retry_after_s


def test_a_refusal_after_waiting_counts_those_who_were_ahead_and_not_itself():
    desk = Desk(1)
    desk.ask(1)
    charges = COST.charges(SessionShape(100))
    tickets = [desk.wait(session) for session in (2, 3, 4)]
    for session in (2, 4, 3):
        desk.admission.expire(session)
    refused = [ticket.outcome.result() for ticket in tickets]
    assert [r.short_by for r in refused] == [max(charges), max(charges), 2 * max(charges)]
    assert ["ahead of it (1)" in r.message for r in refused] == [False, False, True]


def test_a_head_whose_time_is_up_holds_nobody_back():
    desk = Desk(2)
    desk.ask(1)
    stale = desk.wait(2, 190, timeout_s=5)
    assert isinstance(desk.ask(3, 50), Defer)
    desk.clock.now += 6
    assert isinstance(desk.ask(3, 50), Admit) and isinstance(stale.outcome.result(), Refuse)


def test_expire_ends_one_wait_and_lets_the_next_in():
    desk = Desk(2)
    desk.ask(1)
    large, small = desk.wait(2, 190), desk.wait(3, 50)
    desk.admission.expire(2)
    assert isinstance(large.outcome.result(), Refuse) and admitted(small)
    desk.admission.expire(2), desk.admission.expire(77)


def test_who_leaves_the_queue_is_forgotten_and_lets_the_next_in():
    desk = Desk(2)
    desk.ask(1)
    large, small = desk.wait(2, 190), desk.wait(3, 50)
    desk.admission.release(2)
    with pytest.raises(CancelledError):
        large.outcome.result()
    assert admitted(small)
    desk.admission.release(2)


def test_everyone_is_sent_away_at_the_end():
    desk = Desk(1)
    desk.ask(1)
    waits = [desk.wait(session) for session in (2, 3)]
    desk.admission.send_away()
    assert all(ticket.outcome.cancelled() for ticket in waits) and desk.admission.stats()["waiting"] == 0
    desk.admission.release(1)
    assert desk.ledger.reserved == (0, 0)


def test_a_thousand_waits_that_end_together_end_and_the_next_is_admitted():
    desk = Desk(1)
    desk.ask(0)
    late = [desk.wait(session, timeout_s=1) for session in range(1, 1000)]
    desk.clock.now += 2
    desk.admission.release(0)
    assert all(ticket.outcome.result().reason == "deadline" for ticket in late)
    assert desk.admission.stats()["waiting"] == 0 and isinstance(desk.ask(2000), Admit)


def test_a_tenant_that_fills_its_part_of_the_waiting_room_leaves_the_others_theirs():
    desk = Desk(4, tenant_share=0.25)
    desk.ask(0, tenant="a")
    for session in range(1, 1 + MAX_WAITING // 4):
        desk.wait(session, tenant="a")
    refused = desk.admission.submit(desk.request(5000, tenant="a"), 60)
    assert isinstance(refused, Refuse) and refused.reason == "waiting room"
    assert all(isinstance(desk.ask(6000 + i, tenant=f"t{i}"), Admit) for i in range(3))
    desk.wait(7000, tenant="u")


def test_a_tenant_s_own_requests_keep_their_order():
    desk = Desk(4, tenant_share=0.5)
    desk.ask(1, tenant="a")
    large = desk.wait(2, 180, tenant="a")
    assert isinstance(desk.ask(3, 10, tenant="a"), Defer)
    small = desk.wait(4, 10, tenant="a")
    desk.admission.release(1)
    assert admitted(large) and admitted(small)


def test_one_that_was_held_back_by_its_tenant_counts_who_passed_it_meanwhile():
    desk = Desk(1, bypass=2, tenant_share=0.6)
    first = ((1, 250, "a"), (2, 250, "a"), (3, 200, "c"), (4, 100, "d"), (5, 200, "e"))
    budgets = [sum(column) for column in zip(*(COST.charges(SessionShape(ctx)) for _, ctx, _ in first), strict=True)]
    desk.admission = Admission(
        Ledger([Device(f"d{i}", n) for i, n in enumerate(budgets)]), COST, LIMIT, bypass=2, tenant_share=0.6
    )
    for session, ctx, tenant in first:
        assert isinstance(desk.ask(session, ctx, tenant), Admit)
    held, large = desk.wait(10, 340, "a"), desk.wait(11, 400, "b")
    small = [desk.wait(12, 10, "f"), desk.wait(13, 10, "g")]
    desk.admission.release(4), desk.admission.release(2)
    assert [admitted(t) for t in (held, large, *small)] == [False, False, True, True]
    assert isinstance(desk.ask(14, 1, "h"), Defer)


def test_no_more_than_a_bounded_number_wait():
    desk = Desk(1)
    desk.ask(0)
    for session in range(1, 1 + MAX_WAITING):
        desk.wait(session)
    refused = desk.admission.submit(desk.request(9999), 60)
    assert isinstance(refused, Refuse) and refused.reason == "waiting room" and refused.retry_after_s > 0


def test_what_a_device_has_learned_is_no_longer_given_out_and_who_cannot_fit_any_more_is_told():
    desk = Desk(2)
    desk.ask(1), desk.ask(2)
    ticket = desk.wait(3, 190)
    desk.admission.learn(1, COST.charges(SessionShape(100))[1])
    refused = ticket.outcome.result()
    assert isinstance(refused, Refuse) and refused.stage == 1 and refused.longest_ctx < 190
    desk.admission.release(1), desk.admission.release(2)
    assert isinstance(desk.ask(4), Admit) and isinstance(desk.ask(5, 10), Defer)


def test_a_tenant_holds_no_more_than_its_share_and_holds_nobody_else_back():
    desk = Desk(4, tenant_share=0.5)
    assert isinstance(desk.ask(1, tenant="a"), Admit) and isinstance(desk.ask(2, tenant="a"), Admit)
    deferred = desk.ask(3, tenant="a")
    assert isinstance(deferred, Defer) and deferred.reason == "tenant" and "'a'" in deferred.message
    greedy = desk.wait(4, tenant="a")
    assert isinstance(desk.ask(5, tenant="b"), Admit)
    desk.admission.release(1)
    assert admitted(greedy) and isinstance(desk.ask(6, tenant="b"), Admit)
    refused = desk.ask(7, 300, tenant="c")
    assert isinstance(refused, Refuse) and refused.reason == "tenant" and refused.longest_ctx < 300
    assert isinstance(Desk(4, tenant_share=0.5).ask(1, refused.longest_ctx, "c"), Admit)
    for session in (2, 4, 5, 6):
        desk.admission.release(session)
    assert desk.ledger.reserved == (0, 0) and not desk.admission._tenants._held


def test_one_whose_tenant_is_over_its_share_does_not_stop_the_queue_behind_it():
    desk = Desk(4, tenant_share=0.5)
    for session, tenant in enumerate("aabb"):
        desk.ask(session, tenant=tenant)
    capped, other = desk.wait(10, tenant="a"), desk.wait(11, tenant="c")
    desk.admission.release(3)
    assert admitted(other) and not admitted(capped)


def test_those_who_came_after_a_bypass_start_with_none():
    desk = Desk(3, bypass=1)
    desk.ask(1), desk.ask(2)
    first = desk.wait(3, 190)
    assert isinstance(desk.ask(4, 5), Admit) and isinstance(desk.ask(5, 5), Defer)
    desk.admission.release(1), desk.admission.release(2)
    assert admitted(first)
    desk.wait(6, 190)
    assert isinstance(desk.ask(7, 5), Admit) and isinstance(desk.ask(8, 5), Defer)


def test_two_tenants_that_abort_between_reserve_and_allocate_leave_nothing_behind():
    """Both have their slabs, neither has opened; one leaves, then the other, then each again."""
    desk = Desk(2, tenant_share=0.5)
    assert isinstance(desk.ask(1, tenant="a"), Admit) and isinstance(desk.ask(2, tenant="b"), Admit)
    waits = [desk.wait(3, tenant="a"), desk.wait(4, tenant="b")]
    desk.admission.release(1), desk.admission.release(3), desk.admission.release(2), desk.admission.release(1)
    assert all(admitted(ticket) for ticket in waits) and desk.ledger.live == 1
    desk.admission.release(4), desk.admission.release(2)
    assert desk.ledger.reserved == (0, 0) and desk.ledger.live == 0 and not desk.admission._tenants._held


def test_retry_after_follows_how_long_sessions_hold_their_bytes():
    slow, quick = HoldTimes(), HoldTimes()
    for times, seconds in ((slow, 64.0), (quick, 0.5)):
        for _ in range(20):
            times.add(seconds)
    assert 64 <= slow.typical_s <= 128 and 0.5 <= quick.typical_s <= 1
    assert slow.retry_after_s(50, 100) > 32 > 1 > quick.retry_after_s(50, 100) > 0
    assert slow.retry_after_s(1, 100) < slow.retry_after_s(100, 100) < slow.retry_after_s(1000, 100)
    for _ in range(3000):
        slow.add(0.5)
    assert slow.typical_s <= 1
    for _ in range(700):
        slow.add(64.0)
    assert slow.typical_s >= 64
    for seconds in (-1.0, 0.0, 1e12):
        quick.add(seconds)
    assert 0 < HoldTimes().retry_after_s(1, 0) <= 3600


class Opens(RuleBasedStateMachine):
    """Requests over unequal devices, two of them shared, in every order: asked, waiting, opened stage by stage, aborted at any
    step, refused by a stage at the last moment, closed, failed, learned from."""

    @initialize(
        budgets=st.lists(st.integers(0, 400_000), min_size=3, max_size=3),
        homes=st.sampled_from([(0, 1, 2), (0, 1, 0), (0, 0, 0), (1, 0, 0)]),
        bypass=st.integers(0, 2),
        share=st.sampled_from([None, None, 0.6]),
    )
    def start(self, budgets, homes, bypass, share):
        self.fence, self.bypass = (0, 1, 2, 4), bypass
        self.cost = CostModel(CFG, self.fence, POLICY, [256] * 3)
        self.clock = Clock()
        devices = [Device(f"d{i}", budget, 256) for i, budget in enumerate(budgets[: len(set(homes))])]
        self.ledger = Ledger(devices, homes)
        self.start_books = self.ledger.devices()
        self.admission = Admission(self.ledger, self.cost, LIMIT, bypass=bypass, tenant_share=share, clock=self.clock)
        self.homes, self.next = homes, 0
        self.waiting: dict[int, Ticket] = {}
        self.opening: dict[int, tuple[Admit, int]] = {}
        self.learned = [0, 0, 0]
        self.passed: dict[int, int] = {}
        self.taken: list[dict[int, tuple[int, int]]] = [{} for _ in devices]

    def admit(self, session, verdict):
        self.opening[session] = verdict, 0
        for other in self.waiting:
            if other < session:
                self.passed[other] += 1

    def settle(self):
        """Moves on the tickets that were told."""
        told = [(session, ticket) for session, ticket in self.waiting.items() if ticket.outcome.done()]
        for session, _ in told:
            del self.waiting[session]
        for session, ticket in told:
            verdict = None if ticket.outcome.cancelled() else ticket.outcome.result()
            if isinstance(verdict, Admit):
                self.opening[session] = verdict, 0
                for other, rival in self.waiting.items():
                    self.passed[other] += other < session and not rival.outcome.done()

    @rule(ctx=st.integers(1, 4096), states=st.booleans(), tenant=st.sampled_from("ab"), wait=st.sampled_from([0, 3, 50]))
    def request(self, ctx, states, tenant, wait):
        session, self.next = self.next, self.next + 1
        request = Request(session, SessionShape(ctx, 1, "states" if states else "replay", 2), tenant)
        got = self.admission.submit(request, wait) if wait else self.admission.ask(request)
        self.settle()
        if isinstance(got, Ticket):
            self.waiting[session], self.passed[session] = got, 0
        elif isinstance(got, Admit):
            self.admit(session, got)
            assert not self.waiting or self.bypass or self.admission._tenants.share
        elif isinstance(got, Refuse) and got.retry_after_s is None and got.longest_ctx:
            alone = Ledger([Device("d", c) for c in self.ledger.capacities], self.homes)
            charges = self.cost.charges(SessionShape(got.longest_ctx, 1, request.shape.recurrent, 2))
            assert alone.shortage(charges) is None

    @precondition(lambda self: self.opening)
    @rule(data=st.data())
    def allocate_on_the_next_stage(self, data):
        session = data.draw(st.sampled_from(sorted(self.opening)))
        admit, stage = self.opening[session]
        if stage < 3:
            start, size = admit.offsets[stage], admit.charges[stage]
            spans = self.taken[self.homes[stage]]
            for other, (a, n) in spans.items():
                assert start + size <= a or a + n <= start or not n, (session, other)
            assert start + size <= self.start_books[self.homes[stage]]["budget_bytes"]
            spans[4 * session + stage] = start, size
            self.opening[session] = admit, stage + 1

    @precondition(lambda self: self.opening)
    @rule(data=st.data())
    def close_or_abort(self, data):
        """At whatever stage its opening has come to; then once more."""
        session = data.draw(st.sampled_from(sorted(self.opening)))
        del self.opening[session]
        for spans in self.taken:
            for stage in range(3):
                spans.pop(4 * session + stage, None)
        self.admission.release(session)
        self.settle()
        self.admission.release(session)
        self.settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), expire=st.booleans())
    def leave_the_queue(self, data, expire):
        session = data.draw(st.sampled_from(sorted(self.waiting)))
        ticket = self.waiting[session]
        if expire:
            self.admission.expire(session)
        else:
            del self.waiting[session]
            self.admission.release(session)
        assert ticket.outcome.done()
        self.settle()

    @rule(seconds=st.sampled_from([1, 5]))
    def time_passes(self, seconds):
        self.clock.now += seconds

    @rule(stage=st.integers(0, 2), used=st.integers(0, 40_000))
    def learn(self, stage, used):
        self.learned[stage] = max(self.learned[stage], used)
        self.admission.learn(stage, used)
        self.settle()

    @invariant()
    def no_device_is_over_its_budget_and_the_books_are_the_sum(self):
        for i, device in enumerate(self.ledger.devices()):
            mine = [s for s in range(3) if self.homes[s] == i]
            held = sum(admit.charges[s] for admit, _ in self.opening.values() for s in mine)
            assert device["reserved_bytes"] == held <= device["budget_bytes"]
            assert device["free_bytes"] == max(0, device["budget_bytes"] - held - device["learned_bytes"])
            assert device["learned_bytes"] <= sum(self.learned[s] for s in mine)

    @invariant()
    def the_head_waits_only_while_it_does_not_fit(self):
        live = [t for t in self.waiting.values() if t.deadline > self.clock.now]
        head = next((t for t in live if self.admission._tenants.allow(t.request.tenant, t.charges)), None)
        if head is not None and live[0] is next(iter(self.waiting.values())):
            got = self.ledger.reserve(-1, head.charges)
            if isinstance(got, list):
                self.ledger.release(-1)
            assert not isinstance(got, list), "the head fits and waits"

    @invariant()
    def nobody_is_passed_too_often(self):
        if self.admission._tenants.share is None:
            assert all(self.passed[session] <= self.bypass for session in self.waiting)

    def teardown(self):
        if not hasattr(self, "ledger"):
            return
        for session in [*self.waiting, *self.opening]:
            self.admission.release(session)
        self.settle()
        for session in list(self.opening):
            self.admission.release(session)
        assert self.ledger.live == 0 and not self.admission._admitted and not any(self.admission._wanted)
        for before, after in zip(self.start_books, self.ledger.devices(), strict=True):
            assert after["reserved_bytes"] == 0
            assert after["free_bytes"] == before["budget_bytes"] - after["learned_bytes"]
            assert after["largest_free_bytes"] == after["free_bytes"]


TestOpens = Opens.TestCase
TestOpens.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
