"""A pipeline of any number of stages, simulated: what it would do, from what its parts take.

Which entries make up a frame, and when it leaves, the driver's own `Batcher` decides, as it does for a pipeline that is there.
A frame passes stages and links in turn and none overtakes another, so that the `i`th of these places begins with it at

    begun[i] = max(free[i], begun[i - 1] + took[i - 1] + latency[i - 1])

which is a running maximum, computed for all places of a frame at once. The driver is one server: it does one thing at a time.
Not simulated: sockets that are full, and processes that share a core.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from memra_pp.driver.batcher import Batcher
from memra_pp.driver.work import Work
from memra_pp.errors import ConfigError, require
from memra_pp.stage.frames import MAX_BODY_BYTES, STEP, Entry

PATIENCE_S = 3600.0
HELD_S = 1e-6
"""How much later than a hold ends the driver looks again."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Compute:
    """Seconds of a step on a stage: `fixed_s`, `entry_s` for each of its entries, and `row_s` for each of their rows."""

    fixed_s: float
    row_s: float = 0.0
    entry_s: float = 0.0

    def step_s(self, entries: float, rows: float) -> float:
        """Seconds of a step."""
        return self.fixed_s + self.entry_s * entries + self.row_s * rows


@dataclass(frozen=True)
class Link:
    """From when a stage has computed a frame until the next one can begin with it: `latency_s` seconds, software and all, and
    the time of its rows at `bytes_per_s`, in which it carries no other frame."""

    latency_s: float
    bytes_per_s: float = inf


@dataclass(frozen=True)
class Driver:
    """Seconds that the driver's process is busy with a frame, and with each of its entries: its scheduler and its sessions."""

    frame_s: float = 0.0
    entry_s: float = 0.0


@dataclass(frozen=True)
class Pipeline:
    """What is simulated.

    Attributes:
        links: driver to first stage, stage to stage, last stage to driver: one more than stages.
        row_bytes: of a row between stages. Tokens and answers, at the driver's ends, count as none.
        turnaround_s: between the end of a frame and the start of the next one on a stage where that has come already.
        jitter: standard deviation of a stage's time, as a part of it (gamma distributed).
        max_rows: most rows of a frame, the `prefill_chunk` of `launch`.
    """

    stages: tuple[Compute, ...]
    links: tuple[Link, ...]
    driver: Driver = Driver()
    row_bytes: int = 0
    turnaround_s: float = 0.0
    jitter: float = 0.0
    max_rows: int = 512

    def __post_init__(self) -> None:
        require(len(self.stages) >= 1, ConfigError, "stages", self.stages, "at least one")
        require(len(self.links) == len(self.stages) + 1, ConfigError, "links", len(self.links), f"{len(self.stages) + 1}")
        parts = [(s.fixed_s, s.row_s, s.entry_s) for s in self.stages] + [(1 / n.bytes_per_s, n.latency_s) for n in self.links]
        parts += [(self.driver.frame_s, self.driver.entry_s), (self.turnaround_s, self.jitter)]
        require(min(map(min, parts)) >= 0, ConfigError, "times", min(parts), "0 or more seconds")
        require(any(s.fixed_s > 0 for s in self.stages), ConfigError, "stages", self.stages[:3], "some that take time")


@dataclass(frozen=True)
class Load:
    """Sessions that decode for as long as is measured.

    Attributes:
        prompt: rows that each feeds first.
        warmup, tokens: measured is from when each session has had `warmup` tokens until each has had `tokens` more.
        replay: the prompts are sessions that are replayed, as after a stage was lost: in whole chunks, all at once.
    """

    sessions: int
    prompt: int = 1
    warmup: int = 3
    tokens: int = 6
    replay: bool = False

    def __post_init__(self) -> None:
        least = min(self.sessions, self.prompt, self.warmup, self.tokens - 1)
        require(least >= 1, ConfigError, "a load", self, "1 session, row and token for warm-up or more, and 2 tokens")


@dataclass(frozen=True)
class Recovery:
    """What making a lost stage good takes, in seconds: until it is noticed, until a process has taken its place, until its
    weights are loaded, and, a stage, until the lanes are wired anew."""

    detect_s: float
    start_s: float
    load_s: float
    wire_s: float

    def until_served_s(self, stages: int) -> float:
        """From a stage's death until frames pass again; what was lost is to be replayed then."""
        return self.detect_s + self.start_s + self.load_s + stages * self.wire_s


class Pace(NamedTuple):
    """Tokens a second of all sessions together, and the seconds between two tokens of one."""

    tokens_per_s: float
    step_p50_s: float
    step_p99_s: float


@dataclass(frozen=True)
class Outcome:
    """What came of a load.

    Attributes:
        bubble: of each stage, the share of time in which it does not compute.
        first_s: until every session has had its first token.
        driver_busy: the share of time in which the driver is at work.
    """

    pace: Pace
    bubble: tuple[float, ...]
    first_s: float
    driver_busy: float


def simulate(pipeline: Pipeline, load: Load, seed: int = 0) -> Outcome:
    """Runs a load on a pipeline. `seed` is of the jitter."""
    return _Run(pipeline, load, seed).outcome()


def pace(times: Sequence[Sequence[float]]) -> Pace:
    """Out of when each session had its tokens, two or more."""
    rate = sum((len(own) - 1) / (own[-1] - own[0]) for own in times)
    gaps = np.concatenate([np.diff(own) for own in times])
    return Pace(rate, *np.percentile(gaps, (50, 99)).tolist())


