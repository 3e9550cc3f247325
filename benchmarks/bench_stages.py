"""More stages, one thread each: tokens a second of decodes and of prefills, beside one stage with one thread.

Of an even model with a small vocabulary and of a smaller one, cut evenly, and of Gemma-3-270M, cut for each kind of work by its
measured times. What N stages may reach is the sum of the stages' times over the longest, each measured while no other stage
runs, in turns with the rest. S sessions are spread over N steps on their way; one stage is given as many rows a step, S / N
sessions, and then as many sessions. N pipelines of one stage each, S / N sessions each at the same time, are what the machine
has for N threads that need not wait for each other. Medians of turns.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from _model import EVEN, QUICK, SMALL, even_model
from _peers import ray_of
from _rates import Rate, decode_rate, prefill_rate
from _report import Report, integers, parser, say
from _timing import one_thread_process

import memra_pp
from memra_pp.cli import demo_weights

KINDS = ("decode", "prefill")
ROUNDS, TOKENS = 5, 32
PROMPTS, PROMPT, PREFILLING = 16, 512, 8
EVEN_SPEEDUP, OF_POSSIBLE = 1.8, 0.9
"""Of two stages: over one stage on the even model, and over what its stages' times allow on Gemma."""


class Work(NamedTuple):
    """What is measured: of all sessions, and of as many as make up one step of theirs."""

    what: str
    kind: str
    all: Callable[[memra_pp.Pipeline], Rate]
    one_step: Callable[[memra_pp.Pipeline], Rate]

    def on_each(self, pipes: Sequence[memra_pp.Pipeline]) -> float:
        """The rates of pipelines together, each with the sessions of one step, at the same time."""
        with ThreadPoolExecutor(len(pipes)) as pool:
            return sum(rate.per_s for rate in pool.map(self.one_step, pipes))


@dataclass(frozen=True)
class Cut:
    """A model cut into stages for each kind of work: over Ray, and in this process, where the stages take turns."""

    over_ray: dict[str, memra_pp.Pipeline]
    alone: dict[str, memra_pp.Pipeline]


@contextmanager
def cut(path: Path, stages: int, balance: str) -> Iterator[Cut]:
    """Launches both, and no fence twice."""
    with ExitStack() as stack:

        def launched(fence: tuple[int, ...], backend: Any) -> memra_pp.Pipeline:
            return stack.enter_context(memra_pp.launch(path, cuts=fence[1:-1], backend=backend, threads=1))

        measured = stack.enter_context(memra_pp.launch(path, stages=stages, balance=balance, backend="local", threads=1))
        found = measured.stats()["cut"]
        fences = {kind: tuple(found[kind]["fence"]) if kind in found else measured.fence for kind in KINDS}
        say(f"{path.name}, {stages} stages: " + ", ".join(f"{kind} cut at {fence[1:-1]}" for kind, fence in fences.items()))
        alone = {measured.fence: measured}
        alone |= {fence: launched(fence, "local") for fence in {*fences.values()} - {measured.fence}}
        over_ray = {fence: launched(fence, "ray") for fence in {*fences.values()}}
        yield Cut(*({kind: pipes[fence] for kind, fence in fences.items()} for pipes in (over_ray, alone)))


def possible(stage_s: list[float]) -> float:
    """How many times as fast stages may be as one after another: all their time over the longest's."""
    return sum(stage_s) / max(stage_s)


@contextmanager
def model(name: str, quick: bool) -> Iterator[Path]:
    """A model's weights, while they are used."""
    if name == "gemma":
        yield demo_weights()
    else:
        with even_model(QUICK if quick else {"even": EVEN, "small": SMALL}[name]) as path:
            yield path


def measure(report: Report, name: str, path: Path, stages: int, args: Any) -> None:
    """Adds a model's figures at so many stages."""
    balance = "time:decode" if name == "gemma" else "even"
    turns, tokens, prompts = (1, 8, 4) if args.quick else (ROUNDS, TOKENS, PROMPTS)

    def decoding(sessions: int) -> Callable[[memra_pp.Pipeline], Rate]:
        return lambda pipe: decode_rate(pipe, sessions, tokens)

    def prefilling(pipe: memra_pp.Pipeline) -> Rate:
        return prefill_rate(pipe, prompts, PROMPT, PREFILLING)

    with ExitStack() as stack:
        ones = [stack.enter_context(memra_pp.launch(path, stages=1, threads=1)) for _ in range(stages)]
        made, one = stack.enter_context(cut(path, stages, balance)), ones[0]
        works = [Work(f"decode, {s} sessions", "decode", decoding(s), decoding(s // stages)) for s in args.sessions]
        works.append(Work("prefill", "prefill", prefilling, prefilling))
        found: dict[Work, list[tuple[Rate, Rate, Rate]]] = {work: [] for work in works}
        same: dict[Work, list[float]] = {work: [] for work in works}
        apart: dict[Work, list[float]] = {work: [] for work in works}
        for turn in range(turns):
            say(f"{name}, {stages} stages: turn {turn + 1} of {turns}")
            for work in works:
                over_ray, alone = made.over_ray[work.kind], made.alone[work.kind]
                found[work].append((work.all(over_ray), work.one_step(one), work.one_step(alone)))
                apart[work].append(work.on_each(ones))
                if work.kind == "decode":
                    same[work].append(work.all(one).per_s)
    for work, rates in found.items():
        ours, like = (statistics.median(rate.per_s for rate in column) for column in [*zip(*rates, strict=True)][:2])
        most = statistics.median(possible(alone.busy_s) for *_, alone in rates)
        speedup = EVEN_SPEEDUP if stages == 2 and name == "even" else None
        of_possible = OF_POSSIBLE if stages == 2 and name == "gemma" else None
        peers = [("1 stage, rows of a step alike", like, speedup), (f"1 stage x {most:.2f} possible", like * most, of_possible)]
        peers.append((f"{stages} pipelines of 1 stage", statistics.median(apart[work]), None))
        if same[work]:
            peers.append(("1 stage, as many sessions", statistics.median(same[work]), None))
        for peer, value, target in peers:
            report.add(f"{name}: {work.what}", ours, "tok/s", at=stages, peer=peer, peer_value=value, at_least=target)


def main() -> None:
    one_thread_process()
    options = parser(__doc__)
    options.add_argument("--stages", type=integers, default=(2,), metavar="N,N", help="one thread each (default: 2)")
    options.add_argument("--sessions", type=integers, default=(4, 16), metavar="S,S", help="that decode (default: 4,16)")
    options.add_argument("--models", nargs="+", default=["even", "small", "gemma"], choices=["even", "small", "gemma"])
    args = options.parse_args()
    if bad := [f"{s} over {n}" for n in args.stages for s in args.sessions if s % n]:
        options.error(f"sessions that cannot be spread evenly: {', '.join(bad)}")
    report = Report(f"one thread a stage, {os.cpu_count()} processors", axis="stages")
    with ray_of(3 * max(args.stages)):
        for name in args.models:
            with model(name, args.quick) as path:
                for stages in args.stages:
                    measure(report, name, path, stages, args)
    report.give_out(args)


if __name__ == "__main__":
    main()
