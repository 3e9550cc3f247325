"""Drafters propose what followed before, wrong ones are refused by name, and the control drafts when it pays."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_pp.driver.speculation.drafters import CallableDrafter, Draft, DraftControl, NgramDrafter, checked_drafts
from memra_pp.errors import InputError

TOKENS = st.lists(st.integers(0, 3), max_size=60)


def brute_force(tokens: list[int], k: int, min_match: int) -> list[int]:
    """Every earlier end in turn: the longest match, the latest of equals, copied token by token behind the text, as far as
    the second of that order, of at least a quarter of its length, agrees."""
    n = len(tokens)

    def match(end: int) -> int:
        return next((i for i in range(end) if tokens[end - 1 - i] != tokens[n - 1 - i]), end)

    def copy(end: int) -> list[int]:
        text = list(tokens)
        for _ in range(k):
            text.append(text[len(text) - (n - end)])
        return text[n:]

    ranked = sorted(((match(end), end) for end in range(1, n)), reverse=True)
    if not ranked or ranked[0][0] < min_match:
        return []
    follow = copy(ranked[0][1])
    if len(ranked) > 1 and ranked[1][0] >= max(min_match, ranked[0][0] / 4):
        rival = copy(ranked[1][1])
        return follow[: next((i for i in range(k) if follow[i] != rival[i]), k)]
    return follow


@given(TOKENS, st.integers(1, 20), st.integers(1, 4))
def test_ngram_is_the_latest_of_the_longest_matches(tokens: list[int], k: int, min_match: int) -> None:
    assert NgramDrafter(min_match).propose(tokens, k) == brute_force(tokens, k, min_match)


@given(TOKENS, TOKENS, st.integers(1, 5), st.integers(1, 5), st.integers(1, 60))
def test_ngram_finds_a_match_however_long(a: list[int], b: list[int], times: int, more: int, k: int) -> None:
    tokens = (a * times + b) * more + a
    assert NgramDrafter().propose(tokens, k) == brute_force(tokens, k, 1)


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(1, 5))
def test_ngram_prefers_a_longer_match_to_a_later_one(lengths: list[int], k: int) -> None:
    end = list(range(40))
    tokens = [t for i, length in enumerate(lengths) for t in (*end[40 - length :], 100 + i)] + end
    assert NgramDrafter().propose(tokens, k) == brute_force(tokens, k, 1)


@given(TOKENS, st.lists(st.tuples(TOKENS, st.integers(0, 10)), max_size=8))
def test_ngram_keeps_up_with_a_text_that_grows_shrinks_and_changes(
    tokens: list[int], edits: list[tuple[list[int], int]]
) -> None:
    drafter = NgramDrafter()
    for new, dropped in edits:
        tokens = tokens[: max(0, len(tokens) - dropped)] + new
        assert drafter.propose(tokens, 5) == brute_force(tokens, 5, 1)


def test_ngram_reads_another_text_afresh() -> None:
    drafter = NgramDrafter()
    assert drafter.propose([1, 2, 3] * 1000 + [1, 2], 2) == [3, 1]
    assert drafter.propose(np.array([4, 5, 6] * 2000 + [4, 5]), 2) == [6, 4]  # type: ignore[arg-type]
    assert drafter.propose((7, 8, 9, 7, 8), 2) == [9, 7]


@pytest.mark.parametrize("changed", [range(900), range(991, 1000)])
def test_ngram_sees_a_change_at_either_end(changed: range) -> None:
    drafter, text = NgramDrafter(), list(range(1000))
    drafter.propose(text, 1)
    for i in changed:
        text[i] += 1000
    found = changed[5]
    assert drafter.propose([*text, *text[found - 3 : found]], 1) == [text[found]]


def test_ngram_goes_round_where_the_copy_ends() -> None:
    assert NgramDrafter().propose(list(b"abcabcab"), 6) == list(b"cabcab")
    assert NgramDrafter().propose([7] * 9, 3) == [7] * 3


def test_ngram_without_a_guess() -> None:
    assert NgramDrafter().propose([], 4) == []
    assert NgramDrafter().propose([1], 4) == []
    assert NgramDrafter().propose([1, 2, 3, 4], 4) == []
    assert NgramDrafter(2).propose([1, 2, 3, 2], 4) == []
    assert NgramDrafter().propose([1, 2, 3, 2], 4) == [3, 2, 3, 2]
    assert NgramDrafter().propose([1, 2, 1, 2], 0) == []


def test_ngram_stops_where_line_after_line_has_differed() -> None:
    lines = [token for number in range(100, 104) for token in (1, 2, number, 3, 4)]
    assert NgramDrafter().propose([*lines, 1], 8) == [2]
    assert NgramDrafter().propose([*lines, 1, 2, 104], 8) == []
    assert NgramDrafter().propose([*lines, 1, 2, 104, 3], 8) == [4, 1, 2]


def test_a_callable_is_a_drafter() -> None:
    assert CallableDrafter(lambda tokens, k: (t + 1 for t in tokens[-k:])).propose([1, 2, 3], 2) == [3, 4]


def test_good_drafts_become_plain_integers() -> None:
    ids = checked_drafts(np.array([3, 0], np.int32), 2, 4)
    assert ids == [3, 0] and all(type(t) is int for t in ids)
    assert checked_drafts((), 2, 4) == []


@pytest.mark.parametrize(
    ("drafts", "says"),
    [
        (None, "None"),
        (5, "5"),
        ([1, 2, 3], "=3.*k=2"),
        ([1, 4], r"\[1\]=4.*0 to 3"),
        ([-1], r"\[0\]=-1"),
        ([1.0], r"\[0\]=1.0"),
        ([True], r"\[0\]=True"),
        ("ab", r"\[0\]='a'"),
        ([[1]], r"\[0\]=\[1\]"),
    ],
)
def test_bad_drafts_name_the_drafter(drafts: Any, says: str) -> None:
    with pytest.raises(InputError, match=f"the drafter's proposal.*{says}"):
        checked_drafts(drafts, 2, 4)


@pytest.mark.parametrize("by", ["ngram", "models/small.gguf", Path("small"), NgramDrafter(), lambda tokens, k: []])
def test_who_may_draft(by: Any) -> None:
    draft = Draft(k=np.int64(3), by=by)  # type: ignore[arg-type]
    assert type(draft.k) is int and draft.by is by


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"k": 0}, "k=0"),
        ({"k": 257}, "k=257"),
        ({"k": 1.0}, "k=1.0"),
        ({"by": ""}, "by=''"),
        ({"by": None}, "by=None"),
        ({"by": 3}, "by=3"),
        ({"by": NgramDrafter}, "by=<class"),
        ({"recurrent": "rewind"}, "recurrent='rewind'"),
        ({"recurrent": ["replay"]}, "recurrent=.*replay"),
    ],
)
def test_a_draft_that_cannot_be_names_the_field(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        Draft(**options)


@pytest.mark.parametrize("value", [0, 257, "2", 2.0])
def test_a_drafter_or_control_that_cannot_be_names_the_argument(value: Any) -> None:
    with pytest.raises(InputError, match="min_match"):
        NgramDrafter(value)
    with pytest.raises(InputError, match="k_max"):
        DraftControl(value)


def run(
    control: DraftControl,
    rounds: int,
    right: Callable[[], bool],
    per_row: float = 0.1,
    draft_seconds: float = 0.0,
    pause: Callable[[int], float] = lambda i: 0.0,
) -> list[int]:
    """The `k` of each round of a made-up model: a traversal takes 1 s and `per_row` for every row after the first."""
    asked = []
    for i in range(rounds):
        k = control.next_k()
        accepted = sum(itertools.takewhile(bool, (right() for _ in range(k))))
        control.record(k, accepted, 1 + k, 1 + per_row * k + pause(i), draft_seconds * k)
        asked.append(k)
    return asked


def always() -> bool:
    return True


def never() -> bool:
    return False


def often(p: float) -> Callable[[], bool]:
    rng = random.Random(5)
    return lambda: rng.random() < p


@pytest.mark.parametrize("k_max", [1, 4, 8])
def test_drafts_that_are_always_right_get_all_they_may(k_max: int) -> None:
    asked = run(DraftControl(k_max), 200, always)
    assert asked[:16] == [k_max] * 16
    assert sum(k != k_max for k in asked) <= 4


@pytest.mark.parametrize("k_max", [1, 4, 8, 256])
def test_drafts_that_are_never_right_are_given_up(k_max: int) -> None:
    control = DraftControl(k_max)
    asked = run(control, 300, never)
    assert sum(k > 0 for k in asked[:100]) <= 25
    assert sum(asked[100:200]) <= 3 and sum(asked[200:]) <= 3
    assert control.acceptance < 0.2


def test_drafts_that_come_right_again_come_back() -> None:
    control = DraftControl(4)
    run(control, 300, never)
    asked = run(control, 100, always)
    back = asked.index(1)
    assert back <= 64
    assert asked[back + 1] >= 2
    assert asked[back + 10 :].count(4) >= len(asked[back + 10 :]) - 2


def test_waits_double_while_probes_fail() -> None:
    control = DraftControl(4)
    asked = run(control, 400, never)
    begun = next(i for i in range(400) if not any(asked[i : i + 4]))
    probes = [i for i in range(begun, 400) if asked[i]]
    gaps = [b - a - 1 for a, b in itertools.pairwise([begun - 1, *probes])]
    assert gaps[:5] == [4, 8, 16, 32, 64] and set(gaps[5:]) == {64}
    assert all(asked[i] == 1 for i in probes)


def test_a_drafter_with_no_guess_is_not_blamed() -> None:
    control = DraftControl(4)
    for _ in range(200):
        assert control.next_k() == 4
        control.record(0, 0, 1, 1.0, 0.001)
    before = control.acceptance
    control.record(4, 4, 5, 1.2, 0.001)
    assert control.acceptance > before


def test_a_probe_without_a_guess_is_asked_again() -> None:
    control = DraftControl(4)
    run(control, 300, never)
    while not control.next_k():
        control.record(0, 0, 1, 1.0, 0.0)
    for _ in range(5):
        assert control.next_k() == 1
        control.record(0, 0, 1, 1.0, 0.0)


def test_the_dearer_a_row_or_a_draft_the_fewer_drafts() -> None:
    def settled(**costs: Any) -> float:
        return float(np.mean(run(DraftControl(8), 400, often(0.7), **costs)[200:]))

    cheap, dear, dearest = settled(per_row=0.02), settled(per_row=0.2), settled(per_row=0.9)
    assert cheap > 4 and 1 <= dear < cheap - 2 and dearest < 0.5
    assert settled(per_row=0.02, draft_seconds=0.18) < cheap - 2


@pytest.mark.parametrize(("at", "by"), [(set(), 30), ({16, 17}, 30), ({17, 18}, 100)])
def test_dear_rows_are_found_out_though_every_draft_is_right(at: set[int], by: int) -> None:
    asked = run(DraftControl(4), 300, always, per_row=1.2, pause=lambda i: 100.0 * (i in at))
    assert sum(asked[by:]) <= 10


@pytest.mark.parametrize("at", [{0}, {1}, {2}, {0, 1}, {18}, {20, 21}])
def test_a_pause_of_seconds_is_soon_forgotten(at: set[int]) -> None:
    asked = run(DraftControl(4), 100, always, pause=lambda i: 100.0 * (i in at))
    assert sum(k < 4 for k in asked[:60]) <= 10
    assert asked[60:].count(4) >= 38


@pytest.mark.parametrize("p", [0.3, 0.6, 0.9])
def test_acceptance_is_that_of_the_drafts(p: float) -> None:
    control, right, seen = DraftControl(4), often(p), []
    for _ in range(400):
        run(control, 1, right, per_row=0.01)
        seen.append(control.acceptance)
    assert abs(np.mean(seen[50:]) - p) < 0.05


def test_a_clock_that_stands_still_is_borne() -> None:
    control = DraftControl(4)
    for seconds in (0.0, 1.0):
        for _ in range(20):
            control.record(0, 0, 1, seconds, 0.0)
            control.record(4, 4, 5, 0.0, 0.0)
            assert 0 <= control.next_k() <= 4


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8), st.integers(1, 12), st.floats(0, 1e9), st.floats(0, 1e9))))
def test_whatever_is_recorded_the_answer_is_in_bounds_and_the_same_again(
    rounds: list[tuple[int, int, int, float, float]],
) -> None:
    one, other = DraftControl(8), DraftControl(8)
    for proposed, accepted, rows, seconds, draft_seconds in rounds:
        for control in (one, other):
            control.record(proposed, min(accepted, proposed), rows, seconds, draft_seconds)
        assert 0 <= one.next_k() <= 8
        assert one.next_k() == other.next_k()
