"""The measurements of a bench, a function each. Tokens are picked greedily, and no text ends before its last row."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import count, pairwise
from statistics import fmean, median
from typing import Any

import numpy as np

from ...config import WeightBytes, stage_layers
from ...driver.pipeline import Pipeline
from ...driver.sampling import SamplingParams
from ...driver.speculation.drafters import Draft
from ...errors import AdmissionError
from .figures import Decode, Held, Hop, Prefill, Rollback, Speculation, Stage, StageTime

GREEDY = SamplingParams(temperature=0, eos_ids=())
PROMPT, NEW = 32, 512
"""Tokens of a prompt that is decoded from, and the most that follow it."""

CYCLE = 8
"""A text that repeats itself does so after so many tokens."""

MIN_STEPS = 2
"""Steps of each session that are measured, at least, however long they take."""

TRACED_S = 2.0
"""The longest that hops are traced: a trace has a span a frame and stage."""


def hold(pipe: Pipeline, weights: WeightBytes | None, sessions: int) -> tuple[Held, tuple[Stage, ...], str | None]:
    """Opens so many sessions, or as many as fit; the stages while they are open; and why no more fit.

    Args:
        weights: what the model's files hold, if that is known.

    Raises:
        AdmissionError: not even one fits.
    """
    took: list[float] = []
    refused = None
    with ExitStack() as stack:
        while len(took) < sessions and refused is None:
            started = time.perf_counter()
            try:
                session = stack.enter_context(pipe.open(some_tokens(pipe, PROMPT, len(took)), max_new_tokens=NEW))
                took.append(time.perf_counter() - started)
            except AdmissionError as error:
                if not took:
                    raise
                refused = str(error)
        stages = tuple(_stage(pipe, weights, told) for told in pipe.stats()["stages"])
    return Held(len(took), session.shape.ctx, 1e3 * median(took)), stages, refused


def prefill(pipe: Pipeline, rows: int, seconds: float) -> Prefill:
    """Prompts of `rows` tokens, one after another. Raises AdmissionError if one does not fit."""
    took: list[float] = []
    end = time.perf_counter() + seconds
    while not took or time.perf_counter() + took[-1] <= end:
        with pipe.open(some_tokens(pipe, rows, len(took)), max_new_tokens=1) as session:
            started = time.perf_counter()
            session.prefill(want="argmax")
            took.append(time.perf_counter() - started)
    return Prefill(rows, len(took), median(took), rows / median(took))


def decode(pipe: Pipeline, sessions: int, seconds: float) -> Decode:
    """So many sessions at once, of those that fit, from when all have begun. Where a text ends, another begins."""
    prompts = (some_tokens(pipe, PROMPT, seed) for seed in count())
    with closing(pipe.generate_many(prompts, max_new_tokens=NEW, sampling=GREEDY, concurrency=sessions)) as tokens:
        begun: set[int] = set()
        while len(begun) < sessions:
            begun.add(next(tokens)[0])
        came: defaultdict[int, list[float]] = defaultdict(list)
        before, end = _stage_times(pipe), time.perf_counter() + seconds
        for told, (index, _) in enumerate(tokens):
            came[index].append(time.perf_counter())
            if told >= (1 + MIN_STEPS) * sessions and came[index][-1] >= end:
                break
        spent = [_between(*times) for times in zip(before, _stage_times(pipe), strict=True)]
    steps = [b - a for times in came.values() for a, b in pairwise(times)]
    p50, p99 = (1e3 * float(np.percentile(steps, percent)) for percent in (50, 99))
    return Decode(sessions, len(steps), sessions / fmean(steps), p50, p99, tuple(spent))


def hop_times(pipe: Pipeline, seconds: float) -> tuple[Hop, ...]:
    """One session decodes: no frame waits for another."""
    pipe.trace_start()
    decode(pipe, 1, min(seconds, TRACED_S))
    hops = pipe.trace()["otherData"]["hops"]
    return tuple(Hop(hop["from"], hop["to"], hop["frames"], hop["median_us"], hop["p99_us"]) for hop in hops)


def roll_back(pipe: Pipeline, drafts: int, seconds: float) -> Rollback:
    """Rounds by hand, half of whose drafts are kept. Raises AdmissionError if the session does not fit."""
    accepted = drafts // 2
    took: dict[str, list[float]] = {"decode": [], "verify": [], "back": []}
    with pipe.open(some_tokens(pipe, PROMPT, 0), max_new_tokens=NEW, speculate=drafts) as session:
        session.prefill(want="argmax")
        end = time.perf_counter() + seconds
        while not took["back"] or (time.perf_counter() < end and session.pos + drafts + 3 <= session.shape.ctx):
            first, second, *draft = some_tokens(pipe, drafts + 3, session.pos)
            moments = [time.perf_counter()]
            session.decode(first, want="argmax")
            moments.append(time.perf_counter())
            with session.snapshot() as snap:
                session.verify(draft, want="argmax")
                moments.append(time.perf_counter())
                session.rollback(snap, accept=accepted)
            session.decode(second, want="argmax")
            moments.append(time.perf_counter())
            for times, (a, b) in zip(took.values(), pairwise(moments), strict=True):
                times.append(b - a)
    decode_ms, verify_ms, back_ms = (1e3 * median(times) for times in took.values())
    return Rollback(len(took["back"]), drafts, accepted, decode_ms, verify_ms, back_ms)


def speculate(pipe: Pipeline, draft: Draft | None, drafts: int, seconds: float) -> Speculation:
    """One session, opened for so many drafts a round, whose prompt repeats itself. Raises AdmissionError if it does not fit."""
    prompt = some_tokens(pipe, CYCLE, 0) * (PROMPT // CYCLE)
    with pipe.open(prompt, max_new_tokens=NEW, speculate=drafts) as session:
        tokens = session.generate(NEW, GREEDY, draft)
        next(tokens)
        before, started = pipe.stats(), time.perf_counter()
        came = [started]
        for _ in tokens:
            came.append(time.perf_counter())
            if len(came) > MIN_STEPS and came[-1] >= started + seconds:
                break
        after = pipe.stats()
    drafted, accepted, traversals = (after[name] - before[name] for name in ("drafted", "accepted", "traversals"))
    made = len(came) - 1
    rate = made / (came[-1] - started)
    return Speculation("off" if draft is None else str(draft.by), made, rate, drafted, accepted, made / traversals)


def some_tokens(pipe: Pipeline, n: int, seed: int) -> list[int]:
    """`n` token ids that differ from seed to seed."""
    return [(31 * i + 7919 * seed) % pipe.cfg.n_vocab for i in range(n)]


def _stage(pipe: Pipeline, weights: WeightBytes | None, told: Mapping[str, Any]) -> Stage:
    s, last = told["stage"], len(pipe.fence) - 2
    layers = stage_layers(pipe.cfg, pipe.fence, s)
    held = None if weights is None else weights.of_stage(layers, first=s == 0, last=s == last)
    bytes_of = (told[f"{name}_bytes"] for name in ("planned", "allocated", "arena"))
    return Stage(s, (layers.start, layers.stop), told["device"], held, *bytes_of)


def _stage_times(pipe: Pipeline) -> list[tuple[float, float, float]]:
    return [(stage["busy_s"], stage["wait_in_s"], stage["wait_out_s"]) for stage in pipe.stats()["stages"]]


def _between(before: Sequence[float], after: Sequence[float]) -> StageTime:
    busy, wait_in, wait_out = (b - a for a, b in zip(before, after, strict=True))
    return StageTime(busy, wait_in, wait_out, (wait_in + wait_out) / (busy + wait_in + wait_out))
