"""Speculation changes the time a text takes, never the text: whoever drafts, however many, over any number of stages."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import pytest
from ringed import DATA, launch_tiny, some_tokens
from standing import assert_books_agree, assert_empty, on_stages

import memra_pp
from memra_pp import Draft, SamplingParams

GREEDY = SamplingParams(temperature=0, eos_ids=())
HOT = SamplingParams(temperature=3.0, seed=5, eos_ids=())
SAMPLING = {"hybrid": GREEDY, "gemma3_tiny": HOT, "ringed": GREEDY}
"""The greedy text of the random Gemma is one token over and over."""

MODES = ["replay", "states"]
MODELS = ["hybrid", "gemma3_tiny", "ringed"]
NEW = 40
LONG = 4150
"""Rows of a prompt behind which the rings of 4,159 rows move."""

DrawDrafts = Callable[[Sequence[int], int], list[int]]


@pytest.fixture(scope="module", params=itertools.product(MODELS, [1, 2, 4]), ids=lambda p: f"{p[0]}-{p[1]}")
def pipe(request: pytest.FixtureRequest) -> Iterator[memra_pp.Pipeline]:
    with launch_tiny(*request.param) as pipe:
        yield pipe
        assert_empty(pipe)


@cache
def plain_text(model: str, length: int, seed: int, new: int, sampling: SamplingParams = GREEDY) -> list[int]:
    """What a model on one stage writes without drafts."""
    with launch_tiny(model, stages=1, prefill_chunk=4096) as pipe:
        return list(pipe.generate(some_tokens(length, seed), max_new_tokens=new, sampling=sampling))


def name_of(pipe: memra_pp.Pipeline) -> str:
    return pipe._model.name


def right(text: list[int], tokens: Sequence[int], k: int) -> list[int]:
    """What stands in the whole text behind `tokens`."""
    return text[len(tokens) : len(tokens) + k]


def wrong(text: list[int], tokens: Sequence[int], k: int) -> list[int]:
    return [(token + 1) % 61 for token in right(text, tokens, k)]


def anything(text: list[int], tokens: Sequence[int], k: int) -> list[int]:
    """Any number of right ones, then chance."""
    rng = random.Random(len(tokens))
    return [token if rng.random() < 0.7 else rng.randrange(61) for token in right(text, tokens, k)]


def moody(text: list[int], tokens: Sequence[int], k: int) -> list[int]:
    """Silent for a few rounds in a row, and short at other times."""
    return [] if len(tokens) // 5 % 2 else anything(text, tokens, len(tokens) % (k + 1))


DRAFTERS = [right, wrong, anything, moody]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_text_is_the_plain_one(pipe: memra_pp.Pipeline, drafter: Callable[..., list[int]], k: int, mode: Any) -> None:
    prompt, text = some_tokens(30), plain_text(name_of(pipe), 30, 0, NEW)
    before = pipe.stats()
    draft = Draft(k=k, by=partial(drafter, prompt + text), recurrent=mode)
    assert list(pipe.generate(prompt, max_new_tokens=NEW, sampling=GREEDY, draft=draft)) == text
    after = pipe.stats()
    drafted, accepted = (after[name] - before[name] for name in ("drafted", "accepted"))
    assert accepted == {right: drafted, wrong: 0}.get(drafter, accepted) and drafted > 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_so_it_is_when_every_round_drafts(
    pipe: memra_pp.Pipeline, drafter: Callable[..., list[int]], k: int, mode: Any
) -> None:
    """No control that leaves bad drafters alone; the driver's books and the stages' stay one."""
    sampling = SAMPLING[name_of(pipe)]
    prompt, text, sampler = some_tokens(30), plain_text(name_of(pipe), 30, 0, NEW, sampling), memra_pp.Sampler(sampling)
    with pipe.open(prompt, max_new_tokens=NEW, speculate=k, recurrent=mode) as s:
        made = [sampler.pick(s.prefill(want=sampler.want), s.pos)]
        while len(made) < NEW:
            drafts = drafter(prompt + text, [*s.tokens, made[-1]], min(k, s.drafts_possible))
            done = s.round(drafts, sampler, next=made[-1])
            made += [*drafts[: done.accepted], done.next]
            assert_books_agree(s)
        assert made[:NEW] == text


LONG_CASES = {
    "right-8-states": (right, 8, "states"),
    "wrong-8-replay": (wrong, 8, "replay"),
    "anything-4-states": (anything, 4, "states"),
    "anything-8-replay": (anything, 8, "replay"),
    "moody-1-replay": (moody, 1, "replay"),
}


@pytest.mark.parametrize("model", ["gemma3_tiny", "ringed"])
@pytest.mark.parametrize(("drafter", "k", "mode"), LONG_CASES.values(), ids=list(LONG_CASES))
def test_rings_move_under_the_rounds(model: str, drafter: Callable[..., list[int]], k: int, mode: Any) -> None:
    sampling = SAMPLING[model]
    prompt, text = some_tokens(LONG), plain_text(model, LONG, 0, NEW, sampling)
    with launch_tiny(model, stages=2, prefill_chunk=4096) as pipe:
        with pipe.open(prompt, max_new_tokens=1000, speculate=k, recurrent=mode) as s:
            generation = s.generate(NEW, sampling, Draft(k=k, by=partial(drafter, prompt + text)))
            made = [next(generation)]
            rings = [layer.ring for stage in on_stages(s) for layer in stage.cache.kv if layer is not None and layer.ring]
            assert {ring.base for ring in rings} == {0}
            assert made + list(generation) == text
            assert max(ring.base for ring in rings) > 4000
        assert_empty(pipe)


@pytest.mark.parametrize("seed", range(3))
def test_generations_that_open_and_close_in_any_order_do_not_touch_each_other(pipe: memra_pp.Pipeline, seed: int) -> None:
    rng = random.Random(seed)
    waiting = rng.sample(list(itertools.product(DRAFTERS, [1, 3, 8], MODES)), 12)
    going: list[tuple[Iterator[int], list[int], int]] = []
    while waiting or going:
        if waiting and (len(going) < 2 or rng.random() < 0.1):
            drafter, k, mode = waiting.pop()
            length = rng.choice([1, 7, 30])
            prompt, text = some_tokens(length, seed), plain_text(name_of(pipe), length, seed, NEW)
            draft = Draft(k=k, by=partial(drafter, prompt + text), recurrent=mode) if rng.random() < 0.9 else None
            going.append((pipe.generate(prompt, max_new_tokens=NEW, sampling=GREEDY, draft=draft), text, 0))
        generation, text, at = going.pop(rng.randrange(len(going)))
        if rng.random() < 0.02:
            generation.close()  # type: ignore[attr-defined]
            continue
        token = next(generation, None)
        assert token == (text[at] if at < NEW else None)
        if token is not None:
            going.append((generation, text, at + 1))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("params", [{}, {"top_k": 5}, {"top_p": 0.8}], ids=str)
def test_sampled_text_is_the_plain_one(pipe: memra_pp.Pipeline, params: dict[str, Any], mode: Any) -> None:
    texts = set()
    for seed in (1, 2):
        sampling = SamplingParams(temperature=1.0, seed=seed, eos_ids=(), **params)
        prompt, text = some_tokens(30), plain_text(name_of(pipe), 30, 0, NEW, sampling)
        for drafter in (anything, moody):
            draft = Draft(k=4, by=partial(drafter, prompt + text), recurrent=mode)
            assert list(pipe.generate(prompt, max_new_tokens=NEW, sampling=sampling, draft=draft)) == text
        texts.add(tuple(text))
    assert len(texts) == 2


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("model", ["hybrid", "gemma3_tiny"])
def test_the_same_model_drafts_nothing_wrong(model: str, k: int, mode: Any) -> None:
    with launch_tiny(model, stages=2) as pipe:
        draft = Draft(k=k, by=DATA / model, recurrent=mode)
        for seed in (0, 1):
            made = list(pipe.generate(some_tokens(30, seed), max_new_tokens=NEW, sampling=GREEDY, draft=draft))
            assert made == plain_text(model, 30, seed, NEW)
        stats = pipe.stats()
        assert stats["accepted"] == stats["drafted"] > 0
        assert_empty(pipe)
        assert all(stage["allocated_bytes"] == 0 for stage in pipe._drafting._model(DATA / model).stats()["stages"])
