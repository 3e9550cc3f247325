"""Stages that sleep, as Ray actors on several raylets: what such a pipeline does, and what its simulation must be told."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

import memra_pp
from benchmarks._peers import Sleeper, write_config
from benchmarks._rates import GREEDY, busy_s, some_tokens
from cluster.simulator import Compute, Driver, Link, Pace, Pipeline, Recovery, pace
from memra_pp.errors import StageError

WIDTH = 2048  # 8 KB of f32
LAYER_S, ROW_S = 0.008, 0.0005
PER_STAGE = 4
"""Sessions for each stage."""
PROMPT, WARMUP, MOST_TOKENS = 16, 5, 1 << 14
CALIBRATED = 100
"""Tokens of each session while something is calibrated."""
DEATHS, RECOVERIES = 3, 100
ROUNDS = 5
DRIVER = -1
"""Whose spans those of no stage are."""
PATIENCE_S = 120.0
LOOK_S = 0.001


@contextmanager
def pipeline(stages: int, layers: int | None = None) -> Iterator[memra_pp.Pipeline]:
    """Stages of one layer each; of more `layers`, the last one has the rest."""
    with tempfile.TemporaryDirectory() as name:
        write_config(Path(name), layers or stages, WIDTH, LAYER_S, ROW_S)
        with memra_pp.launch(name, cuts=range(1, stages), stage_model=Sleeper, threads=1, recoveries=RECOVERIES) as pipe:
            yield pipe


class Streams:
    """Sessions that decode, and when each token came."""

    def __init__(self, pipe: memra_pp.Pipeline, sessions: int) -> None:
        self.pipe = pipe
        self.times: list[list[float]] = [[] for _ in range(sessions)]
        prompts = [some_tokens(pipe, PROMPT, seed) for seed in range(sessions)]
        self._tokens = pipe.generate_many(prompts, max_new_tokens=MOST_TOKENS, sampling=GREEDY, concurrency=sessions)

    def until(self, there: Callable[[], bool]) -> None:
        """Goes on until that is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not there():
            index, _ = next(self._tokens)
            self.times[index].append(time.monotonic())
            if time.monotonic() > deadline:
                raise TimeoutError(f"sessions have {[len(own) for own in self.times]} tokens after {PATIENCE_S:.0f} s")

    def go_on(self, tokens: int) -> list[list[float]]:
        """Until each has so many tokens more; when those came."""
        before = [len(own) for own in self.times]
        self.until(lambda: all(len(own) >= n + tokens for own, n in zip(self.times, before, strict=True)))
        return [own[n:] for own, n in zip(self.times, before, strict=True)]

    def end(self) -> None:
        """Closes all sessions."""
        self._tokens.close()


@contextmanager
def streams(pipe: memra_pp.Pipeline, sessions: int) -> Iterator[Streams]:
    """Sessions that have begun to decode."""
    made = Streams(pipe, sessions)
    try:
        made.go_on(WARMUP)
        yield made
    finally:
        made.end()


class Seen(NamedTuple):
    """What a pipeline did: its pace, and each stage's share of time in which it did not compute."""

    pace: Pace
    bubble: tuple[float, ...]


def watched(of: Streams, tokens: int) -> Seen:
    """What sessions do while each gets so many tokens, `ROUNDS` times: the median of each figure."""
    paces, bubbles = [], []
    for _ in range(ROUNDS):
        before, began = busy_s(of.pipe), time.monotonic()
        paces.append(pace(of.go_on(tokens)))
        took, after = time.monotonic() - began, busy_s(of.pipe)
        bubbles.append([1 - (b - a) / took for a, b in zip(before, after, strict=True)])
    return Seen(Pace(*np.median(paces, axis=0).tolist()), tuple(np.median(bubbles, axis=0).tolist()))


class Death(NamedTuple):
    """Seconds from a stage's death until it was noticed, from then until the stages served again, and from the death until
    every session had a token again; and how many rows a session had, on average."""

    noticed_s: float
    served_s: float
    whole_s: float
    rows: int


