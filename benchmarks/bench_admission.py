"""Admission decisions on one core, 8 stages of Step-3.5's cut, at 10 to 10,000 live sessions, beside a plain addition.

A decision takes a request, lays its shape out, and reserves a slab in each of eight arenas whose holes are those of random
sessions come and gone. The floor is what any ledger does at least: eight comparisons and eight additions. Sizes are taken in
turn, so that a slow moment of the machine meets all of them; each figure is the best of its rounds.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
from pathlib import Path

from _report import Report, parser

from memra_pp.admission import Admission, Admit, CostModel, Device, Ledger, Request, SessionShape
from memra_pp.cache import KvPolicy
from memra_pp.config import ModelConfig

CONFIG = Path(__file__).parents[1] / "tests" / "data" / "configs" / "step3p5-flash.json"
STAGES, MOST_CTX, ASKED, ROUNDS = 8, 9000, 1000, 40
LIVE = (10, 100, 1000, 10_000)
FLOOR = "eight additions"


class Busy:
    """An admission with `live` sessions, in arenas that many others have left."""

    def __init__(self, cfg: ModelConfig, live: int) -> None:
        fence = [s * cfg.n_trunk // STAGES for s in range(STAGES + 1)]
        ledger = Ledger([Device(f"device {s}", 1 << 50) for s in range(STAGES)])
        self.admission = Admission(ledger, CostModel(cfg, fence, KvPolicy(ring="step")), cfg.max_ctx)
        self.random = random.Random(live)
        self.live = [self.admit(session) for session in range(live)]
        self.next = live
        for _ in range(3 * live):
            self.replace()

    def admit(self, session: int) -> int:
        shape = SessionShape(self.random.randint(1, MOST_CTX))
        if not isinstance(self.admission.ask(Request(session, shape)), Admit):
            raise RuntimeError("a device of a petabyte is full")
        return session

    def replace(self) -> None:
        """One session leaves and another comes."""
        at = self.random.randrange(len(self.live))
        self.admission.release(self.live[at])
        self.next += 1
        self.live[at] = self.admit(self.next)

    def decide(self) -> float:
        """Seconds a decision, over `ASKED` of them; the sessions leave again, unmeasured."""
        first = self.next + 1
        requests = [Request(first + i, SessionShape(self.random.randint(1, MOST_CTX))) for i in range(ASKED)]
        started = time.perf_counter()
        for request in requests:
            self.admission.ask(request)
        took = time.perf_counter() - started
        self.next += ASKED
        for request in requests:
            self.admission.release(request.session)
        return took / ASKED

    def turn_over(self) -> float:
        """Seconds a release and the decision that follows it."""
        started = time.perf_counter()
        for _ in range(ASKED):
            self.replace()
        return (time.perf_counter() - started) / ASKED


def additions() -> float:
    """Seconds for eight comparisons and eight additions of lists."""
    reserved, budgets, charges = [0] * STAGES, [1 << 50] * STAGES, list(range(STAGES))
    started = time.perf_counter()
    for _ in range(ASKED):
        if all([r + c <= b for r, c, b in zip(reserved, charges, budgets, strict=True)]):
            reserved = [r + c for r, c in zip(reserved, charges, strict=True)]
    return (time.perf_counter() - started) / ASKED


def main() -> None:
    args = parser(__doc__).parse_args()
    sizes, rounds = (LIVE[:2], 3) if args.quick else (LIVE, ROUNDS)
    cfg = ModelConfig.from_hf(CONFIG)
    busy = {live: Busy(cfg, live) for live in sizes}
    measures: dict[tuple[str, int], Callable[[], float]] = {(FLOOR, 0): additions}
    measures |= {("decide", live): desk.decide for live, desk in busy.items()}
    measures |= {("release and decide", live): desk.turn_over for live, desk in busy.items()}
    best = dict.fromkeys(measures, float("inf"))
    gc.freeze()
    for _ in range(rounds):
        for key, measure in measures.items():
            best[key] = min(best[key], measure())
    floor = 1e6 * best.pop((FLOOR, 0))
    report = Report(f"admission on {STAGES} stages", axis="live")
    for (what, live), seconds in best.items():
        report.add(what, 1e6 * seconds, "us", at=live, peer=FLOOR, peer_value=floor)
    for what in ("decide", "release and decide"):
        few, many = (1e6 * best[what, live] for live in (sizes[0], sizes[-1]))
        report.add(what, many, "us", at=sizes[-1], peer=f"{sizes[0]} live", peer_value=few)
    report.give_out(args)


if __name__ == "__main__":
    main()
