"""Kills and stops stages of a pipeline while sessions stream, and compares every text with its undisturbed run.

    python cluster/chaos.py --model tests/data/hybrid --stages 3 --kills 20 --seed 1

Each kill waits for a moment: until some session is in the middle of a certain call, or until a stage that replaces another is
loading. Prints a line a kill, and a summary; ends with an error if a text differs, a token is lost or given out twice, bytes
stay charged, or a process is left.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import memra_pp
from memra_pp.cli import demo_weights

MARK = "MEMRA_CHAOS_MARK"
GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())
CALLS = ("open", "prefill", "decode", "verify", "snapshot", "rollback", "round", "close")
MOMENTS = (*CALLS, "load", "recovery")
PATIENCE_S = 120.0
LOOK_S = 0.0005
DRAFTS = {
    "plain": None,
    "drafts": memra_pp.Draft(k=4),
    "states": memra_pp.Draft(k=3, by=lambda tokens, k: [tokens[-1], 7, 9][:k], recurrent="states"),
}


@dataclass
class Streams:
    """Sessions that go on, one a thread, until they are told to end.

    Attributes:
        at: the call that each thread is in.
        done: how many texts were compared.
        wrong: what was found to differ, or failed.
    """

    pipe: memra_pp.Pipeline
    prompts: Sequence[list[int]]
    new_tokens: int
    at: dict[int, str] = field(default_factory=dict)
    done: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    ending: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.kinds: dict[str, Callable[[int], Any]] = {
            **{name: lambda i, draft=draft: self._text(i, draft) for name, draft in DRAFTS.items()},
            "calls": self._calls,
        }
        self.expected = {(name, i): kind(i) for name, kind in self.kinds.items() for i in range(len(self.prompts))}
        self._threads = [threading.Thread(target=self._go_on, args=(i,)) for i in range(len(self.prompts))]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Ends each after the text it is at."""
        self.ending.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        if any(thread.is_alive() for thread in self._threads):
            self.wrong.append(f"sessions hang: {self.at}")

    def _go_on(self, i: int) -> None:
        rng = random.Random(i)
        while not (self.ending.is_set() or self.wrong):
            name = rng.choice(list(self.kinds))
            try:
                got = self.kinds[name](i)
            except Exception as error:  # noqa: BLE001
                self.wrong.append(f"{name} {i}: {type(error).__name__}: {error}")
                return
            if got != self.expected[name, i]:
                self.wrong.append(f"{name} {i}: {got} and not {self.expected[name, i]}")
            self.done[name] += 1

    @contextlib.contextmanager
    def _in(self, i: int, call: str) -> Iterator[None]:
        self.at[i] = call
        yield
        self.at[i] = ""

    def _text(self, i: int, draft: memra_pp.Draft | None) -> list[int]:
        speculate = {} if draft is None else {"speculate": draft.k, "recurrent": draft.recurrent}
        with self._in(i, "open"):
            session = self.pipe.open(self.prompts[i], max_new_tokens=self.new_tokens, timeout=PATIENCE_S, **speculate)
        made: list[int] = []
        with self._in(i, "prefill"):
            tokens = session.generate(self.new_tokens, GREEDY, draft)
            made.append(next(tokens))
        with self._in(i, "decode" if draft is None else "round"):
            made += tokens
        with self._in(i, "close"):
            session.close()
        return made

    def _calls(self, i: int) -> str:
        """The rows of a session that goes back and forth, as a digest."""
        rows = hashlib.sha256()
        with self._in(i, "open"):
            session = self.pipe.open(self.prompts[i], max_new_tokens=40, speculate=4, snapshots=2, timeout=PATIENCE_S)
        with self._in(i, "prefill"):
            rows.update(session.prefill())
        for turn in range(3):
            with self._in(i, "snapshot"):
                snap = session.snapshot()
                rows.update(session.decode(5 + turn))
            with self._in(i, "verify"):
                rows.update(session.verify([7, 8, 9 + i]))
            with self._in(i, "rollback"):
                session.rollback(snap, 2)
                rows.update(session.decode(11))
            snap.close()
        with self._in(i, "close"):
            session.close()
        return rows.hexdigest()


def stage_pids(mark: str) -> list[int]:
    """The processes of stages, those that are starting too, oldest first."""
    found = []
    for proc in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            ours = proc.name.isdigit() and b"StageActor" in (proc / "cmdline").read_bytes()
            if ours and f"{MARK}={mark}".encode() in (proc / "environ").read_bytes():
                found.append((proc.stat().st_ctime, int(proc.name)))
    return [pid for _, pid in sorted(found)]


def wait_for(what: Callable[[], Any], name: str) -> Any:
    """What it gives, once that is true."""
    deadline = time.monotonic() + PATIENCE_S
    while not (given := what()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name}: not within {PATIENCE_S:.0f} s")
        time.sleep(LOOK_S)
    return given


