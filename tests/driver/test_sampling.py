"""What a sampler picks is spread as the softmax says, the same for the same seed, and drafts change neither."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from memra_pp.driver.sampling import Sampler, SamplingParams, judge
from memra_pp.errors import InputError, StageError
from memra_pp.stage.frames import TOPK

LOGITS = np.array([1.0, 3.0, -np.inf, 2.5, 2.5, 0.0, -1.0, 2.0], np.float32)
"""A row with a tie, an impossible token and the best one in the middle."""


def answer_to(want: str, logits: NDArray[np.float32]) -> Any:
    """What the last stage answers for one row of logits."""
    order = np.lexsort((np.arange(logits.size), -logits))
    if want == "argmax":
        return np.int32(order[0])
    if want == "logits":
        return logits
    best = order[: int(want.removeprefix("topk:"))]
    answer = np.empty(best.size, TOPK)
    answer["id"], answer["logit"] = best, logits[best]
    return answer


def exact(params: SamplingParams, logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Probabilities by the definitions, token by token."""
    order = sorted(range(logits.size), key=lambda t: (-logits[t], t))[: params.top_k or None]
    if params.temperature == 0:
        order = order[:1]
    heat = params.temperature or 1.0
    p = {t: math.exp((float(logits[t]) - float(logits[order[0]])) / heat) for t in order}
    reach, kept = params.top_p * math.fsum(p.values()), 0
    while kept < len(order) and (kept == 0 or math.fsum(p[t] for t in order[:kept]) < reach):
        kept += 1
    total = math.fsum(p[t] for t in order[:kept])
    return np.array([p[t] / total if t in order[:kept] else 0.0 for t in range(logits.size)])


def fits(counts: NDArray[np.int64], probabilities: NDArray[np.float64]) -> bool:
    """Whether counts may come of the probabilities: chi-square within 5 standard deviations, nothing impossible seen."""
    possible = probabilities > 0
    expected = probabilities[possible] * counts.sum()
    chi2, degrees = float(((counts[possible] - expected) ** 2 / expected).sum()), int(possible.sum()) - 1
    return counts[~possible].sum() == 0 and chi2 <= degrees + 5 * math.sqrt(2 * degrees)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_p": 0.8},
        {"top_p": 0.3},
        {"top_p": 1e-9},
        {"top_p": 0.6, "temperature": 2.0},
        {"top_k": 1},
        {"top_k": 2},
        {"top_k": 5, "top_p": 0.85},
        {"top_k": 8, "seed": 2**64 - 1},
    ],
)
@pytest.mark.parametrize("vary", ["position", "seed"])
def test_picks_are_spread_as_the_softmax_says(options: dict[str, Any], vary: str) -> None:
    sampler = Sampler(params := SamplingParams(**options))
    answer = answer_to(sampler.want, LOGITS)
    if vary == "position":
        picks = [sampler.pick(answer, position) for position in range(4000)]
    else:
        picks = [Sampler(SamplingParams(**{**options, "seed": seed})).pick(answer, 7) for seed in range(4000)]
    assert all(type(token) is int for token in picks)
    assert fits(np.bincount(picks, minlength=LOGITS.size), exact(params, LOGITS))


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.49, {1}), (0.51, {1, 2}), (0.74, {1, 2}), (0.76, {1, 2, 4}), (1.0, {1, 2, 4, 5})]
)
@pytest.mark.parametrize("top_k", [0, 4])
def test_top_p_keeps_the_fewest_best_tokens_and_of_equals_the_lower_ids(top_p: float, kept: set[int], top_k: int) -> None:
    logits = np.array([-np.inf, math.log(4), math.log(2), -np.inf, 0, 0], np.float32)
    sampler = Sampler(SamplingParams(top_p=top_p, top_k=top_k))
    assert {sampler.pick(answer_to(sampler.want, logits), position) for position in range(300)} == kept


@given(
    st.lists(st.floats(-30, 30, width=32) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=40),
    st.floats(0.01, 1),
    st.floats(0.1, 10),
)
def test_the_nucleus_is_what_sorting_finds(logits: list[float], top_p: float, temperature: float) -> None:
    row = np.array(logits, np.float32)
    sampler = Sampler(SamplingParams(temperature=temperature, top_p=top_p))
    weights = np.exp((row.astype(np.float64) - row.max()) / temperature)
    order = np.lexsort((np.arange(row.size), -weights))
    mass = np.cumsum(weights[order]) / weights.sum()
    if np.any(np.abs(mass - top_p) < 1e-9):
        return
    kept = order[: int(np.searchsorted(mass, top_p)) + 1]
    assert set(np.flatnonzero(sampler._weights(row, 0))) == {t for t in kept if weights[t] > 0}


@pytest.mark.parametrize("heat", [1.0, 30.0])
def test_a_vocabulary_of_262144(heat: float) -> None:
    logits = (np.random.default_rng(1).normal(size=262_144) * 4).astype(np.float32)
    half = Sampler(SamplingParams(temperature=heat, top_p=0.5))
    weights = half._weights(logits, 0)
    p = np.exp((logits.astype(np.float64) - logits.max()) / heat)
    p /= p.sum()
    assert p[weights > 0].min() >= p[weights == 0].max()
    assert 0.5 <= p[weights > 0].sum() < 0.5 + p[weights > 0].min() + 1e-12
    assert weights[half.pick(logits, 3)] > 0


