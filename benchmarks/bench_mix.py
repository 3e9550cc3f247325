"""Sessions decode while a long prompt is fed: how long they wait for a token, with the prefill and without, and what it pays.

Through two stages with one thread each. A gap is the time between two tokens of one session.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
from _model import QUICK, SMALL, even_model
from _rates import GREEDY, PROMPT, some_tokens
from _report import Report, parser, say
from _timing import one_thread_process

import memra_pp
from memra_pp import aio
from memra_pp.cli import demo_weights

SESSIONS, LONG, STAGES = 4, 2048, 2
ROUNDS, ALONE_TOKENS = 5, 64
MANY_TOKENS = 8192
"""More than a session decodes while a prompt is fed."""


class Decoding:
    """Sessions that decode until they are told to end, and when each token came."""

    def __init__(self) -> None:
        self.times: list[list[float]] = [[] for _ in range(SESSIONS)]
        self._came = asyncio.Condition()

    async def run(self, pipe: aio.Pipeline, index: int) -> None:
        """One of the sessions."""
        prompt = some_tokens(pipe.sync, PROMPT, index)
        async for _ in pipe.generate(prompt, max_new_tokens=MANY_TOKENS, sampling=GREEDY):
            self.times[index].append(time.perf_counter())
            async with self._came:
                self._came.notify_all()

    async def until(self, tokens: int) -> None:
        """Waits until each has given so many more tokens."""
        wanted = [len(taken) + tokens for taken in self.times]
        async with self._came:
            await self._came.wait_for(lambda: all(len(t) >= n for t, n in zip(self.times, wanted, strict=True)))

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between tokens, of those gaps that have some of the time given in them."""
        return [b - a for taken in self.times for a, b in pairwise(taken) if a < end and start < b]


@asynccontextmanager
async def decoding(pipe: aio.Pipeline) -> AsyncIterator[Decoding]:
    """All sessions at work."""
    state = Decoding()
    tasks = [asyncio.create_task(state.run(pipe, index)) for index in range(SESSIONS)]
    try:
        await state.until(2)
        yield state
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def feed(pipe: aio.Pipeline, prompt: list[int]) -> tuple[float, float]:
    """When the long prompt's prefill began and ended."""
    async with pipe.open(prompt, max_new_tokens=1) as session:
        started = time.perf_counter()
        await session.prefill(want="argmax")
        return started, time.perf_counter()


async def measure(pipe: aio.Pipeline, long: int, rounds: int, tokens: int) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds of prefills, alone and beside decodes; and of gaps, alone and beside a prefill."""
    prefills: list[list[float]] = [[], []]
    gaps: list[list[float]] = [[], []]
    prompt = some_tokens(pipe.sync, long, SESSIONS)
    await feed(pipe, prompt)
    for turn in range(rounds):
        say(f"turn {turn + 1} of {rounds}")
        started, ended = await feed(pipe, prompt)
        prefills[0].append(ended - started)
        async with decoding(pipe) as state:
            began = time.perf_counter()
            await state.until(tokens)
            gaps[0] += state.gaps(began, time.perf_counter())
            started, ended = await feed(pipe, prompt)
            await state.until(1)
            prefills[1].append(ended - started)
            gaps[1] += state.gaps(started, ended)
    return prefills, gaps


def main() -> None:
    one_thread_process()
    options = parser(__doc__)
    options.add_argument("--model", default="even", choices=["even", "gemma"])
    options.add_argument("--backend", default="ray", choices=["ray", "local"], help="where the stages run (default: ray)")
    args = options.parse_args()
    long, rounds, tokens = (512, 1, 8) if args.quick else (LONG, ROUNDS, ALONE_TOKENS)
    with even_model(QUICK if args.quick else SMALL) as even:
        path: Path = even if args.model == "even" else demo_weights()
        with memra_pp.launch(path, stages=STAGES, threads=1, backend=args.backend) as pipe:
            prefills, gaps = asyncio.run(measure(aio.Pipeline(pipe), long, rounds, tokens))
    report = Report(f"{args.model}: {SESSIONS} sessions decode while {long:,} rows are fed to another, {STAGES} stages")
    for percent in (50, 99):
        alone, beside = (1e3 * float(np.percentile(times, percent)) for times in gaps)
        report.add(f"gap between tokens, p{percent}", beside, "ms", peer="without the prefill", peer_value=alone)
    alone, beside = (long / float(np.median(times)) for times in prefills)
    report.add("prefill", beside, "rows/s", peer="without the decodes", peer_value=alone)
    rates = [SESSIONS / float(np.mean(times)) for times in gaps]
    report.add("decode", rates[1], "tok/s", peer="without the prefill", peer_value=rates[0])
    report.give_out(args)


if __name__ == "__main__":
    main()
