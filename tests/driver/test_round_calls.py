"""A draft/verify round: what it costs, counts, refuses and leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ringed import launch_tiny, some_tokens
from standing import assert_books_agree, assert_empty, assert_stands, image

import memra_pp
from memra_pp.errors import CacheError, CapacityExceeded, InputError, SnapshotPinned, StageError
from memra_pp.stage.frames import STEP, Entry, Frame

MODES = ["replay", "states"]
PROMPT = some_tokens(20)
GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())

PATTERNS = {
    "nothing": [(0, 3), (0, 1), (0, 6), (0, 6)],
    "some": [(1, 3), (2, 6), (5, 6), (1, 2)],
    "everything": [(3, 3), (1, 1), (6, 6), (6, 6)],
    "no drafts": [(0, 0), (0, 0)],
    "a mixture": [(2, 6), (0, 0), (6, 6), (0, 4), (3, 4), (0, 0), (1, 1), (4, 6), (0, 1)],
}
"""Right drafts and drafts in all, round by round."""


@pytest.fixture(scope="module", params=["hybrid", "gemma3_tiny", "ringed"])
def pipe(request: pytest.FixtureRequest) -> Iterator[memra_pp.Pipeline]:
    with launch_tiny(request.param, stages=3) as pipe:
        yield pipe
        assert_empty(pipe)


@pytest.fixture(scope="module")
def text(pipe: memra_pp.Pipeline) -> list[int]:
    """The greedy text behind the prompt."""
    return list(pipe.generate(PROMPT, max_new_tokens=80, sampling=GREEDY))


@pytest.fixture
def sent(pipe: memra_pp.Pipeline, monkeypatch: pytest.MonkeyPatch) -> list[Entry]:
    """The steps that crossed the stages."""
    entries: list[Entry] = []
    whole = pipe.chain._send

    def send(frame: Frame) -> None:
        entries.extend(entry for entry in frame.entries if entry.op == STEP)
        whole(frame)

    monkeypatch.setattr(pipe.chain, "_send", send)
    return entries


def drafts_of(text: list[int], at: int, right: int, of: int) -> list[int]:
    """`of` drafts of what stands at `text[at:]`, the first `right` right and the next one wrong."""
    return [token if i < right else (token + 1 + i) % 61 for i, token in enumerate(text[at : at + of])]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=list(PATTERNS))
def test_a_round_costs_one_traversal_whatever_is_accepted(
    pipe: memra_pp.Pipeline, text: list[int], sent: list[Entry], pattern: list[tuple[int, int]], mode: Any
) -> None:
    """Its frame holds the rows accepted last, the next token and the drafts: the replay does not grow."""
    with pipe.open(PROMPT, max_new_tokens=80, speculate=6, recurrent=mode) as s:
        token, made, replay = int(s.prefill().argmax()), 1, 0
        assert token == text[0]
        for right, of in pattern:
            before = pipe.stats()
            done = s.round(drafts_of(text, made, right, of), next=token)
            after = pipe.stats()
            grown = {name: after[name] - before[name] for name in ("traversals", "rounds", "drafted", "accepted", "rebuilds")}
            assert grown == {"traversals": 1, "rounds": 1, "drafted": of, "accepted": right, "rebuilds": 0}
            assert (done.accepted, done.next, len(done.rows)) == (right, text[made + right], of + 1)
            assert sent[-1].rows == replay + 1 + of
            kept = mode == "states" and right > 0
            replay = right if pipe.cfg.recurrent and right < of and not kept else 0
            token, made = done.next, made + right + 1
            assert s.tokens == PROMPT + text[: made - 1]
            assert_books_agree(s)
        assert_stands(s, PROMPT + text[:made], s.decode(token)[None])


@pytest.mark.parametrize("mode", MODES)
def test_rounds_go_on_from_their_own_next_token(pipe: memra_pp.Pipeline, text: list[int], mode: Any) -> None:
    with pipe.open(PROMPT, max_new_tokens=80, speculate=4, recurrent=mode) as s:
        s.prefill()
        with pytest.raises(InputError, match="next="):
            s.round([1])
        made = [s.round((), next=text[0]).next]
        while len(made) < 30:
            done = s.round(drafts := drafts_of(text, 1 + len(made), len(made) % 3, 4))
            made += [*drafts[: done.accepted], done.next]
        assert made == text[1 : 1 + len(made)]
        s.decode(made[-1])
        with pytest.raises(InputError, match="next="):
            s.round(())
        with s.snapshot() as snap:
            next_one = s.round((), next=1).next
            s.rollback(snap, 1)
            with pytest.raises(InputError, match="next="):
                s.round(())
            assert s.round((), next=next_one).rows.shape == (1,)


def test_a_round_answers_what_its_sampler_wants(pipe: memra_pp.Pipeline) -> None:
    drafts = some_tokens(4)
    with pipe.open(PROMPT, max_new_tokens=20, speculate=4) as s:
        s.prefill()
        with s.snapshot() as snap:
            rows = s.verify([1, *drafts])
            s.rollback(snap, 0)
        for params, want in ((None, rows.argmax(-1)), (memra_pp.SamplingParams(seed=3), rows)):
            with pipe.open(PROMPT, max_new_tokens=20, speculate=4) as other:
                other.prefill()
                np.testing.assert_array_equal(other.round(drafts, memra_pp.Sampler(params), next=1).rows, want)
        best = s.round(drafts, memra_pp.Sampler(memra_pp.SamplingParams(top_k=3)), next=1).rows
        np.testing.assert_array_equal(best["id"][:, 0], rows.argmax(-1))
        np.testing.assert_array_equal(best["logit"], -np.sort(-rows, -1)[:, :3])


BAD_ROUNDS = {
    "more drafts than speculate": ({"drafts": [1] * 5}, InputError, "k=4"),
    "a draft of another vocabulary": ({"drafts": [1, 512]}, InputError, "512"),
    "a draft that is no token": ({"drafts": [1.5]}, InputError, "proposal"),
    "drafts that are no list": ({"drafts": 3}, InputError, "proposal"),
    "a token of another vocabulary": ({"drafts": [], "next": 512}, InputError, "512"),
    "a token that is none": ({"drafts": [], "next": "1"}, InputError, "token"),
}


@pytest.mark.parametrize(("asked", "error", "says"), BAD_ROUNDS.values(), ids=list(BAD_ROUNDS))
def test_a_round_that_is_refused_changes_nothing(
    pipe: memra_pp.Pipeline, asked: dict[str, Any], error: type[Exception], says: str
) -> None:
    """Neither do the tokens and the token to be fed next."""
    with pipe.open(PROMPT, max_new_tokens=30, speculate=4) as s, pipe.open(PROMPT, max_new_tokens=30) as other:
        s.prefill(), other.prefill()
        next_one = s.round([7, 7], next=5).next
        other.decode(5)
        before, counted = image(s), pipe.stats()
        with pytest.raises(error, match=says):
            s.round(**asked)
        assert image(s) == before and pipe.stats()["rounds"] == counted["rounds"]
        assert s.round(()).next == int(other.decode(next_one).argmax())


class Unable(memra_pp.Sampler):
    """One whose answers are not finite, say."""

    def pick(self, answer: Any, position: int) -> int:
        raise StageError(f"no token for position {position}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drafts", [[], [1], [1, 2, 3, 4]])
def test_a_sampler_that_fails_leaves_no_draft_behind(pipe: memra_pp.Pipeline, drafts: list[int], mode: Any) -> None:
    """Nor the round's snapshot: the session stands behind the token fed, and goes on."""
    with pipe.open(PROMPT, max_new_tokens=30, speculate=4, recurrent=mode) as s:
        s.prefill()
        with pytest.raises(StageError, match="position 21"):
            s.round(drafts, Unable(), next=5)
        assert s.tokens == [*PROMPT, 5]
        done = s.round([7, 7], next=6)
        assert_stands(s, [*PROMPT, 5, 6, *[7] * done.accepted, 8], s.decode(8)[None])


