"""Pipelines whose stages are treated as if they ran at once, and tests that hold them up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from ringed import launch_tiny
from standing import assert_empty

import memra_pp
from memra_pp.driver.chain import LocalChain
from memra_pp.stage.frames import STEP, Frame

WAIT_S = 60.0
KINDS = ("hybrid", "gemma3_tiny", "ringed")
GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())
WARM = memra_pp.SamplingParams(temperature=0.9, top_k=20, seed=5, eos_ids=())
NGRAM = memra_pp.Draft(k=4, by="ngram")


@contextmanager
def overlapping(kind: str) -> Iterator[memra_pp.Pipeline]:
    """Three stages, and steps of at most 16 rows, so that a prompt takes several."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(LocalChain, "overlap", 3)
        with launch_tiny(kind, 3, prefill_chunk=16) as made:
            yield made
            assert_empty(made)


def hold(pipe: memra_pp.Pipeline, monkeypatch: pytest.MonkeyPatch, op: int = STEP) -> tuple[threading.Event, threading.Event]:
    """Has frames with an entry of `op` wait before the stages: set once one is there, and to be set for it to go on."""
    there, go, whole = threading.Event(), threading.Event(), pipe.chain._send

    def send(frame: Frame) -> None:
        if any(e.op == op for e in frame.entries):
            there.set()
            assert go.wait(WAIT_S)
        whole(frame)

    monkeypatch.setattr(pipe.chain, "_send", send)
    return there, go


def until(done: Callable[[], bool]) -> None:
    """Waits until it is so."""
    end = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end
        threading.Event().wait(0.001)
