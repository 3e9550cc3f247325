"""Sessions of all kinds come and go for some time, half of them in threads, half in tasks, many cut off at a random moment.

Half of them stream to their end; the others are cancelled, closed in the middle of a call, abandoned or dropped, or their
task is cancelled. Whatever came must be what the same text gives alone. At the end no session, byte, process or thread is left,
and processes are as big, and compute as much for a token, as at the beginning. The exit code is 1 if anything differs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import gc
import mmap
import os
import random
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from _lives import KILLED, LEFT, STRUCK, WHOLE, Findings, Life, Text, drawn_text
from _model import QUICK, SMALL, even_model
from _report import Report, parser, say
from _timing import one_thread_process

import memra_pp
from memra_pp import aio

TEXTS = 24
FIRST_S, PATIENCE_S, HANGS_S = 10.0, 60.0, 300.0
"""How long the first run lasts at most, how long all sessions may take to be closed, and everything beside the run itself."""
QUARTERS, LONG_S = 4, 600.0
GROWTH = 1.1
"""How much bigger a process may be at the end, and how much more a token may cost."""
SILENCE_S = 60.0
"""How long a stage may be silent: the machine may be busy with other things for an hour."""
SHOWN = 5
"""Of what went wrong."""


class Soak:
    """Keeps so many sessions of a pipeline going. `texts` are what they stream."""

    def __init__(self, pipe: memra_pp.Pipeline, texts: Sequence[Text], sessions: int, seed: int) -> None:
        self.found = Findings()
        self._pipe, self._texts, self._rng = pipe, texts, random.Random(seed)
        self._until = 0.0
        self._in_threads, self._in_tasks = sessions // 2, sessions - sessions // 2
        self._threads = ThreadPoolExecutor(max(1, self._in_threads), "soak")
        self._closers = ThreadPoolExecutor(4, "soak-closer")
        self._closing: list[Awaitable[None]] = []

    async def run(self, seconds: float) -> None:
        """Draws lives until the time is up, and waits for the last ones and for every session to be closed."""
        loop, self._until = asyncio.get_running_loop(), time.monotonic() + seconds
        rngs = [random.Random(self._rng.random()) for _ in range(self._in_threads + self._in_tasks)]
        threads = [loop.run_in_executor(self._threads, self._thread, rng, loop) for rng in rngs[: self._in_threads]]
        await asyncio.gather(*threads, *(self._task(rng, loop) for rng in rngs[self._in_threads :]))
        await asyncio.gather(*self._closing)
        self._closing.clear()
        gc.collect()
        deadline = time.monotonic() + PATIENCE_S
        while (await asyncio.to_thread(self._pipe.stats))["sessions"] and time.monotonic() < deadline:
            await asyncio.sleep(0.1)

    def close(self) -> None:
        """Ends its threads, each after the session that it is at."""
        self._until = 0.0
        self._threads.shutdown()
        self._closers.shutdown()

    @property
    def _going(self) -> bool:
        return time.monotonic() < self._until and not self._pipe.chain.failed

    def _thread(self, rng: random.Random, loop: asyncio.AbstractEventLoop) -> None:
        while self._going:
            self._in_thread(self._life(rng, (*STRUCK, *LEFT), loop), loop)

    async def _task(self, rng: random.Random, loop: asyncio.AbstractEventLoop) -> None:
        while self._going:
            life = self._life(rng, (*STRUCK, *LEFT, KILLED), loop)
            task = asyncio.create_task(self._in_task(life))
            if life.how == KILLED:
                life.strike = task.cancel
            await task

    def _life(self, rng: random.Random, cuts: tuple[str, ...], loop: asyncio.AbstractEventLoop) -> Life:
        how = "whole" if rng.random() < WHOLE else rng.choice(cuts)
        return Life(rng.choice(self._texts), how, rng, self.found, loop)

    def _in_thread(self, life: Life, loop: asyncio.AbstractEventLoop) -> None:
        pipe, text = self._pipe, life.text
        with life.judged():
            if life.how == "abandoned":
                for token in pipe.generate(text.prompt, **text.options):
                    if not life.take(token):
                        break
                return
            ask = pipe.ask(**text.options)
            session = pipe.open(text.prompt, **ask.options())
            with contextlib.nullcontext() if life.how == "dropped" else session:
                if life.how in STRUCK:
                    close = partial(loop.run_in_executor, self._closers, session.close)
                    life.strike = session.cancel if life.how == "cancelled" else partial(self._begin, close)
                life.begun()
                for token in session.generate(*ask):
                    if not life.take(token):
                        break

    async def _in_task(self, life: Life) -> None:
        pipe, text = aio.Pipeline(self._pipe), life.text
        with life.judged():
            life.begun()
            if life.how == "abandoned":
                async for token in pipe.generate(text.prompt, **text.options):
                    if not life.take(token):
                        break
                return
            ask = self._pipe.ask(**text.options)
            session = await pipe.open(text.prompt, **ask.options())
            async with contextlib.nullcontext() if life.how == "dropped" else session:
                if life.how in STRUCK:
                    close = partial(_in_own_task, session)
                    life.strike = session.cancel if life.how == "cancelled" else partial(self._begin, close)
                    life.begun()
                async for token in session.generate(*ask):
                    if not life.take(token):
                        break

    def _begin(self, close: Callable[[], Awaitable[None]]) -> None:
        self._closing.append(close())


def _in_own_task(session: aio.Session) -> Awaitable[None]:
    return asyncio.ensure_future(session.close())


def resident_mb(pid: int) -> float:
    """A process's resident set (statm of proc(5))."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE / 1e6


