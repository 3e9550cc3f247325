"""Gemma-3-270M decoding through one Ray stage, beside the same forward called in this process with the same threads.

Tokens a second, from medians over turns taken one after the other.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
from _report import Report, parser
from _timing import in_turns

import memra_pp
from memra_pp.cache import Cache, KvPolicy
from memra_pp.cli import demo_weights
from memra_pp.config import ModelConfig
from memra_pp.kernels import CpuDev
from memra_pp.models import Gemma3, Segment, StepBatch

THREADS = 1
PROMPT = 32
TURNS, TOKENS = 12, 8
FIRST = 818


def in_process_step(context: int) -> Callable[[], None]:
    """A greedy token, straight through the model."""
    device = CpuDev(threads=THREADS)
    path = demo_weights()
    cfg = ModelConfig.from_gguf(path)
    model = Gemma3.load(path, range(cfg.n_layer), device)
    cache = Cache.new(device, cfg, context, policy=KvPolicy())
    token = FIRST

    def step() -> None:
        nonlocal token
        logits = model.forward(StepBatch((Segment(cache.pos, 1),)), np.array([token], np.int32), [cache])
        cache.pos += 1
        token = int(logits[0].argmax())

    return step


def through_stage_step(session: memra_pp.Session) -> Callable[[], None]:
    """The same through the pipeline, logits and all."""
    token = FIRST

    def step() -> None:
        nonlocal token
        token = int(session.decode(token).argmax())

    return step


def main() -> None:
    args = parser(__doc__).parse_args()
    turns = 2 if args.quick else TURNS
    context = PROMPT + (turns + 1) * TOKENS
    with (
        memra_pp.launch(demo_weights(), stages=1, threads=THREADS, policy=KvPolicy()) as pipe,
        pipe.open([2], max_new_tokens=context) as session,
    ):
        session.prefill()
        steps = {"one Ray stage": (through_stage_step(session), TOKENS), "in process": (in_process_step(context), TOKENS)}
        took = in_turns(steps, turns)
    ours, theirs = (1 / statistics.median(times) for times in took.values())
    report = Report(f"Gemma-3-270M, {THREADS} thread each")
    report.add("decoding through one Ray stage", ours, "tok/s", peer="in process", peer_value=theirs)
    report.give_out(args)


if __name__ == "__main__":
    main()
