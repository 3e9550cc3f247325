"""Taps of a session: the residual behind chosen layers, gathered from every stage, once for every token fed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from ringed import launch_tiny, some_tokens
from standing import assert_empty, assert_stands, image, on_stages

import memra_pp
from memra_pp.cache import DflashTapSink
from memra_pp.errors import CacheError, InputError, MemraError
from memra_pp.models.protocol import Array

MODELS = ["hybrid", "gemma3_tiny", "ringed"]
MODES = ["replay", "states"]
LAYERS = (4, 0, 5, 2, 4)
TOKENS = some_tokens(60)


@pytest.fixture(scope="module", params=MODELS)
def pipe(request: pytest.FixtureRequest) -> Iterator[memra_pp.Pipeline]:
    """Three stages, steps of at most 7 rows."""
    with launch_tiny(request.param, stages=3, prefill_chunk=7) as pipe:
        yield pipe
        assert_empty(pipe)


@pytest.fixture(scope="module")
def alone(pipe: memra_pp.Pipeline) -> Iterator[memra_pp.Pipeline]:
    """One stage, and steps of any length."""
    with launch_tiny(pipe._model.name, stages=1, prefill_chunk=4096) as alone:
        yield alone


def arm(session: memra_pp.Session, rows: int, layers: tuple[int, ...] = LAYERS) -> DflashTapSink:
    session.dflash_taps = sink = DflashTapSink.armed(layers, session._pipe.cfg.n_embd, rows)
    return sink


def tapped(pipe: memra_pp.Pipeline, tokens: list[int], layers: tuple[int, ...] = LAYERS) -> Array:
    """The taps of tokens fed in one step."""
    with pipe.open(tokens, max_new_tokens=0) as s:
        sink = arm(s, len(tokens), layers)
        s.prefill()
        return sink.buf


def test_a_slot_holds_the_residual_of_its_layer(alone: memra_pp.Pipeline) -> None:
    """In whatever order and however often it is named; different layers hold different rows."""
    whole, n = tapped(alone, TOKENS), alone.cfg.n_embd
    for slot, layer in enumerate(LAYERS):
        np.testing.assert_array_equal(whole[:, slot * n : (slot + 1) * n], tapped(alone, TOKENS, (layer,)))
    assert len({whole[:, slot * n : (slot + 1) * n].tobytes() for slot in range(5)}) == 4 and np.abs(whole).min(1).all()


@pytest.mark.parametrize("layers", [LAYERS, (3,), (1, 1), (5, 4, 3, 2, 1, 0), ()], ids=str)
@pytest.mark.parametrize("all_logits", [False, True])
def test_stages_and_steps_do_not_matter(
    pipe: memra_pp.Pipeline, alone: memra_pp.Pipeline, layers: tuple[int, ...], all_logits: bool
) -> None:
    wanted = tapped(alone, TOKENS, layers)
    with pipe.open(TOKENS[:30], max_new_tokens=40, speculate=5) as s:
        sink = arm(s, 62, layers)
        sink.base = 2
        s.prefill(all_logits=all_logits)
        s.decode(TOKENS[30])
        s.verify(TOKENS[31:37])
        s.extend(TOKENS[37:59])
        s.decode(TOKENS[59])
        assert sink.base == 62 and not sink.buf[:2].any()
        np.testing.assert_array_equal(sink.buf[2:], wanted)
        assert all(stage.cache.dflash_taps is None for stage in on_stages(s))
        sink.base, s.dflash_taps = 0, None
        assert_stands(s, [*TOKENS, 1], s.decode(1)[None])
        assert sink.base == 0


@pytest.mark.parametrize("mode", MODES)
def test_a_round_taps_what_it_feeds_and_not_what_it_replays(
    pipe: memra_pp.Pipeline, alone: memra_pp.Pipeline, mode: Any
) -> None:
    with pipe.open(TOKENS[:20], max_new_tokens=60, speculate=5, snapshots=2, recurrent=mode) as s:
        sink = arm(s, 200)
        token = int(s.prefill(want="argmax"))
        for right in (2, 4, 0, 3, 1):
            with pipe.open([*s.tokens, token], max_new_tokens=5) as other:
                drafts = [int(other.prefill(want="argmax"))]
                while len(drafts) < right:
                    drafts.append(int(other.decode(drafts[-1], want="argmax")))
            drafts = [*drafts[:right], *TOKENS[:2]][:5]
            fed, base, before = [*s.tokens, token, *drafts], sink.base, sink.buf.copy()
            done = s.round(drafts, next=token)
            assert right <= done.accepted and sink.base == base + 1 + len(drafts)
            np.testing.assert_array_equal(sink.buf[base : sink.base], tapped(alone, fed)[-1 - len(drafts) :])
            np.testing.assert_array_equal(sink.buf[:base], before[:base])
            assert not sink.buf[sink.base :].any()
            token = done.next
        stood, base = s.tokens, sink.base
        with s.snapshot() as snap:
            assert sink.base == base
            s.extend(TOKENS[:20])
            s.rollback(snap, 13)
            base = sink.base
            with s.snapshot():
                assert sink.base == base
            s.decode(9)
        np.testing.assert_array_equal(sink.buf[base : base + 1], tapped(alone, [*stood, *TOKENS[:13], 9])[-1:])
        assert sink.base == base + 1 and not sink.buf[sink.base :].any()


CALLS = {
    "prefill": (0, lambda s: s.prefill()),
    "prefill, all logits": (0, lambda s: s.prefill(all_logits=True)),
    "extend": (1, lambda s: s.extend(TOKENS[:20])),
    "verify": (1, lambda s: s.verify(TOKENS[:5])),
    "decode": (1, lambda s: s.decode(3)),
    "a round": (1, lambda s: s.round(TOKENS[:4], next=3)),
    "a round without drafts": (1, lambda s: s.round((), next=3)),
}
ROWS = {"extend": 20, "verify": 5, "decode": 1, "a round": 5, "a round without drafts": 1}

BAD_SINKS = {
    "too small": (CacheError, "arm a larger", {}),
    "of a layer that is not there": (InputError, "layer=40", {"layers": (0, 40)}),
    "of a layer below none": (InputError, "layer=-1", {"layers": (-1,)}),
    "of another width": (InputError, "wide", {"hidden": 16}),
    "of too many layers": (InputError, "256", {"layers": (1,) * 257}),
    "from a row before the first": (MemraError, "taps", {"base": -1}),
    "of fewer rows than it says": (MemraError, "taps", {"rows": 1}),
}


@pytest.mark.parametrize(("error", "says", "sink"), BAD_SINKS.values(), ids=list(BAD_SINKS))
@pytest.mark.parametrize("call", CALLS)
def test_a_sink_that_does_not_fit_is_refused_before_anything_is_fed(
    pipe: memra_pp.Pipeline, call: str, error: type[Exception], says: str, sink: dict[str, Any]
) -> None:
    prefilled, feed = CALLS[call]
    with pipe.open(TOKENS[:20], max_new_tokens=40, speculate=4) as s:
        if prefilled:
            s.prefill()
        rows = ROWS.get(call, 20)
        bad = DflashTapSink.armed(sink.get("layers", LAYERS), sink.get("hidden", pipe.cfg.n_embd), sink.get("rows", 100))
        bad.t, bad.base = 100, sink.get("base", 100 - rows + (not sink))
        held, before, traversals = (bad.base, bad.buf.copy()), image(s), pipe.chain.traversals
        s.dflash_taps = bad
        with pytest.raises(error, match=says):
            feed(s)
        assert image(s) == before and pipe.chain.traversals == traversals
        assert bad.base == held[0] and np.array_equal(bad.buf, held[1])
        good = arm(s, 100)
        good.base = 100 - rows
        feed(s)
        assert good.base == 100


def test_a_session_beside_a_tapped_one_is_not_tapped(pipe: memra_pp.Pipeline, alone: memra_pp.Pipeline) -> None:
    with pipe.open(TOKENS[:20], max_new_tokens=40) as s, pipe.open(TOKENS[20:40], max_new_tokens=40) as other:
        sinks = arm(s, 40, (1, 2)), arm(other, 40, (5,))
        s.prefill(), other.prefill()
        with pipe.open(TOKENS[:20], max_new_tokens=40) as plain:
            plain.prefill()
        np.testing.assert_array_equal(sinks[0].buf[:20], tapped(alone, TOKENS[:20], (1, 2)))
        np.testing.assert_array_equal(sinks[1].buf[:20], tapped(alone, TOKENS[20:40], (5,)))
        assert not sinks[0].buf[20:].any() and not sinks[1].buf[20:].any()


@pytest.mark.parametrize("stage", range(3))
def test_a_rebuild_taps_nothing_twice(alone: memra_pp.Pipeline, stage: int) -> None:
    with launch_tiny(alone._model.name, stages=3, prefill_chunk=7) as pipe:
        model = pipe.chain._workers[stage].model  # type: ignore[attr-defined]
        whole, faults = model.forward, [None, OSError("device lost"), None]

        def forward(*args: Any) -> Array:
            y = whole(*args)
            if faults and (fault := faults.pop(0)) is not None:
                raise fault
            return y

        model.forward = forward
        with pipe.open(TOKENS[:20], max_new_tokens=40, speculate=5) as s:
            sink = arm(s, 26)
            s.prefill()
            faults[:] = [OSError("device lost")]
            s.verify(TOKENS[20:26])
            assert not faults and sink.base == 26
            np.testing.assert_array_equal(sink.buf, tapped(alone, TOKENS[:26]))
        assert_empty(pipe, rebuilds=2)
