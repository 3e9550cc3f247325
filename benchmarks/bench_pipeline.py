"""The pipeline alone: 1 to 8 stages that sleep for about 5 ms instead of computing, and as many sessions as stages.

Each stage measures its own sleeps and writes them into the rows that pass, so that a step comes back with what it slept where.
Steps a second are beside what the sleeps of the slowest stage allow; a step's time, with one session, beside the sum of its
sleeps and 0.3 ms a stage.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
from _peers import Sleeper, ray_of, write_config
from _report import Report, integers, parser, say

import memra_pp
from memra_pp import aio
from memra_pp.models.protocol import Array

SLEEP_S, HOP_S = 0.005, 0.0003
WIDTH = 64
STEPS, ROUNDS = 100, 5
OF_IDEAL = 0.95


async def decode(session: aio.Session, stages: int, steps: int) -> tuple[float, Array]:
    """Steps a second, and how long each slept on each stage, in seconds, `[steps, stages]`."""
    await session.decode(1)
    started = time.perf_counter()
    slept = [(await session.decode(1))[:stages] for _ in range(steps)]
    return steps / (time.perf_counter() - started), np.array(slept)


async def throughput(sync: memra_pp.Pipeline, steps: int) -> tuple[float, float]:
    """Steps a second of as many sessions as stages, and what the slowest stage's sleeps allow."""
    pipe, stages = aio.Pipeline(sync), sync.chain.stages
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(pipe.open([1], max_new_tokens=steps + 1)) for _ in range(stages)]
        await asyncio.gather(*(session.prefill() for session in sessions))
        rates, slept = zip(*await asyncio.gather(*(decode(session, stages, steps) for session in sessions)), strict=True)
    return sum(rates), 1 / float(np.concatenate(slept).mean(axis=0).max())


def latency(pipe: memra_pp.Pipeline, steps: int) -> tuple[float, float]:
    """Seconds of a step of one session, and of its sleeps, medians."""
    took, slept = [], []
    with pipe.open([1], max_new_tokens=steps) as session:
        session.prefill()
        for _ in range(steps):
            started = time.perf_counter()
            row = session.decode(1)
            took.append(time.perf_counter() - started)
            slept.append(float(row[: pipe.chain.stages].sum()))
    return statistics.median(took), statistics.median(slept)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--stages", type=integers, default=(1, 2, 4, 8), metavar="N,N")
    args = options.parse_args()
    rounds, steps = (1, 10) if args.quick else (ROUNDS, STEPS)
    report = Report(f"stages that sleep for {1e3 * SLEEP_S:g} ms", axis="stages")
    with ray_of(max(args.stages)):
        for stages in args.stages:
            say(f"{stages} stages")
            with tempfile.TemporaryDirectory() as name:
                write_config(Path(name), stages, WIDTH, SLEEP_S)
                with memra_pp.launch(name, stages=stages, stage_model=Sleeper, threads=1) as pipe:
                    rates = [asyncio.run(throughput(pipe, steps)) for _ in range(rounds)]
                    step, slept = latency(pipe, rounds * steps)
            rate, ideal = (statistics.median(values) for values in zip(*rates, strict=True))
            many, one = "as many sessions as stages", "one session's step"
            report.add(many, rate, "steps/s", at=stages, peer="ideal", peer_value=ideal, at_least=OF_IDEAL)
            allowed = 1e3 * (slept + stages * HOP_S)
            report.add(one, 1e3 * step, "ms", at=stages, peer="its sleeps + 0.3 a stage", peer_value=allowed, at_most=1)
    report.give_out(args)


if __name__ == "__main__":
    main()
