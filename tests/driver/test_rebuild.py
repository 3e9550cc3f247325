"""A stage's device fails in the middle of something: the session is rebuilt from its tokens, snapshots and all, and nobody else
notices; if it fails again, the session ends with the cause."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from ringed import Ringed, launch_tiny, some_tokens
from standing import assert_books_agree, assert_empty, assert_snapshot, assert_stands, image, plain

import memra_pp
from memra_pp.cache import Cache
from memra_pp.errors import RingLapped, StageError
from memra_pp.models import Gemma3, Qwen35
from memra_pp.models.protocol import Array, StepBatch

BASES: dict[str, Any] = {"hybrid": Qwen35, "gemma3_tiny": Gemma3, "ringed": Ringed}
MODES = ["replay", "states"]
GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())
PROMPT = some_tokens(20)
TOKENS = PROMPT + some_tokens(80)


class Fuse:
    """Which forwards of one stage fail, from now on."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.pattern: Iterator[bool] = itertools.repeat(False)
        self.blown = 0

    def arm(self, *first: bool, then: Iterable[bool] = itertools.repeat(False)) -> None:
        self.pattern = itertools.chain(first, then)


def failing(name: str, fuse: Fuse) -> Any:
    """A model that fails when its work is done: rows written, states moved, snapshots taken. What it leaves is ruined."""

    starts = (0, 2, 5) if name == "hybrid" else (0, 2, 4)

    class Fails(BASES[name]):  # type: ignore[misc]
        def forward(self, batch: StepBatch, x: Array, caches: Sequence[Cache]) -> Array:
            y = super().forward(batch, x, caches)
            if self.layers.start == starts[fuse.stage] and next(fuse.pattern):
                fuse.blown += 1
                for cache in caches:
                    ruin(cache)
                raise OSError("device lost")
            return y

    return Fails


def ruin(cache: Cache) -> None:
    for kv in filter(None, cache.kv):
        kv.k[:], kv.v[:] = 0xA5, 0xA5
    for state in filter(None, cache.recur):
        for buffer in state.buffers():
            buffer[:] = np.nan
    for snap in cache._snapshots:
        for copy in snap.states.values():
            copy.conv[:], copy.ssm[:] = np.nan, np.nan


Fails = tuple[memra_pp.Pipeline, Fuse]


@pytest.fixture(params=[(name, stage) for name in BASES for stage in range(3)], ids=lambda p: f"{p[0]}-{p[1]}")
def fails(request: pytest.FixtureRequest) -> Iterator[Fails]:
    """Three stages, one of which may fail, and steps of at most 8 rows."""
    name, stage = request.param
    fuse = Fuse(stage)
    with launch_tiny(name, stages=3, prefill_chunk=8, stage_model=failing(name, fuse)) as pipe:
        yield pipe, fuse
        assert_empty(pipe, rebuilds=None)


Fails = tuple[memra_pp.Pipeline, Fuse]


def right_then_wrong(pipe: memra_pp.Pipeline, tokens: list[int]) -> list[int]:
    """A right draft behind `tokens`, and a wrong one."""
    with plain(pipe, tokens) as (_, rows):
        right = int(rows[-1].argmax())
    with plain(pipe, [*tokens, right]) as (_, rows):
        return [right, (int(rows[-1].argmax()) + 1) % 61]


@pytest.mark.parametrize("mode", MODES)
def test_a_fault_in_the_middle_of_a_round_does_not_show(fails: Fails, mode: Any) -> None:
    """Snapshots lead where they led: two of the same row, one behind a rollback, one before the rows of many steps."""
    pipe, fuse = fails
    with (
        pipe.open(PROMPT, max_new_tokens=80, speculate=5, snapshots=5, recurrent=mode) as s,
        pipe.open(PROMPT, max_new_tokens=80) as other,
    ):
        s.prefill(), other.prefill()
        oldest = s.snapshot()
        s.extend(TOKENS[20:40])
        twin, pair = s.snapshot(), s.snapshot(pin=False)
        s.verify(TOKENS[40:45])
        s.rollback(pair, 3)
        newest = s.snapshot(pin=False)
        s.extend(TOKENS[43:46])
        s.rollback(newest, 2)
        drafts = right_then_wrong(pipe, TOKENS[:46])
        before, beside = pipe.stats(), image(other)
        fuse.arm(True)
        done = s.round(drafts, next=TOKENS[45])
        after = pipe.stats()
        assert image(other) == beside and done.accepted == 1
        assert [after[name] - before[name] for name in ("rebuilds", "rounds", "accepted")] == [1, 1, 1]
        with plain(pipe, [*TOKENS[:46], *drafts]) as (_, rows):
            assert done.rows.tolist() == rows[-3:].argmax(-1).tolist()
        assert_books_agree(s)
        tokens = [*TOKENS[:46], drafts[0], 5]
        assert_stands(s, tokens, s.decode(5)[None])
        for snap, accept in ((newest, 1), (pair, 2), (twin, 0), (oldest, 17)):
            s.rollback(snap, accept)
            assert_stands(s, [*TOKENS[: snap.pos + accept], 5], s.decode(5)[None])
            assert_books_agree(s)
        assert_stands(other, TOKENS[:21], other.decode(TOKENS[20])[None])


