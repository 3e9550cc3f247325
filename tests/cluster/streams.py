"""Texts that stream at once, while something happens to the stages."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import memra_pp

PROMPTS = [[5, 6, 7, seed] for seed in range(4)]
NEW = 40


def texts_alone(model: Path) -> list[list[int]]:
    with memra_pp.launch(model, backend="local") as pipe:
        return [list(pipe.generate(prompt, max_new_tokens=NEW)) for prompt in PROMPTS]


def streamed(pipe: memra_pp.Pipeline, at: int, strike: Callable[[], object]) -> list[list[int]]:
    """What the prompts give; `strike` is called when the first of them is at its token `at`."""

    def stream(index: int) -> list[int]:
        out = []
        for token in pipe.generate(PROMPTS[index], max_new_tokens=NEW, draft=memra_pp.Draft(k=4)):
            out.append(token)
            if index == 0 and len(out) == at:
                strike()
        return out

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(stream, range(len(PROMPTS))))


def nodes_of(pipe: memra_pp.Pipeline) -> list[str]:
    """Ray's id of each stage's node."""
    return [stage["node"] for stage in pipe.stats()["stages"]]
