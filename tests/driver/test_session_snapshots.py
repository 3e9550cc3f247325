"""Snapshots of sessions: pins that hold, marks that are lapped, slots that run out, and where a rollback leads."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from ringed import launch_tiny, some_tokens
from standing import assert_books_agree, assert_empty, assert_snapshot, assert_stands, image

import memra_pp
from memra_pp.errors import CacheError, CapacityExceeded, InputError, RingLapped, SnapshotPinned

MODES = ["replay", "states"]
TOKENS = some_tokens(6000)


@pytest.fixture(scope="module", params=["gemma3_tiny", "ringed"])
def rings(request: pytest.FixtureRequest) -> Iterator[memra_pp.Pipeline]:
    """Rings of 4,159 rows and a window of 32."""
    with launch_tiny(request.param, stages=3, prefill_chunk=4096) as pipe:
        yield pipe
        assert_empty(pipe)


@pytest.fixture(scope="module", params=["hybrid", "gemma3_tiny", "ringed"])
def pipe(request: pytest.FixtureRequest) -> Iterator[memra_pp.Pipeline]:
    """Steps of at most 8 rows."""
    with launch_tiny(request.param, stages=3, prefill_chunk=8) as pipe:
        yield pipe
        assert_empty(pipe)


def test_a_pinned_snapshot_is_not_lapped_and_the_refusal_says_what_still_fits(rings: memra_pp.Pipeline) -> None:
    with rings.open(TOKENS[:40], max_new_tokens=4900, speculate=15, snapshots=2) as s:
        s.prefill()
        snap = s.snapshot()
        before = image(s)
        with pytest.raises(SnapshotPinned, match=r"snapshot 1 at row 40 needs: feed at most 4119 rows"):
            s.extend(TOKENS[40 : 40 + 4120])
        assert image(s) == before
        s.extend(TOKENS[40:4149])
        before = image(s)
        for call in (s.verify, s.extend, lambda tokens: s.round(tokens[1:], next=tokens[0])):
            with pytest.raises(SnapshotPinned, match=r"snapshot 1 .* at most 10 rows"):
                call(TOKENS[4149:4160])
            assert image(s) == before and s.tokens == TOKENS[:4149]
        assert s.drafts_possible == 9
        s.verify(TOKENS[4149:4159])
        with pytest.raises(SnapshotPinned, match="at most 0 rows"):
            s.decode(1)
        s.rollback(snap, 5)
        assert_stands(s, TOKENS[:46], s.decode(TOKENS[45])[None])
        snap.close()
        assert_stands(s, TOKENS[:4800], s.extend(TOKENS[46:4800])[None])
        assert_books_agree(s)


def test_the_oldest_pin_binds_until_it_is_closed(rings: memra_pp.Pipeline) -> None:
    with rings.open(TOKENS[:100], max_new_tokens=5500, snapshots=3) as s:
        s.prefill()
        old, new = s.snapshot(), None
        s.extend(TOKENS[100:1000])
        new, free = s.snapshot(), s.snapshot(pin=False)
        with pytest.raises(SnapshotPinned, match="snapshot 1 at row 100"):
            s.extend(TOKENS[1000:5000])
        old.close()
        s.extend(TOKENS[1000:5000])
        with pytest.raises(SnapshotPinned, match="snapshot 2 at row 1000"):
            s.extend(TOKENS[5000:5200])
        for snap in (free, new):
            s.rollback(snap, 3)
            assert_stands(s, TOKENS[:1004], s.decode(TOKENS[1003])[None])


def test_a_snapshot_that_is_not_pinned_is_lapped_and_the_session_goes_on(rings: memra_pp.Pipeline) -> None:
    with rings.open(TOKENS[:100], max_new_tokens=5500, snapshots=2) as s:
        s.prefill()
        lapped = s.snapshot(pin=False)
        s.extend(TOKENS[100:4300])
        held = s.snapshot(pin=False)
        before = image(s)
        for accept in (0, 7, 4200):
            with pytest.raises(RingLapped, match="re-prime"):
                s.rollback(lapped, accept)
        assert image(s) == before and s.tokens == TOKENS[:4300]
        assert_stands(s, TOKENS[:4310], s.extend(TOKENS[4300:4310])[None])
        s.rollback(held, 2)
        assert_stands(s, TOKENS[:4303], s.decode(TOKENS[4302])[None])


def test_what_still_fits_does_not_count_the_rows_to_be_replayed(rings: memra_pp.Pipeline) -> None:
    with rings.open(TOKENS[:40], max_new_tokens=5000) as s:
        s.prefill()
        snap = s.snapshot()
        s.extend(TOKENS[40:200])
        s.rollback(snap, 100)
        with pytest.raises(SnapshotPinned, match=r"4020 more rows at row 140 .* at most 4019 rows"):
            s.extend(TOKENS[140 : 140 + 4020])
        assert_stands(s, TOKENS[: 140 + 4019], s.extend(TOKENS[140 : 140 + 4019])[None])


def test_nor_does_what_fits_the_context(pipe: memra_pp.Pipeline) -> None:
    with pipe.open(TOKENS[:10], max_new_tokens=22) as s:
        s.prefill()
        with s.snapshot() as snap:
            s.extend(TOKENS[10:20])
            s.rollback(snap, 8)
            with pytest.raises(CapacityExceeded, match=r"23 more rows at row 18 .* at most 22,"):
                s.extend(TOKENS[18:41])
        assert_stands(s, TOKENS[:40], s.extend(TOKENS[18:40])[None])


@pytest.mark.parametrize("snapshots", [0, 1, 3])
def test_one_snapshot_more_than_opened_is_refused(pipe: memra_pp.Pipeline, snapshots: int) -> None:
    with pipe.open(TOKENS[:10], max_new_tokens=20, snapshots=snapshots) as s:
        s.prefill()
        taken = [s.snapshot() for _ in range(snapshots)]
        before, traversals = image(s), pipe.chain.traversals
        with pytest.raises(CapacityExceeded, match=f"snapshots={snapshots}"):
            s.snapshot()
        assert image(s) == before and pipe.chain.traversals == traversals
        for snap in taken[:1]:
            snap.close()
            s.snapshot()
        assert_stands(s, TOKENS[:11], s.decode(TOKENS[10])[None])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_snapshots_end_in_any_order(pipe: memra_pp.Pipeline, order: tuple[int, ...], mode: str) -> None:
    """Those that are left, and those that take the free slots, lead where they should."""
    with pipe.open(TOKENS[:10], max_new_tokens=60, speculate=4, snapshots=3, recurrent=mode) as s:
        s.prefill()
        snaps = []
        for at in (10, 14, 18):
            snaps.append(s.snapshot())
            s.verify(TOKENS[at : at + 4])
        for i in order[:2]:
            snaps[i].close()
            snaps[i].close()
        with pytest.raises(CacheError, match="ended"):
            s.rollback(snaps[order[0]], 0)
        assert_stands(s, TOKENS[:23], s.decode(TOKENS[22])[None])
        again = [s.snapshot(), s.snapshot()]
        s.verify(TOKENS[23:27])
        s.rollback(again[1], 1)
        assert_stands(s, TOKENS[:25], s.decode(TOKENS[24])[None])
        left = snaps[order[2]]
        s.rollback(left, 2)
        assert_stands(s, TOKENS[: left.pos + 3], s.decode(TOKENS[left.pos + 2])[None])


def test_going_back_to_an_older_snapshot_ends_the_newer_ones(pipe: memra_pp.Pipeline) -> None:
    with pipe.open(TOKENS[:10], max_new_tokens=40, snapshots=3) as s:
        s.prefill()
        old, same, new = s.snapshot(), s.snapshot(), None
        s.extend(TOKENS[10:14])
        new = s.snapshot()
        s.extend(TOKENS[14:16])
        s.rollback(same, 3)
        for use in (lambda: s.rollback(new, 0), lambda: s.rollback(new, 99)):
            with pytest.raises(CacheError, match="ended"):
                use()
        assert s.tokens == TOKENS[:13]
        s.rollback(old, 3)
        with pytest.raises(CacheError, match="ended"):
            s.rollback(same, 0)
        newest = [s.snapshot(), s.snapshot()]
        new.close(), same.close()
        assert [snap.pos for snap in newest] == [13, 13]
        assert_stands(s, TOKENS[:14], s.decode(TOKENS[13])[None])
        for snap, keeps in zip((*newest[::-1], old), (1, 0, 2), strict=True):
            s.rollback(snap, keeps)
            assert s.tokens == TOKENS[: snap.pos + keeps]
        assert_stands(s, TOKENS[:13], s.decode(TOKENS[12])[None])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("accept", [0, 1, 3, 4, 20])
def test_a_snapshot_taken_behind_a_rollback_is_that_of_a_session_that_never_went_back(
    pipe: memra_pp.Pipeline, accept: int, mode: str
) -> None:
    """The replay of 20 rows takes more than a step."""
    with pipe.open(TOKENS[:10], max_new_tokens=60, speculate=4, snapshots=2, recurrent=mode) as s:
        s.prefill()
        base = s.snapshot()
        if accept > 5:
            s.extend(TOKENS[10:40])
        else:
            s.verify(TOKENS[10:15])
        s.rollback(base, accept)
        s.snapshot()
        assert_stands(s, TOKENS[: 11 + accept], s.decode(TOKENS[10 + accept])[None])
        assert_snapshot(s, 1, TOKENS[: 10 + accept])


def test_a_replay_longer_than_a_step_takes_the_steps_it_needs(pipe: memra_pp.Pipeline) -> None:
    with pipe.open(TOKENS[:10], max_new_tokens=60, speculate=5) as s:
        s.prefill()
        snap = s.snapshot()
        rows = s.extend(TOKENS[10:40])
        for accept, more, steps in ((27, [27, 28, 29], 4), (24, [24, 25, 26, 27, 28], 4), (5, [5, 6, 7], 1), (4, [], 0)):
            before = pipe.chain.traversals
            s.rollback(snap, accept)
            assert pipe.chain.traversals == before
            if more:
                rows = s.verify([TOKENS[10 + i] for i in more])
                assert pipe.chain.traversals - before == (steps if pipe.cfg.recurrent else 1)
                assert_stands(s, TOKENS[: 11 + more[-1]], rows)


def test_bad_arguments_change_nothing(pipe: memra_pp.Pipeline) -> None:
    with pipe.open(TOKENS[:10], max_new_tokens=20) as s, pipe.open(TOKENS[:10], max_new_tokens=20) as other:
        with pytest.raises(InputError, match="prefill"):
            s.snapshot()
        s.prefill()
        other.prefill()
        snap, foreign = s.snapshot(), other.snapshot()
        s.extend(TOKENS[10:13])
        before = image(s), image(other)
        with pytest.raises(InputError, match="another session's"):
            s.rollback(foreign, 0)
        for accept in (-1, 1.5, None, "1", True):
            with pytest.raises(InputError, match="accept"):
                s.rollback(snap, accept)  # type: ignore[arg-type]
        with pytest.raises(CacheError, match="accept 0 to 3"):
            s.rollback(snap, 4)
        assert (image(s), image(other)) == before and s.tokens == TOKENS[:13]
    with pytest.raises(InputError, match="closed"):
        s.rollback(snap, 0)
    with pytest.raises(InputError, match="closed"):
        s.snapshot()
    snap.close()


@pytest.mark.parametrize("accept", [0, 2, 5])
def test_a_kept_state_of_rows_that_were_rolled_back_is_not_used(pipe: memra_pp.Pipeline, accept: int) -> None:
    other = some_tokens(6, seed=1)
    with pipe.open(TOKENS[:10], max_new_tokens=60, speculate=5, snapshots=2, recurrent="states") as s:
        s.prefill()
        snap = s.snapshot()
        s.verify(TOKENS[10:16])
        s.rollback(snap, accept)
        s.extend(other)
        stood = [*TOKENS[: 10 + accept], *other]
        for back in range(1 + accept + 3, 0, -1):
            s.rollback(snap, back)
            assert_stands(s, [*stood[: 10 + back], 5], s.decode(5)[None])


def test_a_rollback_says_nothing_to_the_stages_until_rows_come(pipe: memra_pp.Pipeline) -> None:
    """However often the session goes back and forth, one step tells them where it ends."""
    with pipe.open(TOKENS[:10], max_new_tokens=30, snapshots=2) as s:
        s.prefill()
        outer = s.snapshot()
        s.extend(TOKENS[10:12])
        inner = s.snapshot()
        s.extend(TOKENS[12:16])
        before, traversals = image(s), pipe.chain.traversals
        for snap, accept in ((inner, 3), (inner, 3), (inner, 1), (outer, 3), (outer, 2)):
            s.rollback(snap, accept)
        inner.close(), outer.close()
        assert image(s) == before and pipe.chain.traversals == traversals and s.tokens == TOKENS[:12]
        row = s.decode(TOKENS[12])
        assert pipe.chain.traversals == traversals + 1
        assert_stands(s, TOKENS[:13], row[None])


def test_logits_and_ids_asked_for_behind_a_replay(pipe: memra_pp.Pipeline) -> None:
    with pipe.open(TOKENS[:10], max_new_tokens=30, speculate=2) as s:
        rows = s.prefill(all_logits=True)
        with s.snapshot() as snap:
            rows = s.verify(TOKENS[10:13])
            for want, wanted in (("argmax", rows.argmax(-1)), ("topk:1", rows.argmax(-1)), ("logits", rows)):
                s.rollback(snap, 1)
                got = s.verify(TOKENS[11:13], want=want)
                np.testing.assert_array_equal(got["id"][:, 0] if want == "topk:1" else got, wanted[1:])