@pytest.mark.parametrize("draft", [None, memra_pp.Draft(k=3, by=lambda tokens, k: [tokens[-1], 7, 9][:k], recurrent="states")])
def test_whichever_forward_of_a_generation_fails_its_text_is_the_same(fails: Fails, draft: memra_pp.Draft | None) -> None:
    pipe, fuse = fails
    text = list(pipe.generate(PROMPT, max_new_tokens=9, sampling=GREEDY))
    for passed in itertools.count():
        rebuilds = pipe.stats()["rebuilds"]
        fuse.arm(*[False] * passed, True)
        assert list(pipe.generate(PROMPT, max_new_tokens=9, sampling=GREEDY, draft=draft)) == text
        if pipe.stats()["rebuilds"] == rebuilds:
            break
        assert pipe.stats()["rebuilds"] == rebuilds + 1
    assert 5 <= passed <= 11


def test_every_kind_of_step_is_made_good(fails: Fails) -> None:
    """One of a prefill, one amid an extend, a verify behind snapshots that owe a replay, and one fault after another."""
    pipe, fuse = fails
    with pipe.open(PROMPT, max_new_tokens=70, speculate=5, snapshots=3) as s:
        fuse.arm(False, True)
        assert_stands(s, PROMPT, s.prefill(all_logits=True))
        snap = s.snapshot()
        fuse.arm(False, True)
        assert_stands(s, TOKENS[:40], s.extend(TOKENS[20:40])[None])
        s.rollback(snap, 13)
        behind = [s.snapshot(), s.snapshot()]
        fuse.arm(True)
        assert_stands(s, TOKENS[:39], s.verify(TOKENS[33:39]))
        for taken in behind:
            assert_snapshot(s, taken._slot.index, TOKENS[:33])
        for at in range(39, 43):
            fuse.arm(True)
            assert_stands(s, TOKENS[: at + 1], s.decode(TOKENS[at])[None])
        planned = [(stage["planned_bytes"], stage["allocated_bytes"]) for stage in pipe.stats()["stages"]]
        assert all(planned == allocated > 0 for planned, allocated in planned)
        assert pipe.stats()["rebuilds"] == fuse.blown == 7


FAILS_AGAIN = {
    "always": (True, [True]),
    "when the step is tried again": (False, [True, False, False, False, True]),
    "in the first step of the replay": (False, [True, True]),
    "in a later step of the replay": (False, [True, False, True]),
}


@pytest.mark.parametrize(("for_ever", "pattern"), FAILS_AGAIN.values(), ids=list(FAILS_AGAIN))
def test_a_second_fault_ends_the_session_alone_and_names_the_cause(fails: Fails, for_ever: bool, pattern: list[bool]) -> None:
    """20 rows are replayed in three steps."""
    pipe, fuse = fails
    with pipe.open(PROMPT, max_new_tokens=70, speculate=5) as s, pipe.open(PROMPT, max_new_tokens=70) as other:
        s.prefill(), other.prefill()
        beside = image(other)
        fuse.arm(*pattern, then=itertools.repeat(for_ever))
        with pytest.raises(StageError, match=rf"stage {fuse.stage}\b.*device lost.*OSError.*close it"):
            s.round([1, 2, 3, 4, 5], next=7)
        for call in (lambda: s.decode(1), s.snapshot, lambda: s.round((), next=1)):
            with pytest.raises(StageError, match="close it"):
                call()
        assert image(other) == beside and pipe.stats()["rebuilds"] == 1
        fuse.arm()
        assert_stands(other, TOKENS[:30], other.extend(TOKENS[20:30])[None])
    with pipe.open(PROMPT, max_new_tokens=70) as s:
        s.prefill()


def test_what_was_lapped_is_not_restored_to_anything_else() -> None:
    """A rebuild moves the rings at other rows. A pinned snapshot is whole; one that is not is whole or lapped."""
    fuse, tokens = Fuse(1), some_tokens(9000)
    with launch_tiny("ringed", stages=3, prefill_chunk=512, stage_model=failing("ringed", fuse)) as pipe:
        with pipe.open(tokens[:100], max_new_tokens=8900, snapshots=4) as s:
            s.prefill()
            lapped = s.snapshot(pin=False)
            s.extend(tokens[100:4300])
            free = s.snapshot(pin=False)
            s.extend(tokens[4300:5000])
            pinned = s.snapshot()
            s.extend(tokens[5000:8500])
            with pytest.raises(RingLapped):
                s.rollback(lapped, 0)
            fuse.arm(True)
            assert_stands(s, tokens[:8501], s.decode(tokens[8500])[None])
            assert_books_agree(s)
            s.rollback(pinned, 2500)
            assert_stands(s, tokens[:7501], s.decode(tokens[7500])[None])
            for snap in (free, lapped):
                try:
                    s.rollback(snap, 40)
                except RingLapped:
                    continue
                assert_stands(s, tokens[: snap.pos + 41], s.decode(tokens[snap.pos + 40])[None])
        assert_empty(pipe, rebuilds=1)
