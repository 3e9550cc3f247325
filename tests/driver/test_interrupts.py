"""Ctrl-C at every line of a decision, an open or a close: the books are whole again at the next one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import memra_pp
from memra_pp.admission import Admission, CostModel, Device, Ledger, Request, SessionShape
from memra_pp.cache import KvPolicy, slab_bytes, stage_layout
from memra_pp.config import KvPlan, ModelConfig
from memra_pp.driver.door import Door
from memra_pp.errors import AdmissionError

ROOT = Path(memra_pp.__file__).parent
CFG = ModelConfig("toy", 3, 32, 40, 4096, (KvPlan(1, 32, 32),) * 3)
COST = CostModel(CFG, (0, 1, 2, 3), KvPolicy())
FULL = COST.charges(SessionShape(100))


@contextmanager
def interrupt_at(line: int, *files: str) -> Iterator[list[str]]:
    """Raises KeyboardInterrupt at the `line`-th line that runs in one of these files; says where, if so many ran."""
    paths, left, where = {str(ROOT / file) for file in files}, line, list[str]()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in paths:
            return None
        if event == "line" and not where:
            left -= 1
            if left == 0:
                where.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield where
    finally:
        sys.settrace(before)


def everywhere(files: tuple[str, ...], action: Callable[[], None], check: Callable[[str], None]) -> int:
    """Interrupts `action` at each of its lines in turn, and checks after each; how many there were."""
    line = 0
    while True:
        line += 1
        interrupted = False
        try:
            with interrupt_at(line, *files) as where:
                action()
        except KeyboardInterrupt:
            interrupted = True
        if not where:
            return line - 1
        check(f"{'' if interrupted else 'swallowed '}{where[0]}")


DECISIONS = ("admission/admission.py", "admission/ledger.py", "admission/arena.py", "admission/tenants.py", "driver/door.py")


@pytest.mark.parametrize("what", ["ask", "submit", "release", "leave the queue", "expire", "learn"])
def test_a_decision_cut_short_at_any_line_leaves_whole_books(what):
    holder, asker, waiter, next_one = 1, 2, 3, 4

    def fresh() -> tuple[Door, Admission]:
        ledger = Ledger([Device("a", 2 * FULL[0] + FULL[1]), Device("b", 3 * FULL[2])], (0, 0, 1))
        admission = Admission(ledger, COST, 4096, tenant_share=1.0)
        return Door(admission), admission

    state: list[Any] = []

    def request(session: int) -> Request:
        return Request(session, SessionShape(100), "me")

    def action() -> None:
        door, admission = state[0]
        match what:
            case "ask":
                door.enter(request(asker), 0, lambda: None)
            case "submit":
                door._ask(request(waiter), 60)
            case "release":
                door.leave(holder)
            case "leave the queue":
                door.leave(waiter)
            case "expire":
                door._locked(lambda: admission.expire(waiter))
            case "learn":
                door.learn(0, 10)

    def setup() -> None:
        door, admission = fresh()
        state[:] = [(door, admission)]
        if what != "ask":
            door.enter(request(holder), 0, lambda: None)
        if what in ("release", "leave the queue", "expire"):
            state.append(door._ask(request(waiter), 60))
            state.append(door._ask(request(next_one), 60))

    def check(where: str) -> None:
        door, admission = state[0]
        for session in (asker, holder, waiter, next_one):
            door.leave(session)
        for device in door.stats()["devices"]:
            assert device["reserved_bytes"] == 0, where
            assert device["free_bytes"] == device["largest_free_bytes"] == device["budget_bytes"] - device["learned_bytes"], (
                where
            )
        assert not admission._waiting and not any(admission._wanted) and not admission._tenants._held, where
        assert all(ticket.outcome.done() for ticket in state[1:]), where
        door.enter(request(9), 0, lambda: None)
        setup()

    setup()
    assert everywhere(DECISIONS, action, check) > 10


def test_a_waiting_request_that_was_given_slabs_and_not_told_gets_them_after_all():
    """The release of one session is cut short while it admits the next."""
    line = 0
    while True:
        line += 1
        admission = Admission(Ledger([Device(f"d{s}", n) for s, n in enumerate(FULL)]), COST, 4096)
        door = Door(admission)
        door.enter(Request(1, SessionShape(100)), 0, lambda: None)
        ticket = door._ask(Request(2, SessionShape(100)), 60)
        try:
            with interrupt_at(line, *DECISIONS) as where:
                door.leave(1)
        except KeyboardInterrupt:
            door.leave(1)
        assert ticket.outcome.done() and ticket.outcome.result().charges == FULL, where
        assert [d["reserved_bytes"] for d in door.stats()["devices"]] == list(FULL), where
        if not where:
            break
    assert line > 20


@pytest.fixture
def pipe(hybrid: Path) -> Iterator[memra_pp.Pipeline]:
    with memra_pp.launch(hybrid, backend="local", stages=2, threads=1) as probe:
        layouts = [stage_layout(probe.cfg, probe.fence, s, 31, probe.policy, snapshots=1) for s in range(2)]
    with memra_pp.launch(hybrid, backend="local", stages=2, threads=1, budget_bytes=[slab_bytes(a) for a in layouts]) as made:
        yield made


OPENING = (
    "driver/opener.py",
    "driver/scheduler.py",
    "driver/work.py",
    "admission/outcome.py",
    "driver/pipeline.py",
    "driver/session.py",
    *DECISIONS,
)


def test_an_open_cut_short_at_any_line_holds_nothing(pipe):
    opened: list[memra_pp.Session] = []

    def action() -> None:
        opened.append(pipe.open([1, 2, 3], max_new_tokens=20))

    def check(where: str) -> None:
        for session in opened:
            session.close()
        opened.clear()
        with pipe.open([1, 2, 3], max_new_tokens=20) as session:
            assert len(list(session.generate(1))) == 1, where
        assert [d["reserved_bytes"] + d["allocated_bytes"] for d in pipe.stats()["devices"]] == [0, 0], where

    assert everywhere(OPENING, action, check) > 50


def test_a_close_cut_short_at_any_line_goes_on_at_the_next(pipe):
    sessions = [pipe.open([1, 2, 3], max_new_tokens=20)]

    def action() -> None:
        sessions[-1].close()

    def check(where: str) -> None:
        sessions[-1].close()  # which has no effect, if the first had begun
        sessions.append(pipe.open([1, 2, 3], max_new_tokens=20))
        with pytest.raises(AdmissionError):
            pipe.open([1, 2, 3], max_new_tokens=20)

    assert everywhere(OPENING, action, check) > 30
