"""Many sessions at once: micro-batches are shared and overlap, and no session notices another."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ringed import launch_tiny, some_tokens
from standing import assert_empty

import memra_pp
from memra_pp.cache import slab_bytes, stage_layout
from memra_pp.driver.chain import LocalChain
from memra_pp.driver.many import _Going
from memra_pp.driver.sampling import Sampler
from memra_pp.errors import AdmissionError, InputError, SessionCancelled, StageError
from memra_pp.models import Gemma3
from memra_pp.models.protocol import Array
from memra_pp.stage.frames import STEP, Frame

WAIT_S = 60.0
GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())
WARM = memra_pp.SamplingParams(temperature=0.9, top_k=20, seed=5, eos_ids=())
NGRAM = memra_pp.Draft(k=4, by="ngram")


@pytest.fixture(scope="module", params=["hybrid", "gemma3_tiny", "ringed"])
def pipe(request: pytest.FixtureRequest) -> Iterator[memra_pp.Pipeline]:
    """Three stages, treated as if they ran at once, and steps of at most 16 rows, so that a prompt takes several."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalChain, "overlap", 3)
        with launch_tiny(request.param, 3, prefill_chunk=16) as made:
            yield made
            assert_empty(made)


@pytest.fixture
def frames(pipe: memra_pp.Pipeline, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, int]]]:
    """Of each frame that carries steps: their sessions and rows."""
    seen: list[list[tuple[int, int]]] = []
    whole = pipe.chain._send

    def send(frame: Frame) -> None:
        steps = [(e.session, e.rows) for e in frame.entries if e.op == STEP]
        if steps:
            seen.append(steps)
        whole(frame)

    monkeypatch.setattr(pipe.chain, "_send", send)
    return seen


def hold(pipe: memra_pp.Pipeline, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Has the next frame that carries a step wait before the stages: set once it is there, and to be set for it to go on."""
    there, go, whole = threading.Event(), threading.Event(), pipe.chain._send

    def send(frame: Frame) -> None:
        if any(e.op == STEP for e in frame.entries):
            there.set()
            assert go.wait(WAIT_S)
        whole(frame)

    monkeypatch.setattr(pipe.chain, "_send", send)
    return there, go


def until(done: Callable[[], bool]) -> None:
    """Waits until it is so."""
    end = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end
        threading.Event().wait(0.001)


def life(pipe: memra_pp.Pipeline, seed: int) -> list[Array]:
    """A session's answers to everything that can be asked, in an order that the seed fixes."""
    rng = random.Random(seed)
    rows: list[Array] = []
    mode: Any = rng.choice(["replay", "states"])
    with pipe.open(some_tokens(rng.randint(1, 60)), max_new_tokens=120, speculate=5, recurrent=mode) as s:
        rows.append(s.prefill())
        for _ in range(12):
            match rng.choice(["decode", "extend", "verify", "round", "snapshot"]):
                case "decode":
                    rows.append(s.decode(rng.randrange(60), want=rng.choice(["logits", "argmax", "topk:3"])))
                case "extend":
                    rows.append(s.extend(some_tokens(rng.randint(1, 8))))
                case "verify":
                    rows += [*s.verify(some_tokens(rng.randint(1, 5)))]
                case "round":
                    rows += [*s.round(some_tokens(rng.randint(0, 4)), next=rng.randrange(60)).rows]
                case "snapshot":
                    with s.snapshot() as snap:
                        rows += [*s.verify(some_tokens(4))]
                        s.rollback(snap, rng.randint(0, 4))
    return rows


def test_any_mix_of_calls_gives_each_session_the_bits_it_gets_alone(pipe, frames):
    seeds = range(8)
    alone = [life(pipe, seed) for seed in seeds]
    assert max(map(len, frames)) == 1
    frames.clear()
    with ThreadPoolExecutor(len(seeds)) as pool:
        mixed = [*pool.map(lambda seed: life(pipe, seed), seeds)]
    assert max(map(len, frames)) > 1
    for seed, (a, b) in enumerate(zip(alone, mixed, strict=True)):
        assert len(a) == len(b), seed
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y, err_msg=f"seed {seed}")


@pytest.mark.parametrize("draft", [None, NGRAM])
@pytest.mark.parametrize("sampling", [GREEDY, WARM])
def test_generate_many_gives_the_texts_of_generate(pipe, sampling, draft):
    prompts = [some_tokens(n, seed=n) for n in (3, 40, 7, 1, 18, 9)]
    options = {"max_new_tokens": 12, "sampling": sampling, "draft": draft}
    alone = [list(pipe.generate(p, **options)) for p in prompts]
    texts: list[list[int]] = [[] for _ in prompts]
    for index, token in pipe.generate_many(prompts, **options):
        texts[index].append(token)
    assert texts == alone