@dataclass
class Killer:
    """Ends stages at moments, and waits each time until the pipeline serves again."""

    pipe: memra_pp.Pipeline
    streams: Streams
    mark: str
    rng: random.Random
    stop_share: float = 0.1

    def strike(self, number: int, moment: str) -> dict[str, Any]:
        """One kill; what was seen of it."""
        before = self._texts
        wait_for(lambda: self._texts > before or self.streams.wrong, "a text is finished")
        victims = [stage["pid"] for stage in self.pipe.stats()["stages"]]
        stage = self.rng.randrange(len(victims))
        if moment in CALLS:
            wait_for(lambda: moment in self.streams.at.values() or self.streams.wrong, moment)
            time.sleep(self.rng.uniform(0, 0.003))
        how = signal.SIGSTOP if self.rng.random() < self.stop_share else signal.SIGKILL
        began = time.monotonic()
        os.kill(victims[stage], how)
        wait_for(lambda: not self.pipe.health()["ready"], "the loss is noticed")
        noticed = time.monotonic() - began
        again = []
        if moment in ("load", "recovery"):
            again = self._strike_again(victims, moment)
        wait_for(lambda: self.pipe.health()["state"] != "recovering", "the pipeline serves again")
        serving = time.monotonic() - began
        return {
            "kill": number,
            "moment": moment,
            "stage": stage,
            "how": how.name,
            "and_then": again,
            "noticed_s": round(noticed, 3),
            "serving_s": round(serving, 2),
            "state": self.pipe.health()["state"],
            "texts": self._texts,
        }

    @property
    def _texts(self) -> int:
        return sum(self.streams.done.values())

    def _strike_again(self, known: Sequence[int], moment: str) -> list[str]:
        """A second kill while the first is being made good: of the stage that replaces, while it loads, or of any."""
        if moment == "load":
            fresh = wait_for(lambda: [pid for pid in stage_pids(self.mark) if pid not in known], "a stage that replaces")
            time.sleep(self.rng.uniform(0, 0.8))
            victim, what = fresh[-1], "its replacement"
        else:
            time.sleep(self.rng.uniform(0, 3.0))
            victim, what = self.rng.choice(stage_pids(self.mark) or [0]), "any"
        if victim:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        return [what]


def run(
    model: Path, stages: int, kills: int, seed: int, sessions: int, say: Callable[[str], None], stop_share: float = 0.1
) -> dict[str, Any]:
    """The whole of it; the summary.

    Raises:
        AssertionError: something was not as if nothing had been.
    """
    rng, mark = random.Random(seed), uuid.uuid4().hex
    os.environ[MARK] = mark
    try:
        with memra_pp.launch(model, stages=stages, recoveries=1 << 20, silence_timeout=2.0) as pipe:
            prompts = [[rng.randrange(1, 250) for _ in range(rng.randrange(3, 80))] for _ in range(sessions)]
            streams = Streams(pipe, prompts, new_tokens=40)
            killer, told = Killer(pipe, streams, mark, rng, stop_share), []
            streams.start()
            try:
                moments = [*MOMENTS] * (kills // len(MOMENTS) + 1)
                rng.shuffle(moments)
                for number, moment in enumerate(moments[:kills], start=1):
                    told.append(killer.strike(number, moment))
                    say(json.dumps(told[-1]))
                    if streams.wrong or told[-1]["state"] != "ready":
                        break
            finally:
                streams.end()
            stats = pipe.stats()
            held = [(s["allocated_bytes"], s["planned_bytes"]) for s in stats["stages"]]
        left = stage_pids(mark)
    finally:
        del os.environ[MARK]
    summary = {
        "model": model.name,
        "stages": stages,
        "seed": seed,
        "kills": len(told),
        "recoveries": pipe.health()["recoveries"],
        "rebuilds": stats["rebuilds"],
        "texts": dict(streams.done),
        "noticed_s_most": max((t["noticed_s"] for t in told if t["how"] == "SIGKILL"), default=0),
        "serving_s_most": max((t["serving_s"] for t in told), default=0),
        "serving_s_median": sorted(t["serving_s"] for t in told)[len(told) // 2] if told else 0,
        "wrong": streams.wrong,
        "held_bytes": held,
        "sessions": stats["sessions"],
        "left": left,
    }
    say(json.dumps(summary))
    assert not streams.wrong and len(told) == kills, streams.wrong
    assert stats["sessions"] == 0 and not any(a or b for a, b in held) and not left, summary
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="(default: the demo weights)")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sessions", type=int, default=8)
    args = parser.parse_args()
    model = args.model or demo_weights()
    run(model, args.stages, args.kills, args.seed, args.sessions, say=lambda line: print(line, flush=True))


if __name__ == "__main__":
    sys.exit(main())
