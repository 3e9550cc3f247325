"""How fast a pipeline makes tokens, and how fast it reads prompts, with many sessions at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import memra_pp

GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())
PROMPT = 16
LEAD = 4
"""Tokens that a session may be ahead of the one opened after it."""


class Rate(NamedTuple):
    """Tokens a second, and for how many seconds each stage was busy with them."""

    per_s: float
    busy_s: list[float]


def some_tokens(pipe: memra_pp.Pipeline, n: int, seed: int) -> list[int]:
    """Token ids that differ from seed to seed."""
    return [2 + (31 * i + 7919 * seed) % (pipe.cfg.n_vocab - 2) for i in range(n)]


def decode_rate(pipe: memra_pp.Pipeline, sessions: int, tokens: int) -> Rate:
    """While all of so many sessions decode, some `tokens` each.

    Sessions are opened one after another while those before decode already: what counts is each one's rate between the first
    token of the last and the last token of the first.
    """
    most = tokens + LEAD * (sessions - 1)
    prompts = [some_tokens(pipe, PROMPT, seed) for seed in range(sessions)]
    times: list[list[float]] = [[] for _ in prompts]
    busy: list[list[float]] = []
    for index, _ in pipe.generate_many(prompts, max_new_tokens=most, sampling=GREEDY, concurrency=sessions):
        times[index].append(time.perf_counter())
        if all(times) if not busy else len(busy) == 1 and len(times[index]) == most:
            busy.append(busy_s(pipe))
    start, end = max(taken[0] for taken in times), min(taken[-1] for taken in times)
    rates = [_rate([at for at in taken if start <= at <= end]) for taken in times]
    return Rate(sum(rates), _between(*busy))


def prefill_rate(pipe: memra_pp.Pipeline, prompts: int, rows: int, sessions: int) -> Rate:
    """Of so many prompts of `rows` tokens each, `sessions` at a time."""
    texts: Iterator[list[int]] = (some_tokens(pipe, rows, seed) for seed in range(prompts))
    before, started = busy_s(pipe), time.perf_counter()
    for _ in pipe.generate_many(texts, max_new_tokens=1, sampling=GREEDY, concurrency=sessions):
        pass
    per_s = prompts * rows / (time.perf_counter() - started)
    return Rate(per_s, _between(before, busy_s(pipe)))


def _rate(times: list[float]) -> float:
    return (len(times) - 1) / (times[-1] - times[0])


def busy_s(pipe: memra_pp.Pipeline) -> list[float]:
    """Seconds for which each stage has computed so far."""
    return [stage["busy_s"] for stage in pipe.stats()["stages"]]


def _between(before: list[float], after: list[float]) -> list[float]:
    return [b - a for a, b in zip(before, after, strict=True)]
