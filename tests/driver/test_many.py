"""`generate_many`: prompts come in, tokens go out, whoever goes on with which."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from overlapping import GREEDY, KINDS, NGRAM, WAIT_S, WARM, hold, overlapping, until
from ringed import some_tokens
from standing import assert_empty

import memra_pp
from memra_pp.cache import slab_bytes, stage_layout
from memra_pp.driver import scheduler
from memra_pp.driver.many import _Going
from memra_pp.driver.sampling import Sampler
from memra_pp.driver.ushers import Ushers
from memra_pp.errors import AdmissionError, InputError
from memra_pp.stage.frames import STEP, Frame


@pytest.fixture(scope="module", params=KINDS)
def pipe(request: pytest.FixtureRequest) -> Iterator[memra_pp.Pipeline]:
    with overlapping(request.param) as made:
        yield made


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
    send, run = pipe.chain._send, _Going.run

    def counted(frame: Frame) -> None:
        rows[0] += sum(entry.logits for entry in frame.entries if entry.op == STEP)
        send(frame)

    def watched(going: _Going, *asked: Any) -> None:
        threads.add(pipe.scheduler.mine)
        run(going, *asked)

    monkeypatch.setattr(pipe.chain, "_send", counted)
    monkeypatch.setattr(_Going, "run", watched)
    taken = 0
    for _ in pipe.generate_many([some_tokens(3)], max_new_tokens=40, sampling=GREEDY):
        taken += 1
        if taken % 10 == 5:
            until(lambda: pipe.scheduler.idle)
            assert rows[0] == taken + 1
    assert taken == 40 and threads == {True, False}


@pytest.mark.parametrize(("error", "kind"), [(ValueError, InputError), (SystemExit, SystemExit)])
def test_what_fails_in_the_schedulers_thread_ends_its_caller_and_nobody_else(pipe, monkeypatch, error, kind):
    pick = Sampler.pick

    def fails(sampler: Sampler, answer: Any, position: int) -> int:
        if position >= 5 and pipe.scheduler.mine:
            raise error("no token")
        return pick(sampler, answer, position)

    with pipe.open(some_tokens(4), max_new_tokens=4) as other:
        other.prefill()
        monkeypatch.setattr(Sampler, "pick", fails)
        tokens = pipe.generate_many([some_tokens(3, seed=n) for n in range(3)], max_new_tokens=300, sampling=GREEDY)
        with pytest.raises(kind, match="no token"):
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


def test_late_news_of_a_generation_whose_tokens_are_still_to_be_taken_gives_none_before_them(pipe):
    many = pipe.many([[1, 2, 3]], pipe.ask(9, GREEDY, None), 1)
    many._open_next()
    wait([many._opening[0]])
    many._look_after(0, [])
    going = many._going[0]
    until(lambda: going.given == 1 and going._awaited.done())
    late: list[Any] = []
    many._look_after(0, late)
    assert late == [] and going.given == 1
    many._end()
    assert_empty(pipe)


def test_prompts_may_be_parts_of_one_stream(pipe):
    """A part ends where the next one is taken: it must have been read by then."""
    stream = [(n // 5, token) for n, token in enumerate(some_tokens(60))]
    parts = [[token for _, token in stream[at : at + 5]] for at in range(0, 60, 5)]
    alone = [list(pipe.generate(part, max_new_tokens=4, sampling=GREEDY)) for part in parts]
    prompts = ((token for _, token in part) for _, part in itertools.groupby(stream, key=lambda pair: pair[0]))
    texts: list[list[int]] = [[] for _ in parts]
    for index, token in pipe.generate_many(prompts, max_new_tokens=4, sampling=GREEDY, concurrency=8):
        texts[index].append(token)
    assert texts == alone


def test_prompts_that_are_long_in_coming_hold_up_nobody_else(pipe, monkeypatch):
    monkeypatch.setattr(scheduler, "IDLE_S", 10 * WAIT_S)
    with ThreadPoolExecutor(1) as pool:

        def prompts() -> Iterator[list[int]]:
            for n in range(6):
                pool.submit(list, pipe.generate(some_tokens(4), max_new_tokens=4)).result(WAIT_S)
                yield some_tokens(3, seed=n)

        tokens = pipe.generate_many(prompts(), max_new_tokens=2, sampling=GREEDY, concurrency=2)
        assert len(list(tokens)) == 12


def test_many_that_are_collected_in_the_middle_of_an_open_are_closed_later(pipe, monkeypatch):
    tokens = pipe.generate_many([some_tokens(3)], max_new_tokens=9, sampling=GREEDY)
    next(tokens)
    with monkeypatch.context() as patched:
        patched.setattr(Ushers, "finish", lambda ushers: pytest.fail("it waits for what needs this very thread"))
        pipe._opener._gate.run(tokens.close, WAIT_S, "busy")
    until(lambda: not pipe._opener.live)
    assert_empty(pipe)


def test_an_interpreter_ends_though_prompts_wait_for_bytes_and_nobody_closed_the_pipeline(hybrid: Path):
    script = f"""
import memra_pp
options = dict(backend="local", stages=2, threads=1)
with memra_pp.launch({str(hybrid)!r}, **options) as pipe, pipe.open([1, 2, 3], max_new_tokens=20):
    held = [device["allocated_bytes"] for device in pipe.stats()["devices"]]
pipe = memra_pp.launch({str(hybrid)!r}, budget_bytes=held, **options)
tokens = pipe.generate_many([[1, 2, 3]] * 3, max_new_tokens=20)
next(tokens)
assert pipe.stats()["admission"]["waiting"]
print("ends")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (0, "ends\n"), done.stderr
