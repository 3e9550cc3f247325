"""A row of 8 KB through 4 stages and back: ours beside bare Unix sockets, a Ray compiled graph and chained actor calls.

The bare chain comes twice: raw bytes of a known length, and with the least that says whose row it is: a prefix of lengths
and a msgpack header that each stage reads and writes anew. Neither knows sessions, checks or deadlines.

Medians in microseconds, taken in turns, and the share of a core that an idle stage uses.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from _peers import PassThrough, chained_calls, compiled_graph, echoes, write_config
from _relay import relays
from _report import Report, parser, say
from _timing import in_turns

import memra_pp
from memra_pp.driver.work import Work
from memra_pp.stage.frames import STEP, Entry

STAGES = 4
WIDTH = 2048  # 8 KB of f32
ROUNDS, STEPS, CALLS = 12, 100, 20
IDLE_S = 5.0


def our_step(pipe: memra_pp.Pipeline, session: memra_pp.Session) -> Callable[[], None]:
    """One row through our chain: entry checks, acks, counters and all."""
    row = np.ones((1, WIDTH), np.float32)
    at = 0

    def step() -> None:
        nonlocal at
        work = Work(Entry(STEP, session.id, at + 1, pipe.chain.epoch, at, 1, 1), [row], 10.0)
        pipe.scheduler.submit(work)
        pipe.scheduler.wait(work)
        reply = work.result()
        at += 1
        if reply.answers is None or reply.answers.nbytes != row.nbytes:
            raise RuntimeError(f"the row did not come back: {reply.fault}")

    return step


def idle_share(pids: list[int], seconds: float) -> float:
    """The largest share of a core that one of the processes uses while nothing is asked of it."""
    tick = os.sysconf("SC_CLK_TCK")

    def used(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / tick

    before = [used(pid) for pid in pids]
    time.sleep(seconds)
    return max(used(pid) - b for pid, b in zip(pids, before, strict=True)) / seconds


def main() -> None:
    args = parser(__doc__).parse_args()
    rounds, idle_s = (2, 0.5) if args.quick else (ROUNDS, IDLE_S)
    row = np.ones((1, WIDTH), np.float32)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_config(folder, STAGES, WIDTH)
        pipe = stack.enter_context(memra_pp.launch(folder, stages=STAGES, stage_model=PassThrough, threads=1))
        idle = idle_share([s["pid"] for s in pipe.stats()["stages"]], idle_s)
        session = stack.enter_context(pipe.open([1], max_new_tokens=60000))
        actors = stack.enter_context(echoes(STAGES))
        steps = {
            "ours": (our_step(pipe, session), STEPS),
            "bare sockets": (stack.enter_context(relays(STAGES, 64 + row.nbytes)), STEPS),
            "sockets with a msgpack header": (stack.enter_context(relays(STAGES, row.nbytes, header=True)), STEPS),
            "actor calls": (chained_calls(actors, row), CALLS),
        }
        say("taking turns")
        took = in_turns(steps, rounds)
        say("the compiled graph, last, since it spins")
        with compiled_graph(actors, row) as step:
            took |= in_turns({"compiled graph": (step, STEPS)}, rounds)
    medians = {name: 1e6 * statistics.median(times) for name, times in took.items()}
    ours = medians.pop("ours")
    report = Report(f"{STAGES} stages, {row.nbytes:,} B a row")
    for peer, theirs in medians.items():
        report.add("a row through all and back", ours, "us", peer=peer, peer_value=theirs)
    report.add("an idle stage", 100 * idle, "% of a core")
    report.give_out(args)


if __name__ == "__main__":
    main()
