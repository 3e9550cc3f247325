"""`Ledger`: charged on every stage or on none, to the byte, and given back exactly."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memra_pp.admission import Ledger
from memra_pp.errors import AdmissionError


def test_exactly_the_free_bytes_fit_and_one_more_does_not():
    ledger = Ledger([100, 50])
    ledger.reserve(1, [40, 20])
    for charges in ([61, 30], [60, 31]):
        with pytest.raises(AdmissionError):
            ledger.reserve(2, charges)
        assert ledger.reserved == (40, 20)
    ledger.reserve(2, [60, 30])
    assert ledger.reserved == (100, 50)
    with pytest.raises(AdmissionError):
        ledger.reserve(3, [1, 0])
    ledger.reserve(3, [0, 0])


@pytest.mark.parametrize("stage", range(3))
def test_a_stage_that_cannot_hold_its_share_leaves_every_stage_as_it_was_and_is_named(stage):
    ledger = Ledger([100] * 3)
    ledger.reserve(1, [30] * 3)
    charges = [10] * 3
    charges[stage] = 75
    with pytest.raises(AdmissionError, match=f"stage {stage} needs 75 .* 70 of 100 .*5 short"):
        ledger.reserve(2, charges)
    assert ledger.reserved == (30, 30, 30)
    ledger.release(2)
    assert ledger.reserved == (30, 30, 30)


def test_release_is_idempotent_and_gives_back_what_was_reserved():
    ledger = Ledger([100, 100])
    charges = [7, 11]
    ledger.reserve(1, charges)
    ledger.reserve(2, [1, 1])
    charges[0] = 99
    ledger.release(1)
    assert ledger.reserved == (1, 1)
    ledger.release(1)
    ledger.release(77)
    assert ledger.reserved == (1, 1)
    ledger.reserve(1, [99, 99])


def test_a_session_is_charged_once():
    ledger = Ledger([100])
    ledger.reserve(1, [10])
    with pytest.raises(AdmissionError, match="session 1"):
        ledger.reserve(1, [20])
    ledger.release(1)
    assert ledger.reserved == (0,)


def test_a_charge_is_for_every_stage():
    ledger = Ledger([100, 100])
    for charges in ([1], [1, 1, 1]):
        with pytest.raises(ValueError):
            ledger.reserve(1, charges)
    assert ledger.reserved == (0, 0)


@given(
    budgets=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    script=st.lists(
        st.tuples(st.integers(0, 5), st.booleans(), st.lists(st.integers(0, 40), min_size=4, max_size=4)), max_size=30
    ),
)
def test_reserved_is_the_sum_of_the_live_sessions_and_never_past_a_budget(budgets, script):
    ledger, live = Ledger(budgets), {}
    for session, leave, amounts in script:
        charges = tuple(amounts[: len(budgets)])
        if leave:
            ledger.release(session)
            live.pop(session, None)
        elif session not in live:
            fits = all(r + c <= b for r, c, b in zip(ledger.reserved, charges, budgets, strict=True))
            if fits:
                ledger.reserve(session, charges)
                live[session] = charges
            else:
                with pytest.raises(AdmissionError):
                    ledger.reserve(session, charges)
        assert ledger.reserved == tuple(sum(c[s] for c in live.values()) for s in range(len(budgets)))
        assert all(r <= b for r, b in zip(ledger.reserved, budgets, strict=True))


def test_threads_cannot_overdraw_it():
    ledger, admitted = Ledger([100, 100]), []

    def client(first: int) -> None:
        for session in range(first, first + 50):
            try:
                ledger.reserve(session, [3, 7])
            except AdmissionError:
                continue
            admitted.append(session)

    threads = [threading.Thread(target=client, args=(1000 * i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(admitted) == 100 // 7 and ledger.reserved == (3 * 14, 7 * 14)
    for session in admitted:
        ledger.release(session)
    assert ledger.reserved == (0, 0)
