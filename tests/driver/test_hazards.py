"""Finalizers, interrupts, threads and numbers gone bad: what is hit is said, and nobody else notices."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import memra_pp
from memra_pp.cache import Cache, DflashTapSink
from memra_pp.driver.sampling import Sampler
from memra_pp.errors import CacheError, InputError, StageError
from memra_pp.models import Gemma3
from memra_pp.models.protocol import Array, StepBatch

PROMPT = [5, 6, 7, 8]
GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())


class NotANumber(Gemma3):
    """Logits of a row whose token is 13 hold a NaN."""

    def forward(self, batch: StepBatch, x: Array, caches: Sequence[Cache]) -> Array:
        bad = x.dtype == np.int32 and 13 in x
        y = super().forward(batch, x, caches)
        if bad:
            y[-1, 100] = np.nan
        return y


class Failing(Sampler):
    """Raises at every pick."""

    def pick(self, answer: Any, position: int) -> int:
        raise self.params.error  # type: ignore[attr-defined]


def failing(error: BaseException) -> Failing:
    sampler = Failing()
    object.__setattr__(sampler.params, "error", error)
    return sampler


@pytest.fixture
def pipe(tiny: Path) -> Iterator[memra_pp.Pipeline]:
    with memra_pp.launch(tiny, backend="local", stages=3) as pipe:
        yield pipe
        assert all(stage["allocated_bytes"] == 0 for stage in pipe.stats()["stages"])


@pytest.mark.parametrize("want", ["argmax", "topk:1", "topk:3"])
def test_no_choice_is_made_among_what_is_no_number(tiny: Path, want: str) -> None:
    with (
        memra_pp.launch(tiny, backend="local", stages=1, stage_model=NotANumber) as pipe,
        pipe.open(PROMPT, max_new_tokens=9) as other,
    ):
        other.prefill()
        with pipe.open(PROMPT, max_new_tokens=9) as s:
            s.prefill()
            assert np.isnan(s.decode(13)[100])
        with pipe.open(PROMPT, max_new_tokens=9) as s:
            s.prefill()
            with pytest.raises(StageError, match="NaN"):
                s.decode(13, want=want)
        assert np.isfinite(other.decode(9)).all()


def test_threads_that_open_and_close_do_not_end_each_others_sessions(pipe: memra_pp.Pipeline) -> None:
    def rounds(seed: int) -> None:
        for token in range(25):
            with pipe.open(PROMPT, max_new_tokens=4) as s:
                s.prefill(want="argmax")
                s.decode(seed + token, want="argmax")

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(rounds, seed) for seed in range(4)]:
            done.result()


@pytest.mark.filterwarnings("error")
def test_a_generation_that_is_collected_in_the_middle_of_a_step_waits_for_its_end(pipe: memra_pp.Pipeline) -> None:
    """The collector runs a generator's `finally` wherever it happens to be: here, while another session's frame travels."""
    whole = pipe.chain._send

    def abandon() -> None:
        ring: list[Any] = [pipe.generate(PROMPT, max_new_tokens=9, sampling=GREEDY)]
        next(ring[0])
        ring.append(ring)

    def collecting(*args: Any) -> Any:
        abandoned = pipe.stats()["sessions"] if not collected else 0
        collected.append(abandoned)
        gc.collect()
        return whole(*args)

    with pipe.open(PROMPT, max_new_tokens=9) as s:
        row = s.prefill()
        gc.disable()
        try:
            abandon()
            collected: list[int] = []
            pipe.chain._send = collecting  # type: ignore[method-assign]
            assert s.decode(9).shape == row.shape
        finally:
            gc.enable()
            del pipe.chain._send  # type: ignore[attr-defined]
        assert collected[0] == 2 and pipe.stats()["sessions"] == 1
    assert pipe.stats()["sessions"] == 0


@pytest.mark.parametrize("error", [ZeroDivisionError("odd"), CacheError("odd"), StageError("odd")])
def test_drafts_that_were_not_judged_do_not_stand(pipe: memra_pp.Pipeline, error: Exception) -> None:
    with pipe.open(PROMPT, max_new_tokens=30, speculate=4) as s, pipe.open(PROMPT, max_new_tokens=30) as plain:
        s.prefill(), plain.prefill()
        for _ in range(3):
            with pytest.raises(InputError if isinstance(error, ZeroDivisionError) else type(error), match="odd"):
                s.round([1, 2, 3], failing(error), next=4)
            plain.decode(4)
            assert s.tokens == plain.tokens
        np.testing.assert_array_equal(s.decode(9), plain.decode(9))


def test_an_interrupt_between_a_step_and_its_judgement_fails_the_session(pipe: memra_pp.Pipeline) -> None:
    with pipe.open(PROMPT, max_new_tokens=30, speculate=4) as s:
        s.prefill()
        with pytest.raises(KeyboardInterrupt):
            s.round([1, 2, 3], failing(KeyboardInterrupt()), next=4)
        with pytest.raises(StageError, match="interrupted"):
            s.decode(1)


def test_a_snapshot_closed_by_another_thread_hinders_no_call(pipe: memra_pp.Pipeline) -> None:
    with pipe.open(PROMPT, max_new_tokens=300) as s:
        s.prefill()
        for token in range(100):
            snap = s.snapshot()
            closing = threading.Thread(target=snap.close)
            closing.start()
            s.decode(token)
            closing.join()
        with s.snapshot():
            pass


def sink(layers: Sequence[Any] = (1,), hidden: int = 64, rows: int = 9, **changes: Any) -> DflashTapSink:
    made = DflashTapSink.armed(tuple(layers), hidden, rows)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


BAD_CALLS: dict[str, Callable[[memra_pp.Session], object]] = {
    **{f"pin {pin!r}": lambda s, pin=pin: s.snapshot(pin=pin) for pin in (-1, 0.5, None, "x", 1)},  # type: ignore[misc]
    "a rollback to nothing": lambda s: s.rollback(None, 0),  # type: ignore[arg-type]
    "a sampler that is none": lambda s: s.round([1], "greedy", next=1),  # type: ignore[arg-type]
    "a huge topk": lambda s: s.decode(1, want="topk:" + "9" * 5000),
    "tokens that end in a letter": lambda s: s.extend(int(x) for x in ("1", "2", "three")),
    "an array for want": lambda s: s.decode(1, want=np.array(["a", "b"])),  # type: ignore[arg-type]
}
BAD_TAPS: dict[str, Any] = {
    "text": "x",
    "too many layers": sink([1] * 257),
    "a layer that is no number": sink([0.0]),
    "a layer that is a truth": sink([True]),
    "a narrow buffer": sink(buf=np.zeros((9, 63), np.float32)),
    "a short buffer": sink(buf=np.zeros((8, 64), np.float32)),
    "a wide type": sink(buf=np.zeros((9, 64))),
    "a negative base": sink(base=-1),
}


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=list(BAD_CALLS))
def test_a_bad_argument_costs_an_error_alone(pipe: memra_pp.Pipeline, call: Callable[[memra_pp.Session], object]) -> None:
    with pipe.open(PROMPT, max_new_tokens=30, speculate=4) as s:
        row = s.prefill()
        with pytest.raises((InputError, ValueError)):
            call(s)
        assert s.tokens == PROMPT and s.decode(1).shape == row.shape


@pytest.mark.parametrize("taps", BAD_TAPS.values(), ids=list(BAD_TAPS))
def test_bad_taps_cost_an_error_alone(pipe: memra_pp.Pipeline, taps: Any) -> None:
    with pipe.open(PROMPT, max_new_tokens=30) as s:
        row = s.prefill()
        s.dflash_taps = taps
        with pytest.raises(InputError):
            s.decode(1)
        s.dflash_taps = None
        assert s.tokens == PROMPT and s.decode(1).shape == row.shape
    assert pipe.stats()["rebuilds"] == 0


@pytest.mark.parametrize("options", [{"draft": "ngram"}, {"sampling": {}}, {"sampling": memra_pp.SamplingParams(top_k=513)}])
def test_bad_options_of_a_generation(pipe: memra_pp.Pipeline, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        list(pipe.generate(PROMPT, max_new_tokens=3, **options))
    with pipe.open(PROMPT, max_new_tokens=3, speculate=2, snapshots=0) as s, pytest.raises(InputError, match="snapshots=0"):
        list(s.generate(3, draft=memra_pp.Draft(k=2)))


def test_a_snapshot_that_moves_nothing_keeps_what_comes_next(pipe: memra_pp.Pipeline) -> None:
    with pipe.open(PROMPT, max_new_tokens=30, speculate=2, snapshots=2) as s:
        s.prefill()
        first = s.round([1, 2], next=3)
        with s.snapshot():
            s.round([1])
        assert first.next in s.tokens


def test_a_drafting_model_is_loaded_once(pipe: memra_pp.Pipeline, tiny: Path, hybrid: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        runs = [
            pool.submit(lambda: list(pipe.generate(PROMPT, max_new_tokens=6, draft=memra_pp.Draft(k=2, by=tiny))))
            for _ in range(3)
        ]
        assert len({tuple(run.result()) for run in runs}) == 1
    assert len(pipe._drafting._loaded) == 1
    with pytest.raises(memra_pp.errors.ConfigError, match="vocabulary"):
        list(pipe.generate(PROMPT, max_new_tokens=6, draft=memra_pp.Draft(k=2, by=hybrid)))
    assert len(pipe._drafting._loaded) == 1