def test_a_round_needs_a_free_snapshot_unless_it_has_no_drafts(pipe: memra_pp.Pipeline, text: list[int]) -> None:
    with pipe.open(PROMPT, max_new_tokens=30, speculate=4) as s:
        s.prefill()
        with s.snapshot():
            before = image(s)
            with pytest.raises(CapacityExceeded, match="snapshots=1"):
                s.round(text[1:3], next=text[0])
            assert image(s) == before and s.tokens == PROMPT
            assert s.round((), next=text[0]).next == text[1]
        assert s.round(text[2:4]).accepted == 2
    with pipe.open(PROMPT, max_new_tokens=30, snapshots=0) as s:
        s.prefill()
        assert s.round((), next=text[0]).next == text[1] and s.round(()).next == text[2]


@pytest.mark.parametrize("mode", MODES)
def test_a_snapshot_from_before_the_rounds_leads_back_into_them(pipe: memra_pp.Pipeline, text: list[int], mode: Any) -> None:
    with pipe.open(PROMPT, max_new_tokens=80, speculate=4, recurrent=mode, snapshots=2) as s:
        s.prefill()
        snap = s.snapshot()
        for accept in (9, 3, 0):
            made, token = 0, text[0]
            for right in (4, 2, 0, 1):
                done = s.round(drafts_of(text, made + 1, right, 4), next=token)
                made, token = made + done.accepted + 1, done.next
            assert s.tokens == PROMPT + text[:made]
            s.rollback(snap, accept)
            assert_stands(s, [*PROMPT, *text[:accept], 5], s.decode(5)[None])
            s.rollback(snap, 0)


