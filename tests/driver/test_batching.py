"""Many sessions at once: micro-batches are shared and overlap, and no session notices another."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from overlapping import GREEDY, KINDS, WAIT_S, hold, overlapping, until
from ringed import some_tokens
from standing import assert_empty

import memra_pp
from memra_pp.errors import InputError, SessionCancelled, StageError
from memra_pp.models import Gemma3
from memra_pp.models.protocol import Array
from memra_pp.stage.frames import STEP, Frame


@pytest.fixture(scope="module", params=KINDS)
def pipe(request: pytest.FixtureRequest) -> Iterator[memra_pp.Pipeline]:
    with overlapping(request.param) as made:
        yield made


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


def test_nothing_runs_ahead_of_whoever_takes_the_tokens_by_more_than_a_step(pipe, frames):
    """Of each text one token may wait to be taken, with a step behind it, and of the one just taken there is a step."""
    many = pipe.generate_many([some_tokens(4, seed=n) for n in range(4)], max_new_tokens=30, sampling=GREEDY)
    for _ in range(8):
        next(many)
    threading.Event().wait(0.05)
    until(lambda: pipe.scheduler.idle)
    assert sum(map(len, frames)) <= 8 + 4 * 2 - 1
    many.close()


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
        for _ in range(8):  # new threads may get the idents of ended ones
            with ThreadPoolExecutor(1) as pool, pytest.raises(StageError, match="ZeroDivisionError"):
                pool.submit(pipe.open, [1]).result(WAIT_S)


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