def test_no_more_than_a_micro_batch_a_stage_and_one_are_on_their_way_and_rows_are_bounded(pipe, monkeypatch):
    flying, most, rows = set(), [0], [0]
    send, recv = pipe.chain._send, pipe.chain.recv

    def sent(frame: Frame) -> None:
        if frame.entries[0].op == STEP:
            flying.add(frame.id)
            most[0], rows[0] = max(most[0], len(flying)), max(rows[0], sum(e.rows for e in frame.entries))
        send(frame)

    def came(timeout: float) -> Frame | None:
        frame = recv(timeout)
        if frame is not None:
            flying.discard(frame.id)
        return frame

    monkeypatch.setattr(pipe.chain, "_send", sent)
    monkeypatch.setattr(pipe.chain, "recv", came)
    for _ in pipe.generate_many([some_tokens(50, seed=s) for s in range(6)], max_new_tokens=6, sampling=GREEDY):
        pass
    assert 1 < most[0] <= pipe.chain.stages + 1 and rows[0] <= 16


def test_pieces_of_a_prompt_follow_each_other_without_waiting(pipe, monkeypatch):
    there, go = hold(pipe, monkeypatch)
    with pipe.open(some_tokens(60), max_new_tokens=2) as s, ThreadPoolExecutor(1) as pool:
        asked = pool.submit(s.prefill)
        assert there.wait(WAIT_S)
        waiting = len(s._calls._steps._sent)
        go.set()
        np.testing.assert_array_equal(asked.result(WAIT_S), s.extend([1]) * 0 + asked.result())
        assert waiting == pipe.chain.stages + 1 and s.pos == 61


def test_a_session_that_is_cancelled_ends_and_no_other_notices(pipe, monkeypatch):
    with pipe.open(some_tokens(5), max_new_tokens=9) as a, pipe.open(some_tokens(5), max_new_tokens=9) as b:
        a.prefill(), b.prefill()
        with pipe.open(some_tokens(5), max_new_tokens=9) as twin:
            twin.prefill()
            expected = twin.decode(3)
        there, go = hold(pipe, monkeypatch)
        with ThreadPoolExecutor(3) as pool:
            first = pool.submit(b.decode, 3)
            assert there.wait(WAIT_S)
            second = pool.submit(a.decode, 3)
            while not a._calls._steps._sent:
                threading.Event().wait(0.001)
            a.cancel()
            with pytest.raises(SessionCancelled, match="cancelled"):
                second.result(WAIT_S)
            go.set()
            np.testing.assert_array_equal(first.result(WAIT_S), expected)
        with pytest.raises(SessionCancelled):
            a.decode(3)
        b.decode(4)


def test_closing_a_session_ends_its_call_under_way(pipe, monkeypatch):
    there, go = hold(pipe, monkeypatch)
    s = pipe.open(some_tokens(5), max_new_tokens=9)
    with ThreadPoolExecutor(2) as pool:
        call = pool.submit(s.prefill)
        assert there.wait(WAIT_S)
        close = pool.submit(s.close)
        with pytest.raises(SessionCancelled):
            call.result(WAIT_S)
        go.set()
        close.result(WAIT_S)
    with pytest.raises(InputError, match="closed"):
        s.prefill()


def test_a_generation_that_is_cancelled_by_another_thread_ends_with_its_error(pipe):
    with pipe.open(some_tokens(5), max_new_tokens=50) as s:
        tokens = s.generate(50, GREEDY)
        next(tokens)
        s.cancel()
        with pytest.raises(SessionCancelled):
            list(tokens)


def test_generate_many_that_is_left_early_closes_everything_and_takes_no_more_prompts(pipe):
    taken: list[int] = []

    def prompts() -> Iterator[list[int]]:
        for n in range(1000):
            taken.append(n)
            yield some_tokens(4, seed=n)

    many = pipe.generate_many(prompts(), max_new_tokens=30, sampling=GREEDY, concurrency=3)
    got = [next(many) for _ in range(20)]
    many.close()
    assert {index for index, _ in got} <= {0, 1, 2} and len(taken) <= 5
    assert_empty(pipe)