def test_extremes_of_logits_and_temperature() -> None:
    row = np.array([-3e38, 3e38, 3e38, -np.inf], np.float32)
    for temperature in (5e-324, 1.0, 1e308):
        assert Sampler(SamplingParams(temperature=temperature)).pick(row, 0) in {1, 2} | ({0} if temperature > 1 else set())
    assert Sampler(SamplingParams()).pick(np.array([-np.inf, 0.0], np.float32), 0) == 1
    for bad in (np.nan, np.inf):
        with pytest.raises(StageError, match=f"position 9 is {bad}"):
            Sampler(SamplingParams()).pick(np.array([0.0, bad], np.float32), 9)


def test_what_the_last_stage_is_asked() -> None:
    assert Sampler().want == Sampler(SamplingParams(temperature=0, top_k=5)).want == "argmax"
    assert Sampler(SamplingParams(top_k=5)).want == "topk:5"
    assert Sampler(SamplingParams(top_p=0.5)).want == "logits"


N_VOCAB, LENGTH = 4, 3


def logits_after(text: tuple[int, ...]) -> NDArray[np.float32]:
    """A tiny model: a row of logits that depends on the whole text."""
    state = 1 + sum((i + 2) * 7 * (t + 1) for i, t in enumerate(text))
    return np.array([math.sin(state * (t + 1)) * 1.5 for t in range(N_VOCAB)], np.float32)


def plain(sampler: Sampler) -> tuple[int, ...]:
    text: tuple[int, ...] = ()
    while len(text) < LENGTH:
        text += (sampler.pick(answer_to(sampler.want, logits_after(text)), 10 + len(text)),)
    return text


def speculated(sampler: Sampler, rng: random.Random) -> tuple[int, ...]:
    """The same with drafts by guess, from none to one more than the text has left."""
    text: tuple[int, ...] = ()
    while len(text) < LENGTH:
        drafts = [rng.randrange(N_VOCAB) for _ in range(rng.randrange(LENGTH + 2 - len(text)))]
        rows = [logits_after(text + tuple(drafts[:i])) for i in range(len(drafts) + 1)]
        answers = np.stack([answer_to(sampler.want, row) for row in rows])
        accepted, token = judge(sampler, answers, drafts, 10 + len(text))
        text += (*drafts[:accepted], token)
    return text[:LENGTH]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0}, {"temperature": 0.6, "top_p": 0.9}, {"top_k": 3}, {"top_k": 3, "top_p": 0.7}]
)
def test_drafts_change_neither_the_spread_nor_the_text(options: dict[str, Any]) -> None:
    rng = random.Random(3)
    counts = {"plain": np.zeros([N_VOCAB] * LENGTH, np.int64), "speculated": np.zeros([N_VOCAB] * LENGTH, np.int64)}
    for seed in range(2500):
        sampler = Sampler(SamplingParams(**options, seed=seed))
        counts["plain"][text := plain(sampler)] += 1
        counts["speculated"][again := speculated(sampler, rng)] += 1
        assert text == again
    joint = np.zeros([N_VOCAB] * LENGTH)
    for at in np.ndindex(*joint.shape):
        joint[at] = math.prod(exact(SamplingParams(**options), logits_after(at[:i]))[at[i]] for i in range(LENGTH))
    for count in counts.values():
        assert fits(count.ravel(), joint.ravel())


def test_judge_counts_what_it_accepts() -> None:
    answers = np.array([5, 6, 7], np.int32)
    assert judge(Sampler(), answers, [5, 6], 0) == (2, 7)
    assert judge(Sampler(), answers, [5, 9], 0) == (1, 6)
    assert judge(Sampler(), answers, [9, 6], 0) == (0, 5)
    assert judge(Sampler(), answers[:1], [], 0) == (0, 5)
    with pytest.raises(InputError, match="the 1 drafts"):
        judge(Sampler(), answers, [5], 0)


def test_numpy_numbers_and_lists_are_taken_and_made_plain() -> None:
    values: list[Any] = [np.float32(0.5), np.float64(0.25), np.int32(3), np.uint64(2**64 - 1), ["a", "b"], {np.int64(7)}]
    params = SamplingParams(*values)
    assert params == SamplingParams(0.5, 0.25, 3, 2**64 - 1, ("a", "b"), (7,))
    assert [type(v) for v in (params.temperature, params.top_k, params.seed)] == [float, int, int]
    assert SamplingParams(eos_ids=[]).eos_ids == ()  # type: ignore[arg-type]
    assert hash(params) == hash(SamplingParams(0.5, 0.25, 3, 2**64 - 1, ("a", "b"), (7,)))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, math.inf, math.nan, "1", None, True)),
        *(("top_p", value) for value in (0, -0.5, 1.5, math.nan, "1")),
        *(("top_k", value) for value in (-1, 1.5, "3", True, 2**31)),
        *(("seed", value) for value in (-1, 2**64, 0.5)),
        *(("stop", value) for value in ("end", b"end", [""], [1], None, 3)),
        *(("eos_ids", value) for value in (5, "ab", [1.5], ["a"], [-1])),
    ],
)
def test_a_bad_parameter_is_named(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name}=.*it must be"):
        SamplingParams(**{name: value})
