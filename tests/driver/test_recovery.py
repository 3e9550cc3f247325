"""A stage is lost at every frame, before, between and after the stages apply it: every text and every row is as if nothing had
been, the books balance, and where it happens too often everybody is told."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fragile import FragileChain, chain, fragile
from ringed import launch_tiny, some_tokens
from standing import assert_books_agree, assert_empty, assert_snapshot, assert_stands, plain

import memra_pp
from memra_pp import aio
from memra_pp.cache import DflashTapSink
from memra_pp.driver.work import Rewired
from memra_pp.errors import AdmissionError, CapacityExceeded, StageError
from memra_pp.stage.frames import CLOSE, OPEN, STEP

__all__ = ["fragile"]

MODELS = ["hybrid", "gemma3_tiny", "ringed"]
STAGES = 3
GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())
PROMPT = some_tokens(20)
TOKENS = PROMPT + some_tokens(80)
WAIT_S = 60.0


@pytest.fixture(params=MODELS)
def pipe(request: pytest.FixtureRequest) -> Iterator[memra_pp.Pipeline]:
    """Three stages, and steps of at most 8 rows."""
    with launch_tiny(request.param, stages=STAGES, prefill_chunk=8) as pipe:
        yield pipe
        assert_empty(pipe, rebuilds=None)
        assert pipe.health()["ready"]


def at_every_frame(pipe: memra_pp.Pipeline, work: Callable[[], Any], least: int) -> None:
    """`work` gives the same whichever of its frames is lost, however far it had come."""
    expected = work()
    for passed in range(STAGES + 1):
        for frame in itertools.count():
            before = chain(pipe).recoveries
            chain(pipe).lose_at(frame, passed)
            assert work() == expected, (frame, passed)
            if chain(pipe).recoveries == before:
                chain(pipe).losses.clear()
                assert frame >= least
                break
            assert chain(pipe).recoveries == before + 1


DRAFTS = {
    "plain": None,
    "replay": memra_pp.Draft(k=3, by=lambda tokens, k: [tokens[-1], 7, 9][:k]),
    "states": memra_pp.Draft(k=3, by=lambda tokens, k: [tokens[-1], 7, 9][:k], recurrent="states"),
    "ngram": memra_pp.Draft(k=3),
}


@pytest.mark.parametrize("draft", DRAFTS.values(), ids=DRAFTS)
def test_a_text_is_the_same_wherever_a_stage_is_lost(pipe: memra_pp.Pipeline, draft: memra_pp.Draft | None) -> None:
    """In its open, in each piece of its prompt, in each decode or round, and in its close."""
    at_every_frame(
        pipe, lambda: list(pipe.generate(PROMPT, max_new_tokens=7, sampling=GREEDY, draft=draft)), least=1 + 3 + 3 + 1
    )


@pytest.mark.parametrize("mode", ["replay", "states"])
def test_snapshots_lead_where_they_led_wherever_a_stage_is_lost(pipe: memra_pp.Pipeline, mode: Any) -> None:
    def work() -> list[Any]:
        rows: list[Any] = []
        with pipe.open(PROMPT, max_new_tokens=60, speculate=4, snapshots=3, recurrent=mode) as s:
            rows.append(s.prefill())
            oldest = s.snapshot()
            rows.append(s.verify(TOKENS[20:25]))
            s.rollback(oldest, 2)
            newer = s.snapshot(pin=False)
            rows.append(s.extend(TOKENS[22:27]))
            s.rollback(newer, 3)
            rows.append(s.round([5, 6], next=7).rows)
            s.rollback(oldest, 1)
            rows.append(s.decode(9))
            chain(pipe).losses.clear()
            assert_books_agree(s)
            assert_stands(s, [*TOKENS[:21], 9], rows[-1][None])
            assert_snapshot(s, oldest._slot.index, TOKENS[:20])
        return [row.tolist() for row in rows]

    at_every_frame(pipe, work, least=7)


def test_a_session_that_rests_when_a_stage_is_lost_goes_on_from_where_it_stood(pipe: memra_pp.Pipeline) -> None:
    """Also with a snapshot and a rollback that the stages had not been told of, and before its prompt was fed."""
    with (
        pipe.open(PROMPT, max_new_tokens=60, speculate=4, snapshots=3) as rests,
        pipe.open(PROMPT, max_new_tokens=60, snapshots=2) as owes,
        pipe.open(PROMPT, max_new_tokens=60) as fresh,
    ):
        rests.prefill(), owes.prefill()
        snap = rests.snapshot()
        rests.extend(TOKENS[20:30])
        early = owes.snapshot()
        owes.extend(TOKENS[20:30])
        owes.rollback(early, 4)
        late = owes.snapshot()
        lose_now(pipe)
        assert_stands(rests, TOKENS[:31], rests.decode(TOKENS[30])[None])
        assert_books_agree(rests)
        rests.rollback(snap, 2)
        assert_stands(rests, TOKENS[:23], rests.decode(TOKENS[22])[None])
        assert_stands(owes, [*TOKENS[:24], 3], owes.decode(3)[None])
        owes.rollback(late, 0)
        assert_stands(owes, [*TOKENS[:24], 8], owes.decode(8)[None])
        owes.rollback(early, 0)
        assert_stands(owes, [*TOKENS[:20], 8], owes.decode(8)[None])
        assert_stands(fresh, PROMPT, fresh.prefill(all_logits=True))
        assert pipe.stats()["rebuilds"] == 2


def lose_now(pipe: memra_pp.Pipeline) -> None:
    """A stage is lost while nobody calls, and replaced."""
    before = chain(pipe).epoch
    chain(pipe).lose()
    list(pipe.generate([1], max_new_tokens=1, sampling=GREEDY))
    assert chain(pipe).epoch == before + 1


def test_stages_lost_again_and_again_in_one_text(pipe: memra_pp.Pipeline) -> None:
    expected = list(pipe.generate(PROMPT, max_new_tokens=12, sampling=GREEDY))
    made = []
    with pipe.open(PROMPT, max_new_tokens=12) as session:
        for i, token in enumerate(session.generate(12, GREEDY)):
            made.append(token)
            chain(pipe).lose_at(i % 3, i % (STAGES + 1))
    assert made == expected and chain(pipe).recoveries > 6
    chain(pipe).losses.clear()


def test_a_stage_lost_while_sessions_are_opened_again(pipe: memra_pp.Pipeline) -> None:
    expected = list(pipe.generate(PROMPT, max_new_tokens=5, sampling=GREEDY))
    with pipe.open(PROMPT, max_new_tokens=5) as session:
        tokens = session.generate(5, GREEDY)
        made = [next(tokens)]
        for passed in range(STAGES + 1):
            chain(pipe).losses |= {len(chain(pipe).log) + i: passed for i in range(4)}
            made.append(next(tokens))
        assert made == expected
    assert chain(pipe).log.count([OPEN]) >= 5 and chain(pipe).recoveries == 16


@pytest.mark.parametrize("seed", range(6))
def test_many_texts_at_once_while_stages_are_lost_at_random(pipe: memra_pp.Pipeline, seed: int) -> None:
    rng = random.Random(seed)
    prompts = [some_tokens(rng.randrange(1, 40), seed=i) for i in range(8)]
    expected = [list(pipe.generate(p, max_new_tokens=10, sampling=GREEDY)) for p in prompts]
    first = len(chain(pipe).log)
    chain(pipe).losses = {first + at + rng.randrange(20): rng.randrange(STAGES + 1) for at in range(0, 300, 40)}
    draft = rng.choice(list(DRAFTS.values()))
    made: list[list[int]] = [[] for _ in prompts]
    for index, token in pipe.generate_many(prompts, max_new_tokens=10, sampling=GREEDY, draft=draft, concurrency=5):
        made[index].append(token)
    assert made == expected and chain(pipe).recoveries > 0
    chain(pipe).losses.clear()


@pytest.mark.parametrize("seed", range(3))
def test_frames_that_are_dropped_repeated_or_slow(pipe: memra_pp.Pipeline, seed: int) -> None:
    """A frame that does not come back in time, or comes back twice, is as good as a stage that is lost."""
    rng = random.Random(seed)
    prompts = [some_tokens(rng.randrange(1, 40), seed=i) for i in range(5)]
    expected = [list(pipe.generate(p, max_new_tokens=15, sampling=GREEDY)) for p in prompts]
    pipe.step_timeout = pipe._opener._timeout_s = 0.3
    first = len(chain(pipe).log)
    for at in range(5, 200, 60):
        chain(pipe).dropped.add(first + at + rng.randrange(10))
        chain(pipe).repeated.add(first + at + 30 + rng.randrange(10))
        chain(pipe).slow |= {first + at + n for n in range(15, 20)}
    made: list[list[int]] = [[] for _ in prompts]
    for index, token in pipe.generate_many(prompts, max_new_tokens=15, sampling=GREEDY):
        made[index].append(token)
    assert made == expected and chain(pipe).recoveries > 0
    pipe.step_timeout = pipe._opener._timeout_s = WAIT_S


def test_threads_that_stream_while_stages_are_lost(pipe: memra_pp.Pipeline) -> None:
    prompts = [some_tokens(5 + 3 * i, seed=i) for i in range(6)]
    expected = [list(pipe.generate(p, max_new_tokens=25, sampling=GREEDY)) for p in prompts]
    made: list[list[int]] = [[] for _ in prompts]

    def stream(i: int) -> None:
        for token in pipe.generate(prompts[i], max_new_tokens=25, sampling=GREEDY):
            made[i].append(token)
            if i == 0 and len(made[i]) % 4 == 0:
                chain(pipe).lose()

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert made == expected and chain(pipe).recoveries > 0


def test_tasks_see_a_pause_and_nothing_else(fragile: None) -> None:
    async def texts() -> list[list[int]]:
        async with aio.launch(data("hybrid"), stages=STAGES, backend="local", max_ctx=200) as pipe:

            async def text(i: int, lose: bool) -> list[int]:
                made = []
                async for token in pipe.generate(some_tokens(9, seed=i), max_new_tokens=15, sampling=GREEDY):
                    made.append(token)
                    if lose and len(made) % 5 == i % 5:
                        inner = pipe.sync.chain
                        assert isinstance(inner, FragileChain)
                        inner.lose()
                return made

            alone = [await text(i, False) for i in range(4)]
            assert await asyncio.gather(*(text(i, True) for i in range(4))) == alone
            return alone

    assert all(len(text) == 15 for text in asyncio.run(texts()))


def data(name: str) -> Any:
    from ringed import DATA

    return DATA / name


def test_taps_hold_each_row_once(pipe: memra_pp.Pipeline) -> None:
    layers = tuple(range(pipe.cfg.n_trunk))
    with plain(pipe, PROMPT) as (session, _):
        sink = session.dflash_taps = DflashTapSink.armed(layers, pipe.cfg.n_embd, 20)
        session.extend(TOKENS[20:40])
        expected = sink.buf.copy()
    for frame in range(3):
        with plain(pipe, PROMPT) as (session, _):
            sink = session.dflash_taps = DflashTapSink.armed(layers, pipe.cfg.n_embd, 20)
            chain(pipe).lose_at(frame, 1)
            session.extend(TOKENS[20:40])
            assert sink.base == 20
            np.testing.assert_array_equal(sink.buf, expected)


def test_opens_and_closes_go_once_more_and_charge_once(pipe: memra_pp.Pipeline) -> None:
    for passed in range(STAGES + 1):
        chain(pipe).lose_at(0, passed)
        session = pipe.open(PROMPT, max_new_tokens=8)
        stages = pipe.stats()["stages"]
        assert all(stage["allocated_bytes"] == stage["planned_bytes"] > 0 for stage in stages)
        chain(pipe).lose_at(0, passed)
        session.close()
        assert_empty(pipe, rebuilds=None)
    assert chain(pipe).recoveries == 2 * (STAGES + 1) and not pipe.scheduler._open


def test_an_open_that_is_lost_and_refused_the_second_time_is_refused(
    pipe: memra_pp.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise CapacityExceeded("the device is full")

    with monkeypatch.context() as patch:
        patch.setattr(chain(pipe)._workers[1].device, "slab", full)
        chain(pipe).lose_at(0, 1)
        with pytest.raises(AdmissionError, match="full"):
            pipe.open(PROMPT, max_new_tokens=8)
    chain(pipe).lose()
    assert len(list(pipe.generate(PROMPT, max_new_tokens=2, sampling=GREEDY))) == 2


def test_a_session_that_cannot_be_opened_again_ends_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """After as many tries as there are."""
    with launch_tiny("hybrid", stages=STAGES) as pipe:
        chain(pipe).most = 3
        session = pipe.open(PROMPT, max_new_tokens=8)
        monkeypatch.setattr(chain(pipe)._workers[1].device, "slab", lambda *args: 1 // 0)
        chain(pipe).lose()
        with pytest.raises(StageError, match="stage 1 could not open a session again"):
            session.prefill()
        session.close()


def test_too_many_losses_are_told_to_everybody_and_the_pipeline_closes() -> None:
    with launch_tiny("hybrid", stages=STAGES) as pipe:
        chain(pipe).most = 2
        sessions = [pipe.open(PROMPT, max_new_tokens=9) for _ in range(3)]
        for session in sessions:
            session.prefill()
        told: list[str] = []

        def decode(session: memra_pp.Session) -> None:
            try:
                while True:
                    session.decode(5)
            except (StageError, memra_pp.errors.CacheError) as error:
                told.append(str(error))

        chain(pipe).losses = {len(chain(pipe).log) + i: 1 for i in range(9)}
        threads = [threading.Thread(target=decode, args=(session,)) for session in sessions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert told == ["stage 1 is gone"] * 3 and chain(pipe).recoveries == 2
        assert not pipe.health()["ready"] and pipe.health()["state"] == "failed"
        with pytest.raises(StageError, match="stage 1 is gone"):
            pipe.open(PROMPT, max_new_tokens=9)
        for session in sessions:
            session.close()


def test_what_ends_while_a_stage_is_lost_ends() -> None:
    """A cancelled session, and a pipeline that closes."""
    with launch_tiny("hybrid", stages=STAGES) as pipe:
        session = pipe.open(PROMPT, max_new_tokens=9)
        session.prefill()
        chain(pipe).lose()
        session.cancel()
        session.close()
        assert_empty(pipe, rebuilds=None)
        pipe.open(PROMPT, max_new_tokens=9).prefill()
        chain(pipe).lose()
    assert pipe.health()["state"] == "failed"


@pytest.mark.parametrize("losses", [3, 6])
def test_a_step_that_stages_die_of_ends_its_session_and_no_other(pipe: memra_pp.Pipeline, losses: int) -> None:
    """After as many as a step may cost; the others have gone on each time."""
    chain(pipe).most_losses = losses
    prompts = [some_tokens(9, seed=i) for i in range(3)]
    expected = [list(pipe.generate(p, max_new_tokens=30, sampling=GREEDY)) for p in prompts]
    made: list[list[int]] = [[] for _ in prompts]
    deadly = next(t for t in range(60) if t not in {t for text in (*prompts, *expected) for t in text})
    threads = [
        threading.Thread(target=lambda i=i: made[i].extend(pipe.generate(prompts[i], max_new_tokens=30, sampling=GREEDY)))
        for i in range(3)
    ]
    for thread in threads:
        thread.start()
    with pipe.open(PROMPT[:5], max_new_tokens=9) as session:
        session.prefill()
        chain(pipe).deadly = deadly
        with pytest.raises(StageError, match=f"{losses} stages in a row were lost at this step"):
            session.decode(deadly)
        chain(pipe).deadly = -1
        with pytest.raises(StageError, match="close it"):
            session.decode(1)
    for thread in threads:
        thread.join(WAIT_S)
    assert made == expected and chain(pipe).recoveries == losses


def test_a_step_that_only_waits_costs_no_stage(pipe: memra_pp.Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it must be sent anew. Then it is at the stages as often as it may be, the last time alone."""
    session = pipe.open(PROMPT[:5], max_new_tokens=9)  # its replay and the step are one frame
    session.prefill()
    with monkeypatch.context() as patch:
        patch.setattr(pipe.scheduler, "submit", lambda work: None)
        steps = session.calls.extend([5], "argmax")
        sent = (work for work in steps if not work.done())
        work = next(sent)
        for _ in range(3 * pipe.chain.most_losses):
            work.fail(Rewired(on_its_way=False, by_itself=False))
            work = next(sent)
            assert not work.alone
        for losses in range(1, pipe.chain.most_losses):
            work.fail(Rewired(on_its_way=True, by_itself=False))
            work = next(sent)
            assert work.alone == (losses == pipe.chain.most_losses - 1)
        work.fail(Rewired(on_its_way=True, by_itself=True))
        with pytest.raises(StageError, match=f"{pipe.chain.most_losses} stages in a row were lost at this step"):
            next(sent)
    session.close()