def test_nothing_runs_ahead_of_whoever_takes_the_tokens_by_more_than_a_step(pipe, frames):
    """Of each text one token may wait to be taken, with a step behind it, and of the one just taken there is a step."""
    many = pipe.generate_many([some_tokens(4, seed=n) for n in range(4)], max_new_tokens=30, sampling=GREEDY)
    for _ in range(8):
        next(many)
    threading.Event().wait(0.05)
    until(lambda: pipe.scheduler.idle)
    assert sum(map(len, frames)) <= 8 + 4 * 2 - 1
    many.close()


@pytest.mark.parametrize("bad", [[], [10**6], "text", [1.5]])
def test_a_bad_prompt_among_many_is_refused_and_ends_them(pipe, bad):
    with pytest.raises(InputError):
        list(pipe.generate_many([some_tokens(3), bad], max_new_tokens=4, sampling=GREEDY))
    assert_empty(pipe)
    for value in (0, -1, 1.5, True):
        with pytest.raises(InputError, match="concurrency"):
            pipe.generate_many([], concurrency=value)


def test_many_prompts_wait_for_bytes_and_one_that_can_never_fit_is_refused(hybrid: Path):
    with memra_pp.launch(hybrid, backend="local", stages=2, threads=1) as probe:
        charges = [slab_bytes(stage_layout(probe.cfg, probe.fence, s, 31, probe.policy, snapshots=1)) for s in range(2)]
    with memra_pp.launch(hybrid, backend="local", stages=2, threads=1, budget_bytes=[2 * c for c in charges]) as pipe:
        prompts = [some_tokens(3, seed=n) for n in range(7)]
        texts: list[list[int]] = [[] for _ in prompts]
        for index, token in pipe.generate_many(prompts, max_new_tokens=20, sampling=GREEDY):
            texts[index].append(token)
        assert [len(t) for t in texts] == [20] * 7
        with pytest.raises(AdmissionError):
            list(pipe.generate_many([some_tokens(3)], max_new_tokens=10_000))
        assert_empty(pipe)


def test_sessions_of_many_are_opened_at_once(pipe, monkeypatch):
    """An open waits behind what is on its way: one after another they would leave stages idle."""
    there, go = hold(pipe, monkeypatch)
    prompts = [some_tokens(3, seed=n) for n in range(6)]
    with ThreadPoolExecutor(2) as pool, pipe.open([1], max_new_tokens=2) as first:
        holding = pool.submit(first.prefill)
        assert there.wait(WAIT_S)
        texts = pool.submit(list, pipe.generate_many(prompts, max_new_tokens=2, sampling=GREEDY, concurrency=4))
        until(lambda: len(pipe._opener._sent) == 4)
        go.set()
        holding.result(WAIT_S)
        assert len(texts.result(WAIT_S)) == 12


def test_many_that_are_stopped_while_prompts_wait_for_bytes_leave_the_queue(hybrid: Path):
    with memra_pp.launch(hybrid, backend="local", stages=2, threads=1) as probe:
        charges = [slab_bytes(stage_layout(probe.cfg, probe.fence, s, 31, probe.policy, snapshots=1)) for s in range(2)]
    with (
        memra_pp.launch(hybrid, backend="local", stages=2, threads=1, budget_bytes=charges) as pipe,
        ThreadPoolExecutor(1) as pool,
    ):
        with pipe.open(some_tokens(3), max_new_tokens=20):
            many = pipe.many([some_tokens(3, seed=n) for n in range(3)], pipe.ask(20, GREEDY, None), 3)
            texts = pool.submit(list, many.run())
            until(lambda: pipe.stats()["admission"]["waiting"] == 3)
            many.stop()
            assert texts.result(WAIT_S) == []
            assert not pipe.stats()["admission"]["waiting"]
        assert_empty(pipe)


class Poisoned(Gemma3):
    """A model that makes a NaN of the rows of token 13."""

    def embed(self, weights: Any, tokens: Array) -> Any:
        rows = super().embed(weights, tokens)
        rows[tokens == 13] = np.nan
        return rows