@dataclass(slots=True)
class _Session:
    """Rows of its prompt that are `left` to be fed, entries on their `way`, and `tokens` that it has had."""

    number: int
    left: int
    way: int = 0
    tokens: int = 0


class _Flight(NamedTuple):
    back_s: float
    works: list[Work]
    begun: Floats
    ended: Floats


class _Run:
    """A load under way. All times are in seconds since it began."""

    def __init__(self, pipeline: Pipeline, load: Load, seed: int) -> None:
        stages = len(pipeline.stages)
        self._pipeline, self._load, self._random = pipeline, load, np.random.default_rng(seed)
        self._step_of = np.array([(s.fixed_s, s.entry_s, s.row_s) for s in pipeline.stages])
        self._link_row_s = pipeline.row_bytes / np.array([link.bytes_per_s for link in pipeline.links[1:-1]])
        self._latency, self._turnaround = np.zeros(2 * stages - 1), np.zeros(2 * stages - 1)
        self._latency[1::2] = [link.latency_s for link in pipeline.links[1:-1]]
        self._turnaround[::2] = pipeline.turnaround_s
        self._batcher = Batcher(stages, pipeline.max_rows, MAX_BODY_BYTES // 2)
        self._sessions = [_Session(number, load.prompt) for number in range(load.sessions)]
        self._times: list[list[float]] = [[] for _ in self._sessions]
        self._flying: deque[_Flight] = deque()
        self._free, self._busy = np.zeros(2 * stages - 1), np.zeros(stages)
        self._now = self._working = self._first = 0.0
        self._measuring_since = inf
        self._short_of = load.sessions

    def outcome(self) -> Outcome:
        """Runs it to the end."""
        for session in self._sessions:
            self._feed(session)
        self._until(self._load.warmup)
        self._measuring_since = began = self._now
        self._working = 0.0
        self._until(self._load.warmup + self._load.tokens)
        took = self._now - began
        for flight in self._flying:
            self._count(flight)
        return Outcome(pace(self._times), tuple((1 - self._busy / took).tolist()), self._first, self._working / took)

    def _until(self, tokens: int) -> None:
        """Goes on until each session has had so many tokens."""
        self._target, self._short_of = tokens, sum(session.tokens < tokens for session in self._sessions)
        while self._short_of:
            self._send()
            held = self._batcher.held_s(self._now)
            if held is not None and (not self._flying or self._now + held < self._flying[0].back_s):
                self._now += held + HELD_S
            else:
                self._hand_out(self._flying.popleft())

    def _send(self) -> None:
        while works := self._batcher.take(self._now):
            self._work(self._pipeline.driver.frame_s)
            self._flying.append(self._passed(works))

    def _passed(self, works: list[Work]) -> _Flight:
        """A frame that leaves now, and its way. Stages are the even places of it, links the odd ones."""
        rows = sum(work.entry.rows for work in works)
        took = np.empty(len(self._free))
        took[::2] = self._step_of @ (1, len(works), rows)
        took[1::2] = self._link_row_s * rows
        if self._pipeline.jitter:
            shape = self._pipeline.jitter**-2
            took[::2] *= self._random.gamma(shape, 1 / shape, len(took[::2]))
        ahead = np.concatenate(([0.0], np.cumsum((took + self._latency)[:-1])))
        ready = self._free - ahead
        ready[0] = max(ready[0], self._now + self._pipeline.links[0].latency_s)
        begun = np.maximum.accumulate(ready) + ahead
        ended = begun + took
        self._free = ended + self._turnaround
        return _Flight(float(ended[-1] + self._pipeline.links[-1].latency_s), works, begun[::2], ended[::2])

    def _hand_out(self, flight: _Flight) -> None:
        """A frame has come back: its sessions go on."""
        self._now = max(self._now, flight.back_s)
        self._count(flight)
        self._batcher.back(flight.works, float((flight.ended - flight.begun).max()), self._now)
        for work in flight.works:
            self._work(self._pipeline.driver.entry_s)
            session = self._sessions[work.entry.session]
            session.way -= 1
            if work.entry.logits:
                self._answered(session)
            else:
                self._feed(session)

    def _answered(self, session: _Session) -> None:
        """A session has a token, and goes on with it."""
        session.tokens += 1
        if session.tokens == 1:
            self._first = max(self._first, self._now)
        if session.tokens == self._target:
            self._short_of -= 1
        if self._measuring_since < inf:
            self._times[session.number].append(self._now)
        self._submit(session, 1, 1, prefill=False)

    def _feed(self, session: _Session) -> None:
        """Submits as many pieces of what is left of a prompt as may be on their way."""
        most = inf if self._load.replay else len(self._busy)
        while session.left and session.way < most:
            chunk = self._pipeline.max_rows if self._load.replay else self._batcher.piece_rows(session.left)
            rows = min(chunk, session.left)
            session.left -= rows
            self._submit(session, rows, int(not session.left), prefill=True)

    def _submit(self, session: _Session, rows: int, logits: int, *, prefill: bool) -> None:
        session.way += 1
        entry = Entry(STEP, session.number, 0, 0, rows=rows, logits=logits)
        work = Work(entry, [], PATIENCE_S, prefill=prefill, n_bytes=self._pipeline.row_bytes * rows)
        self._batcher.add(work, self._now)

    def _work(self, seconds: float) -> None:
        self._now += seconds
        self._working += seconds

    def _count(self, flight: _Flight) -> None:
        """Adds what of a frame's way falls within the time measured."""
        since, now = self._measuring_since, self._now
        if now > since:
            self._busy += np.clip(flight.ended, since, now) - np.clip(flight.begun, since, now)