def test_losses_far_apart_in_a_long_prefill_are_not_its_fault(pipe: memra_pp.Pipeline) -> None:
    tokens = some_tokens(200)
    with plain(pipe, tokens) as (_, rows), pipe.open(tokens, max_new_tokens=8) as session:
        for at in (3, 15, 35):
            chain(pipe).lose_at(at, 1)
        np.testing.assert_array_equal(session.prefill(), rows[-1])
        assert chain(pipe).recoveries == 3


def test_an_error_of_any_kind_in_a_recovery_is_told_to_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    with launch_tiny("hybrid", stages=STAGES) as pipe:
        session, other = pipe.open(PROMPT, max_new_tokens=9), pipe.open(PROMPT, max_new_tokens=9)
        session.prefill(), other.prefill()

        def out_of_files(*args: Any) -> None:
            raise OSError("too many open files")

        monkeypatch.setattr(chain(pipe), "rewire", out_of_files)
        chain(pipe).lose_at(0, 1)

        async def waits() -> None:
            with pytest.raises(StageError, match="too many open files"):
                await asyncio.wait_for(aio.Session(pipe, session).decode(5), WAIT_S)

        asyncio.run(waits())
        assert pipe.health()["state"] == "failed"
        with pytest.raises(StageError, match="too many open files"):
            other.decode(5)
        session.close(), other.close()


def test_only_steps_are_told_that_they_are_lost(pipe: memra_pp.Pipeline) -> None:
    list(pipe.generate(PROMPT, max_new_tokens=3, sampling=GREEDY))
    assert {op for ops in chain(pipe).log for op in ops} == {OPEN, STEP, CLOSE}