def test_a_step_that_fails_takes_nobody_with_it(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    with memra_pp.launch(tiny, backend="local", stages=2, threads=1, stage_model=Poisoned) as pipe:
        sessions = [pipe.open([1, 2, n], max_new_tokens=9) for n in range(3, 6)]
        for s in sessions:
            s.prefill()
        expected = []
        for s in sessions[:2]:
            with pipe.open(s.tokens, max_new_tokens=9) as twin:
                twin.prefill()
                expected.append(twin.decode(7))
        there, go = hold(pipe, monkeypatch)
        with ThreadPoolExecutor(4) as pool, pipe.open([1], max_new_tokens=2) as first:
            opening = pool.submit(first.prefill)
            assert there.wait(WAIT_S)
            calls = [pool.submit(s.decode, 13 if s is sessions[2] else 7) for s in sessions]
            while not all(s._calls._steps._sent for s in sessions):
                threading.Event().wait(0.001)
            go.set()
            opening.result(WAIT_S)
            with pytest.raises(StageError, match="layer 0: K holds nan"):
                calls[2].result(WAIT_S)
            for call, row in zip(calls, expected, strict=False):
                np.testing.assert_array_equal(call.result(WAIT_S), row)
        assert pipe.stats()["rebuilds"] >= 1
        for s in sessions:
            s.close()
        assert_empty(pipe, rebuilds=None)


def test_a_scheduler_that_fails_tells_everyone(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    with memra_pp.launch(tiny, backend="local", stages=2, threads=1) as pipe:
        s = pipe.open([1, 2], max_new_tokens=4)
        s.prefill()
        monkeypatch.setattr(pipe.chain, "_send", lambda frame: 1 / 0)
        for _ in range(2):
            with pytest.raises(StageError):
                s.decode(3)
        with pytest.raises(StageError, match="ZeroDivisionError"):
            pipe.open([1])


def test_a_signal_handler_may_use_the_pipeline_while_its_thread_waits(pipe, monkeypatch):
    """The thread that waits for an answer holds nothing that another call needs."""
    there, go = hold(pipe, monkeypatch)
    answers: list[Array] = []
    whole = pipe.scheduler.wait

    def wait(outcome: Any) -> None:
        monkeypatch.setattr(pipe.scheduler, "wait", whole)
        go.set()
        with pipe.open(some_tokens(4), max_new_tokens=4) as inner:
            answers.append(inner.prefill())
        whole(outcome)

    with pipe.open(some_tokens(4), max_new_tokens=4) as s:
        monkeypatch.setattr(pipe.scheduler, "wait", wait)
        np.testing.assert_array_equal(s.prefill(), answers[0])
    assert there.is_set()


def test_late_news_of_a_generation_that_has_ended_takes_no_session_of_another(pipe):
    many = pipe.many([[1, 2, 3]], pipe.ask(4, GREEDY, None), 2)
    many._open_next()
    index, opening = next(iter(many._opening.items()))
    wait([opening])
    many._look_after(index + 7, [])
    assert not many._going
    many._look_after(index, [])
    assert [*many._going] == [index] and not many._opening
    many._end()
    many._look_after(index, [])
    assert_empty(pipe)


def test_a_generation_goes_on_where_its_answer_is_told_and_waits_for_whoever_takes_its_tokens(pipe, monkeypatch):
    """The stages have computed one row more than tokens were given out, and no more however long one waits."""
    rows, threads = [0], set()
    send, go_on = pipe.chain._send, _Going.go_on

    def counted(frame: Frame) -> None:
        rows[0] += sum(entry.logits for entry in frame.entries if entry.op == STEP)
        send(frame)

    def watched(going: _Going, *asked: Any) -> None:
        threads.add(pipe.scheduler.mine)
        go_on(going, *asked)

    monkeypatch.setattr(pipe.chain, "_send", counted)
    monkeypatch.setattr(_Going, "go_on", watched)
    taken = 0
    for _ in pipe.generate_many([some_tokens(3)], max_new_tokens=40, sampling=GREEDY):
        taken += 1
        if taken % 10 == 5:
            until(lambda: pipe.scheduler.idle)
            assert rows[0] == taken + 1
    assert taken == 40 and threads == {True, False}


def test_what_fails_in_the_schedulers_thread_ends_its_caller_and_nobody_else(pipe, monkeypatch):
    pick = Sampler.pick

    def fails(sampler: Sampler, answer: Any, position: int) -> int:
        if position == 20 and pipe.scheduler.mine:
            raise ValueError("no token")
        return pick(sampler, answer, position)

    with pipe.open(some_tokens(4), max_new_tokens=4) as other:
        other.prefill()
        monkeypatch.setattr(Sampler, "pick", fails)
        tokens = pipe.generate_many([some_tokens(3, seed=n) for n in range(3)], max_new_tokens=40, sampling=GREEDY)
        with pytest.raises(InputError, match="no token"):
            list(tokens)
        other.decode(3)
    assert_empty(pipe)


@pytest.mark.parametrize("taken", [1, 7, 30])
def test_many_that_are_left_in_the_middle_leave_nothing(pipe, taken):
    tokens = pipe.generate_many((some_tokens(3, seed=n) for n in itertools.count()), max_new_tokens=9, sampling=WARM)
    for _ in range(taken):
        next(tokens)
    tokens.close()
    assert_empty(pipe)
