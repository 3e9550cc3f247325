"""Gemma-3-270M decoding through one Ray stage, beside the same forward called in this process with the same threads.

Prints tokens a second of each, from medians over turns taken one after the other, and their ratio.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

import memra_pp
from memra_pp.cache import Cache, KvPolicy
from memra_pp.cli import demo_weights
from memra_pp.config import ModelConfig
from memra_pp.kernels import CpuDev
from memra_pp.models import Gemma3, Segment, StepBatch

THREADS = 1
PROMPT = 32
TURNS, TOKENS = 12, 8

Step = Callable[[int], int]


def in_process_step(context: int) -> Step:
    """Token in, next token out, straight through the model."""
    device = CpuDev(threads=THREADS)
    path = demo_weights()
    cfg = ModelConfig.from_gguf(path)
    model = Gemma3.load(path, range(cfg.n_layer), device)
    cache = Cache.new(device, cfg, context, policy=KvPolicy())

    def step(token: int) -> int:
        logits = model.forward(StepBatch((Segment(cache.pos, 1),)), np.array([token], np.int32), [cache])
        cache.pos += 1
        return int(logits[0].argmax())

    return step


def through_stage_step(session: memra_pp.Session) -> Step:
    """The same through the pipeline, logits and all."""

    def step(token: int) -> int:
        return int(session.decode(token).argmax())

    return step


def main() -> None:
    """Takes turns and prints the table."""
    context = PROMPT + TURNS * TOKENS + 64
    with (
        memra_pp.launch(demo_weights(), stages=1, threads=THREADS, policy=KvPolicy()) as pipe,
        pipe.open([2], max_new_tokens=context) as session,
    ):
        session.prefill()
        steps = {"one Ray stage": through_stage_step(session), "in process": in_process_step(context)}
        tokens = dict.fromkeys(steps, 818)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(TURNS + 1):
            for name, step in steps.items():
                for _ in range(TOKENS):
                    start = time.perf_counter()
                    tokens[name] = step(tokens[name])
                    if turn:
                        times[name].append(time.perf_counter() - start)
    rates = {name: 1 / statistics.median(values) for name, values in times.items()}
    for name, rate in rates.items():
        print(f"  {name:14} {rate:6.2f} tok/s")
    print(f"  ratio {rates['one Ray stage'] / rates['in process']:.3f} ({THREADS} thread each)")


if __name__ == "__main__":
    main()