def killed(of: Streams) -> Death:
    """What it takes to go on when the middle stage is killed."""
    victim = of.pipe.stats()["stages"][of.pipe.chain.stages // 2]["pid"]
    return _lost(of, lambda: os.kill(victim, signal.SIGKILL))


def rewired(of: Streams) -> Death:
    """What it takes when only the lanes are lost, and no stage."""
    return _lost(of, lambda: of.pipe.chain.fail(StageError("the lanes are to be wired anew")))


def _lost(of: Streams, strike: Callable[[], object]) -> Death:
    pipe, before = of.pipe, [len(own) for own in of.times]
    died = time.monotonic()
    strike()
    while pipe.health()["ready"]:
        time.sleep(LOOK_S)
    noticed = time.monotonic()
    of.until(lambda: pipe.health()["ready"])
    of.go_on(2)
    since = [own[n - 1 :] for own, n in zip(of.times, before, strict=True)]
    again = [max(pairwise(own), key=lambda gap: gap[1] - gap[0])[1] for own in since]
    rows = PROMPT + sum(before) // len(before)
    return Death(noticed - died, pipe.health()["last_recovery"]["took_s"], max(again) - died, rows)


@dataclass(frozen=True)
class Parts:
    """What a pipeline of stages that are alike is made of. `out`, `between` and `back` are links, in the order of a frame."""

    compute: Compute
    out: Link
    between: Link
    back: Link
    driver: Driver
    turnaround_s: float
    jitter: float
    recovery: Recovery

    def of(self, stages: int) -> Pipeline:
        """A pipeline of so many stages."""
        links = (self.out, *[self.between] * (stages - 1), self.back)
        return Pipeline((self.compute,) * stages, links, self.driver, 4 * WIDTH, self.turnaround_s, self.jitter)


def calibrate(say: Callable[[str], None]) -> Parts:
    """Measures the parts, on pipelines of one and of two stages."""
    say("calibrating: one stage")
    with pipeline(1) as pipe:
        with streams(pipe, 1) as of:
            one = traced(of)
        with streams(pipe, PER_STAGE) as of:
            several = traced(of)
    say("calibrating: two stages")
    with pipeline(2) as pipe, streams(pipe, 1) as of:
        single = traced(of)
    with pipeline(2, layers=4) as pipe, streams(pipe, 2 * PER_STAGE) as of:
        uneven = traced(of)
        deaths, wirings = [killed(of) for _ in range(DEATHS)], [rewired(of) for _ in range(DEATHS)]
    wire_s = _median([each.served_s for each in wirings]) / 2
    start_s = max(0.0, _median([death.served_s for death in deaths]) - 2 * wire_s)
    return Parts(
        compute=_compute(one, several),
        out=_link(single, (DRIVER, "send"), (0, "compute")),
        between=_link(single, (0, "compute"), (1, "compute")),
        back=_link(single, (1, "compute"), (DRIVER, "recv"), come="ended"),
        driver=_driver(one, several),
        turnaround_s=_median([span.ended - span.began for span in uneven[1, "recv"].values()]),
        jitter=_jitter(several),
        recovery=Recovery(_median([death.noticed_s for death in deaths]), start_s, 0.0, wire_s),
    )


class Span(NamedTuple):
    """When something began and ended, in seconds, and how many entries its frame had."""

    began: float
    ended: float
    entries: int


Trace = Mapping[tuple[int, str], Mapping[int, Span]]
"""Spans by who and what, a stage's number or `DRIVER` and one of `stage.spans.KINDS`, and the frame's id."""


def traced(of: Streams) -> Trace:
    """What becomes of frames while each session gets some tokens."""
    of.pipe.trace_start()
    of.go_on(CALIBRATED)
    found: dict[tuple[int, str], dict[int, Span]] = defaultdict(dict)
    for event in of.pipe.trace()["traceEvents"]:
        if event["ph"] == "X":
            began, took, told = event["ts"] / 1e6, event["dur"] / 1e6, event["args"]
            found[event["pid"] - 1, event["name"]][told["frame"]] = Span(began, began + took, told["entries"])
    return found


def _compute(one: Trace, several: Trace) -> Compute:
    """A stage's time, from frames of one row and of `PER_STAGE`."""
    low, high = (_median(_steps(trace, rows)) for trace, rows in ((one, 1), (several, PER_STAGE)))
    row = max(0.0, (high - low) / (PER_STAGE - 1))
    return Compute(low - row, row)


def _jitter(trace: Trace) -> float:
    """Half of what the middle 68 % of the steps span, as a part of their median: the deviation, were they normal."""
    below, middle, above = np.percentile(_steps(trace, PER_STAGE), (15.9, 50, 84.1)).tolist()
    return float((above - below) / 2 / middle)


def _steps(trace: Trace, rows: int) -> list[float]:
    return [span.ended - span.began for span in trace[0, "compute"].values() if span.entries == rows]


def _driver(one: Trace, several: Trace) -> Driver:
    """The driver's time, from a frame's having come back to its successor's having been sent, of one stage."""
    low, high = (_median(_turns(trace, rows)) for trace, rows in ((one, 1), (several, PER_STAGE)))
    entry = max(0.0, (high - low) / (PER_STAGE - 1))
    return Driver(low - entry, entry)


def _turns(trace: Trace, entries: int) -> list[float]:
    came, sent = trace[DRIVER, "recv"], trace[DRIVER, "send"]
    pairs = [(came[frame], sent[frame + 1]) for frame in came if frame + 1 in sent]
    return [after.ended - before.ended for before, after in pairs if before.entries == after.entries == entries]


def _link(trace: Trace, source: tuple[int, str], target: tuple[int, str], come: str = "began") -> Link:
    left, there = trace[source], trace[target]
    return Link(max(0.0, _median([getattr(there[frame], come) - left[frame].ended for frame in left if frame in there])))


def _median(values: list[float]) -> float:
    return float(np.median(values))