def open_files(pid: int) -> int:
    """How many descriptors a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def cpu_seconds(pids: Sequence[int]) -> float:
    """What processes have computed since they began, their kernel's part of it included (stat of proc(5))."""
    ticks = 0
    for pid in pids:
        ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


async def costs(runs: Soak, pids: Sequence[int], seconds: float) -> list[float]:
    """Seconds that all processes together compute for a token, in every quarter: others on the machine hardly change that."""
    marks = [(cpu_seconds(pids), runs.found.tokens)]
    for _ in range(QUARTERS):
        await asyncio.sleep(seconds / QUARTERS)
        marks.append((cpu_seconds(pids), runs.found.tokens))
    return [(cpu - before) / max(1, tokens - had) for (before, had), (cpu, tokens) in pairwise(marks)]


def sizes(pipe: memra_pp.Pipeline) -> dict[str, tuple[float, int]]:
    """The resident megabytes and the open files of the driver, and of every stage that has a process of its own."""
    pids = {f"stage {stage['stage']}": stage["pid"] for stage in pipe.stats()["stages"] if stage["pid"] != os.getpid()}
    return {name: (resident_mb(pid), open_files(pid)) for name, pid in {"driver": os.getpid(), **pids}.items()}


async def soak(report: Report, pipe: memra_pp.Pipeline, args: argparse.Namespace) -> None:
    """Runs it, and adds what it found."""
    rng = random.Random(args.seed)
    texts = [drawn_text(pipe, rng) for _ in range(TEXTS)]
    runs = Soak(pipe, texts, args.sessions, args.seed)
    try:
        say("a first run")
        await runs.run(min(args.seconds, FIRST_S))
        start, alone = sizes(pipe), runs.found
        say(f"{args.seconds:g} s of {args.sessions} sessions at a time")
        runs.found = Findings()
        pids = [os.getpid(), *({stage["pid"] for stage in pipe.stats()["stages"]} - {os.getpid()})]
        _, each = await asyncio.gather(runs.run(args.seconds), costs(runs, pids, args.seconds))
        end = sizes(pipe)
    finally:
        runs.close()
    found = runs.found
    for wrong in (alone.wrong + found.wrong)[:SHOWN]:
        say(wrong)
    for how, count in sorted(found.ends.items()):
        report.add(f"sessions: {how}", count, "")
    report.add("of these not as alone, or failed", len(alone.wrong + found.wrong), "", at_most=0)
    report.add("tokens", found.tokens / args.seconds, "tok/s")
    p50, p99 = (1e3 * float(np.percentile(found.gaps, percent)) for percent in (50, 99))
    report.add("gap between tokens, p99", p99, "ms", peer="p50", peer_value=p50)
    first, *_, last = np.array_split(np.array(found.gaps), QUARTERS)
    medians = 1e3 * float(np.median(last)), 1e3 * float(np.median(first))
    report.add("gap, p50 of the last quarter", medians[0], "ms", peer="of the first", peer_value=medians[1])
    used = 1e3 * each[-1], 1e3 * each[0]
    bound = GROWTH if args.seconds >= LONG_S else None
    report.add("CPU a token, the last quarter", used[0], "ms", peer="the first", peer_value=used[1], at_most=bound)
    for name, (size, files) in end.items():
        resident, opened = start[name]
        report.add(f"resident: {name}", size, "MB", peer="after the first run", peer_value=resident, at_most=GROWTH)
        report.add(f"open files: {name}", files, "", peer="after the first run", peer_value=opened)
    stats = pipe.stats()
    report.add("rebuilds", stats["rebuilds"], "", at_most=0)
    report.add("sessions open", stats["sessions"], "", at_most=0)
    report.add("reserved", sum(device["reserved_bytes"] for device in stats["devices"]), "B", at_most=0)
    report.add("allocated", sum(stage["allocated_bytes"] for stage in stats["stages"]), "B", at_most=0)


def main() -> int:
    one_thread_process()
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=30.0, help="how long (default: 30)")
    options.add_argument("--sessions", type=int, default=32, help="at a time (default: 32)")
    options.add_argument("--stages", type=int, default=2, help="one thread each (default: 2)")
    options.add_argument("--backend", default="ray", choices=["ray", "local"], help="where the stages run (default: ray)")
    options.add_argument("--model", type=Path, help="a model's path (default: the even model)")
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    if args.quick:
        args.seconds, args.sessions = min(args.seconds, 3.0), min(args.sessions, 8)
    faulthandler.dump_traceback_later(args.seconds + HANGS_S, exit=True)
    report = Report(f"{args.sessions} sessions at a time for {args.seconds:g} s, {args.stages} stages over {args.backend}")
    with (
        even_model(QUICK if args.quick else SMALL) as even,
        memra_pp.launch(
            args.model or even, stages=args.stages, threads=1, backend=args.backend, silence_timeout=SILENCE_S
        ) as pipe,
    ):
        pids = {stage["pid"] for stage in pipe.stats()["stages"]} - {os.getpid()}
        asyncio.run(soak(report, pipe, args))
    report.add("processes left", sum(Path(f"/proc/{pid}").exists() for pid in pids), "", at_most=0)
    report.add("threads left", sum(thread.name.startswith("memra") for thread in threading.enumerate()), "", at_most=0)
    faulthandler.cancel_dump_traceback_later()
    report.give_out(args)
    return 0 if report.met else 1


if __name__ == "__main__":
    sys.exit(main())
