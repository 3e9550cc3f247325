"""A row's bits depend on its tokens alone: not on stages, threads, rings, chunks, or what else is open."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import memra_pp
from memra_pp.cache import KvPolicy
from memra_pp.driver.session import Session

TOKENS = np.random.default_rng(7).integers(0, 512, 10_300).tolist()
PROMPT, DRAFT, STEPS = 10_000, 8, 4


def rows_of(session: Session) -> NDArray[np.float32]:
    """Logits of a prefill past 10,000 rows, a verify, some decodes and an extend."""
    rows = [session.prefill(), *session.verify(TOKENS[PROMPT : PROMPT + DRAFT])]
    at = PROMPT + DRAFT
    rows += [session.decode(token) for token in TOKENS[at : at + STEPS]]
    rows.append(session.extend(TOKENS[at + STEPS :]))
    assert session.tokens == TOKENS
    assert session.pos == len(TOKENS)
    return np.stack(rows)


def long_run(tiny: Path, ring: str, **options: object) -> NDArray[np.float32]:
    policy = KvPolicy.from_env({"MEMRA_SWA_RING": ring})
    with (
        memra_pp.launch(tiny, policy=policy, **options) as pipe,  # type: ignore[arg-type]
        pipe.open(TOKENS[:PROMPT], max_new_tokens=300, speculate=DRAFT - 1) as session,
    ):
        return rows_of(session)


@pytest.fixture(scope="module")
def alone(tiny: Path) -> NDArray[np.float32]:
    """One stage, one thread, no ring."""
    return long_run(tiny, "", backend="local", stages=1, threads=1)


@pytest.mark.parametrize(
    ("ring", "options"),
    [
        ("all", {"stages": 1, "threads": 2, "prefill_chunk": 4096}),
        ("all", {"stages": 2, "threads": 1, "prefill_chunk": 511}),
        ("", {"stages": 3, "threads": 2, "prefill_chunk": 1000}),
        ("all", {"stages": 6, "threads": 1}),
        ("all", {"cuts": [1, 5], "threads": 2, "prefill_chunk": 97}),
    ],
)
def test_stages_threads_rings_and_chunks_do_not_matter(
    tiny: Path, alone: NDArray[np.float32], ring: str, options: dict[str, object]
) -> None:
    np.testing.assert_array_equal(long_run(tiny, ring, backend="local", **options), alone)


def test_rings_rebase_past_their_rows(tiny: Path) -> None:
    """The long runs above would prove nothing about rings that never move."""
    policy = KvPolicy(ring="all")
    with memra_pp.launch(tiny, backend="local", policy=policy) as pipe, pipe.open(TOKENS, max_new_tokens=0) as session:
        session.prefill()
        assert session.shape.ctx == len(TOKENS) + 8
        flat = KvPolicy()
        rows = [memra_pp.cache.cache_allocated_bytes_for_layers(pipe.cfg, 0, 1, 10_308, policy=p) for p in (flat, policy)]
        assert rows[1] < rows[0] / 2


@pytest.fixture
def pipe(tiny: Path) -> Iterator[memra_pp.Pipeline]:
    with memra_pp.launch(tiny, backend="local", stages=2) as pipe:
        yield pipe


def test_verify_equals_decoding_one_by_one(pipe: memra_pp.Pipeline) -> None:
    draft = TOKENS[40:49]
    with pipe.open(TOKENS[:40], max_new_tokens=9, speculate=8) as a, pipe.open(TOKENS[:40], max_new_tokens=9) as b:
        np.testing.assert_array_equal(a.prefill(), b.prefill())
        np.testing.assert_array_equal(a.verify(draft), np.stack([b.decode(token) for token in draft]))


def test_all_logits_end_in_the_last_row(pipe: memra_pp.Pipeline) -> None:
    with pipe.open(TOKENS[:70], max_new_tokens=0) as a, pipe.open(TOKENS[:70], max_new_tokens=0) as b:
        rows = a.prefill(all_logits=True)
        assert rows.shape == (70, 512)
        assert rows.dtype == np.float32
        np.testing.assert_array_equal(rows[-1], b.prefill())


def test_interleaved_sessions_do_not_touch_each_other(pipe: memra_pp.Pipeline) -> None:
    with pipe.open(TOKENS[:50], max_new_tokens=8) as alone:
        first = alone.prefill()
        want = [alone.decode(token) for token in TOKENS[50:58]]
    with pipe.open(TOKENS[:50], max_new_tokens=8) as a, pipe.open(TOKENS[100:130], max_new_tokens=8) as b:
        np.testing.assert_array_equal(a.prefill(), first)
        b.prefill()
        for token, row in zip(TOKENS[50:58], want, strict=True):
            b.decode(int(token) ^ 1)
            np.testing.assert_array_equal(a.decode(token), row)


def test_generate_is_greedy_decoding(pipe: memra_pp.Pipeline) -> None:
    out = []
    with pipe.open(TOKENS[:30], max_new_tokens=20) as session:
        row = session.prefill()
        for _ in range(20):
            out.append(int(row.argmax()))
            row = session.decode(out[-1])
    assert (
        list(pipe.generate(TOKENS[:30], max_new_tokens=20, sampling=memra_pp.SamplingParams(temperature=0, eos_ids=()))) == out
    )
    stop = out[5]
    assert (
        list(pipe.generate(TOKENS[:30], max_new_tokens=20, sampling=memra_pp.SamplingParams(temperature=0, eos_ids=[stop])))
        == out[: out.index(stop)]
    )