def test_the_drafts_possible_fit_and_one_more_does_not(pipe: memra_pp.Pipeline) -> None:
    """At the end of the context, owing a replay or not; see below for rings."""
    for back in (False, True):
        with pipe.open(PROMPT, max_new_tokens=2, speculate=9, snapshots=2) as s:
            s.prefill()
            snap = s.snapshot()
            room = s.shape.ctx - len(PROMPT)
            assert s.drafts_possible == 9
            s.extend(some_tokens(room - 4))
            if back:
                s.rollback(snap, room - 5)
            possible = s.drafts_possible
            assert possible == 3 + back
            before = image(s)
            with pytest.raises(CapacityExceeded):
                s.round([1] * (possible + 1), next=1)
            assert image(s) == before
            s.round([1] * possible, next=1)


def test_nor_do_drafts_lap_a_pinned_snapshot() -> None:
    with launch_tiny("ringed", stages=2) as pipe, pipe.open(PROMPT, max_new_tokens=9000, speculate=9, snapshots=2) as s:
        s.prefill()
        snap = s.snapshot()
        s.extend(some_tokens(4159 - 20 - 6))
        for back in (False, True):
            if back:
                s.rollback(snap, 4159 - 20 - 6)
            assert s.drafts_possible == 5
            before = image(s)
            with pytest.raises(SnapshotPinned, match="snapshot 1 at row 20"):
                s.round([1] * 6, next=1)
            assert image(s) == before
        s.round([1] * 5, next=1)
        snap.close()
        assert s.drafts_possible == 9


def test_no_draft_is_possible_where_no_row_is(pipe: memra_pp.Pipeline) -> None:
    with pipe.open(PROMPT, max_new_tokens=2, speculate=3) as s:
        s.prefill()
        s.extend(some_tokens(s.shape.ctx - len(PROMPT)))
        assert s.drafts_possible == 0
        with pytest.raises(CacheError):
            s.round((), next=1)
