"""`Ledger`: slabs on every stage or on none, to the byte, and given back exactly."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memra_pp.admission import Device, Ledger, Shortage, pooled
from memra_pp.errors import AdmissionError


def ledger_of(*budgets, homes=None):
    return Ledger([Device(f"cpu:{i}", budget) for i, budget in enumerate(budgets)], homes)


def test_exactly_the_free_bytes_fit_and_one_more_does_not():
    ledger = ledger_of(100, 50)
    assert ledger.reserve(1, [40, 20]) == [0, 0]
    for charges in ([61, 30], [60, 31]):
        assert isinstance(ledger.reserve(2, charges), Shortage)
        assert ledger.reserved == (40, 20)
    assert ledger.reserve(2, [60, 30]) == [40, 20]
    assert ledger.reserved == (100, 50)
    assert isinstance(ledger.reserve(3, [1, 0]), Shortage)
    assert ledger.reserve(3, [0, 0]) == [0, 0]


@pytest.mark.parametrize("stage", range(3))
def test_a_stage_that_cannot_hold_its_share_leaves_every_stage_as_it_was_and_is_named(stage):
    ledger = ledger_of(100, 100, 100)
    ledger.reserve(1, [30] * 3)
    charges = [10] * 3
    charges[stage] = 75
    short = ledger.reserve(2, charges)
    assert short == Shortage(stage, f"cpu:{stage}", 75, 70, 5, "free")
    assert str(short) == f"stage {stage} needs 75 bytes for this session and device cpu:{stage} has 70 free (5 short)"
    assert ledger.reserved == (30, 30, 30) and ledger.live == 1 and not ledger.release(2)


def test_the_stage_that_is_shortest_is_the_one_that_binds():
    short = ledger_of(100, 10, 50).reserve(1, [101, 40, 60])
    assert isinstance(short, Shortage) and (short.stage, short.short_by) == (1, 30)


def test_release_is_idempotent_and_gives_back_what_was_reserved():
    ledger = ledger_of(100, 100)
    ledger.reserve(1, [7, 11])
    ledger.reserve(2, [1, 1])
    assert ledger.release(1) and ledger.reserved == (1, 1)
    assert not ledger.release(1) and not ledger.release(77) and ledger.reserved == (1, 1)
    assert ledger.reserve(1, [99, 98]) != []


def test_a_session_is_charged_once():
    ledger = ledger_of(100)
    ledger.reserve(1, [10])
    with pytest.raises(AdmissionError, match="session 1"):
        ledger.reserve(1, [20])
    ledger.release(1)
    assert ledger.reserved == (0,)


def test_a_charge_is_for_every_stage():
    ledger = ledger_of(100, 100)
    for charges in ([1], [1, 1, 1]):
        with pytest.raises(ValueError):
            ledger.reserve(1, charges)
    assert ledger.reserved == (0, 0)


def test_stages_that_share_a_device_are_charged_together():
    ledger = ledger_of(100, 40, homes=[0, 1, 0])
    assert isinstance(ledger.reserve(1, [50, 10, 51]), Shortage)
    short = ledger.reserve(1, [70, 10, 40])
    assert short == Shortage(0, "cpu:0", 70, 60, 10, "free")
    assert ledger.reserve(1, [60, 10, 40]) == [0, 0, 60] and ledger.reserved == (100, 10)
    assert [d["stages"] for d in ledger.devices()] == [[0, 2], [1]]
    ledger.release(1)
    assert ledger.reserved == (0, 0)


@pytest.mark.parametrize("homes", [[0, 0], [0, 2], [1, 1], [], [0, 1, 3]])
def test_every_device_is_the_home_of_a_stage(homes):
    with pytest.raises(AdmissionError, match="homes"):
        ledger_of(1, 1, homes=homes)


def test_free_bytes_in_pieces_are_a_shortage_of_its_own_kind_and_a_hole_is_used_again():
    ledger = ledger_of(100, 1000)
    for session in range(10):
        ledger.reserve(session, [10, 10])
    for session in range(0, 10, 2):
        ledger.release(session)
    device = ledger.devices()[0]
    assert (device["free_bytes"], device["largest_free_bytes"], device["reserved_bytes"]) == (50, 10, 50)
    short = ledger.reserve(50, [11, 1])
    assert short == Shortage(0, "cpu:0", 11, 10, 1, "in one piece") and "in one piece" in str(short)
    assert ledger.reserved == (50, 50) and ledger.reserve(50, [10, 1]) == [0, 0]


def test_a_stage_whose_arena_is_in_pieces_leaves_the_ones_before_it_as_they_were():
    ledger = ledger_of(1000, 100)
    for session in range(10):
        ledger.reserve(session, [10, 10])
    for session in range(0, 10, 2):
        ledger.release(session)
    before = ledger.devices()
    assert isinstance(ledger.reserve(50, [500, 50]), Shortage) and ledger.devices() == before and ledger.live == 5


def test_what_was_learned_is_set_aside_and_never_falls():
    ledger = ledger_of(100, 100, homes=[0, 1, 0])
    ledger.reserve(1, [50, 0, 0])
    for used, learned in ((10, 10), (5, 10), (30, 30)):
        ledger.learn(0, used)
        assert [d["learned_bytes"] for d in ledger.devices()] == [learned, 0]
    ledger.learn(2, 5)
    assert ledger.devices()[0]["learned_bytes"] == 35 and ledger.capacities == (65, 100)
    assert isinstance(ledger.reserve(2, [16, 0, 0]), Shortage) and ledger.reserve(2, [15, 0, 0]) == [50, 0, 0]
    assert ledger.shortage([66, 0, 0], empty=True) == Shortage(0, "cpu:0", 66, 65, 1, "in all")
    ledger.learn(0, 10**9)
    assert ledger.devices()[0]["free_bytes"] == 0 and ledger.reserved == (65, 0)
    ledger.release(1), ledger.release(2)
    assert ledger.reserved == (0, 0) and isinstance(ledger.reserve(3, [1, 0, 0]), Shortage)


def test_a_budget_is_of_whole_units():
    ledger = Ledger([Device("cpu", 4096 * 3 + 4095, 4096)])
    assert ledger.devices()[0]["budget_bytes"] == 4096 * 3
    assert ledger.reserve(1, [4096 * 3]) == [0]


def test_shares_of_one_name_are_one_device():
    shares = [Device("a", 100, 8), Device("b", 30), Device("a", 59, 16)]
    assert pooled(shares) == ((Device("a", 144, 16), Device("b", 30)), (0, 1, 0))


@given(
    budgets=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    script=st.lists(
        st.tuples(st.integers(0, 5), st.booleans(), st.lists(st.integers(0, 40), min_size=4, max_size=4)), max_size=30
    ),
)
def test_reserved_is_the_sum_of_the_live_sessions_and_never_past_a_budget(budgets, script):
    ledger, live = ledger_of(*budgets), {}
    for session, leave, amounts in script:
        charges = tuple(amounts[: len(budgets)])
        if leave:
            ledger.release(session)
            live.pop(session, None)
        elif session not in live:
            got = ledger.reserve(session, charges)
            enough = all(r + c <= b for r, c, b in zip(ledger.reserved, charges, budgets, strict=True))
            if isinstance(got, Shortage):
                assert not enough or got.of == "in one piece"
            else:
                live[session] = charges, got
        assert ledger.reserved == tuple(sum(c[s] for c, _ in live.values()) for s in range(len(budgets)))
        for s, budget in enumerate(budgets):
            spans = sorted((at[s], at[s] + c[s]) for c, at in live.values() if c[s])
            assert all(a <= b for (_, a), (b, _) in pairwise(spans))
            assert not spans or spans[-1][1] <= budget


class Unwalkable(dict):
    """A dict that may be asked for one key only."""

    def __iter__(self):
        raise AssertionError("the live sessions were walked")

    keys = values = items = __iter__


def test_a_decision_never_walks_the_live_sessions():
    ledger = ledger_of(10_000, 10_000)
    ledger._live = Unwalkable()
    for session in range(1000):
        ledger.reserve(session, [10, 7])
    assert isinstance(ledger.reserve(1000, [1, 1]), Shortage)
    assert ledger.shortage([1, 1]) and ledger.release(500) and ledger.reserve(1001, [10, 1]) and ledger.devices()
