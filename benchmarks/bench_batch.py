"""Some sessions at once beside one: a decode step alone, in this process, and tokens a second through two stages. One thread.

The sessions stand at different positions. NumPy multiplies as many rows by the same weights, in f32, and does nothing else
of the step: no norms, no attention, no cache. Of an even model with a small vocabulary, and of Gemma-3-270M.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _model import QUICK, SMALL, even_model
from _rates import decode_rate
from _report import Report, integers, parser, say
from _timing import medians, one_thread_process

import memra_pp
from memra_pp.cache import Cache, KvPolicy
from memra_pp.cli import demo_weights
from memra_pp.kernels import CpuDev
from memra_pp.models import Gemma3, Segment, StepBatch
from memra_pp.models.weights import Weights, open_weights

SESSIONS = (1, 2, 4, 8, 16)
PROMPT, LONGER = 100, 20
"""Rows that the first session holds, and how many more each of the next."""
STAGES, TOKENS, TURNS = 2, 24, 3
TARGETS_AT, SPEEDUP = 8, 2.0
"""With so many sessions, over one; a step of as many rows should take no longer than NumPy's products."""
PROJECTIONS = (
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)


def matrices(weights: Weights) -> list[np.ndarray]:
    """Every matrix that a row is multiplied by, the head or the tied embedding last."""
    head = "lm_head.weight" if weights.has("lm_head.weight") else "model.embed_tokens.weight"
    names = [f"model.layers.{il}.{name}.weight" for il in range(weights.cfg.n_trunk) for name in PROJECTIONS]
    return [weights.tensor(name) for name in (*names, head)]


def step_of(model: Gemma3, caches: list[Cache]) -> Callable[[], object]:
    """A row for each cache, at the position where it stands: every call does the same."""
    batch = StepBatch(tuple(Segment(cache.pos, 1) for cache in caches))
    tokens = np.arange(len(caches), dtype=np.int32) + 100
    return lambda: model.forward(batch, tokens, caches)


def opened(model: Gemma3, device: CpuDev, rows: int) -> Cache:
    """A cache of `rows` rows."""
    cache = Cache.new(device, model.cfg, rows + 1, policy=KvPolicy())
    model.forward(StepBatch((Segment(0, rows),)), np.arange(rows, dtype=np.int32) + 100, [cache])
    cache.pos = rows
    return cache


def products(held: list[np.ndarray], count: int) -> Callable[[], object]:
    """NumPy's products of `count` rows and all matrices."""
    rows = {width: np.ones((count, width), np.float32) for width in {matrix.shape[1] for matrix in held}}

    def multiply() -> None:
        for matrix in held:
            np.matmul(rows[matrix.shape[1]], matrix.T)

    return multiply


def measure_steps(report: Report, name: str, path: Path, args: Any) -> None:
    """Adds what a step takes in this process."""
    device = CpuDev()
    weights = open_weights(path)
    model = Gemma3.load(path, range(weights.cfg.n_layer), device)
    caches = [opened(model, device, PROMPT + LONGER * i) for i in range(max(args.sessions))]
    held = matrices(weights)
    for count in args.sessions:
        step, peer = medians(step_of(model, caches[:count]), products(held, count), rounds=1 if args.quick else 7)
        most = 1.0 if count == TARGETS_AT else None
        report.add(f"{name}: a step", 1e3 * step, "ms", at=count, peer="NumPy's products", peer_value=1e3 * peer, at_most=most)


def measure_rates(report: Report, name: str, path: Path, args: Any) -> None:
    """Adds tokens a second through two stages."""
    turns, tokens = (1, 8) if args.quick else (TURNS, TOKENS)
    counts = (1, *(count for count in args.sessions if count != 1))
    with memra_pp.launch(path, stages=STAGES, threads=1, backend=args.backend) as pipe:
        found = [[decode_rate(pipe, count, tokens).per_s for count in counts] for _ in range(turns)]
    rates = dict(zip(counts, map(statistics.median, zip(*found, strict=True)), strict=True))
    for count, rate in rates.items():
        least = SPEEDUP if count == TARGETS_AT else None
        what = f"{name}: {STAGES} stages"
        report.add(what, rate, "tok/s", at=count, peer="1 session", peer_value=rates[1], at_least=least)


def main() -> None:
    one_thread_process()
    options = parser(__doc__)
    options.add_argument("--sessions", type=integers, default=SESSIONS, metavar="N,N", help="at a time (default: 1,2,4,8,16)")
    options.add_argument("--models", nargs="+", default=["even", "gemma"], choices=["even", "gemma"])
    options.add_argument("--backend", default="ray", choices=["ray", "local"], help="where the stages run (default: ray)")
    args = options.parse_args()
    report = Report("sessions at a time, one thread a stage", axis="sessions")
    for name in args.models:
        with even_model(QUICK if args.quick else SMALL) as even:
            path = even if name == "even" else demo_weights()
            for measure in (measure_steps, measure_rates):
                say(f"{name}: {measure.__name__.removeprefix('measure_')}")
                measure(report, name, path, args)
    report.give_out(args)


if __name__ == "__main__":
    main()
