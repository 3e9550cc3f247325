"""A model with an MTP block: its cache is kept on the last stage, no forward runs it, and nothing else changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ringed import DATA, launch_tiny, some_tokens
from standing import assert_books_agree, assert_empty, assert_snapshot, assert_stands, on_stages

import memra_pp
from memra_pp.cache import KvPolicy, slab_bytes, stage_layout

MODES = ["replay", "states"]
GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())
TOKENS = some_tokens(60)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The tiny hybrid with one MTP block in its config; the weights are the same."""
    config = json.loads((DATA / "hybrid" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    (tmp_path / "model.safetensors").symlink_to(DATA / "hybrid" / "model.safetensors")
    return tmp_path


def launch(model: Path, **options: Any) -> memra_pp.Pipeline:
    return memra_pp.launch(model, stages=3, backend="local", policy=KvPolicy(), threads=1, prefill_chunk=8, **options)


@pytest.mark.parametrize("asked", [{}, {"snapshots": 3}, {"speculate": 4, "recurrent": "states"}], ids=str)
def test_the_last_stage_allocates_what_is_planned_for_the_block(model: Path, asked: dict[str, Any]) -> None:
    held = {}
    for mtp in (True, False):
        with launch(model, mtp=mtp) as pipe:
            assert pipe.cfg.n_layer - pipe.cfg.n_trunk == mtp
            with pipe.open(TOKENS[:20], max_new_tokens=40, **asked) as s:
                stages = pipe.stats()["stages"]
                assert all(stage["planned_bytes"] == stage["allocated_bytes"] for stage in stages)
                held[mtp] = [stage["allocated_bytes"] for stage in stages]
                assert [("kv", 8) in kv_layers(stage.cache) for stage in on_stages(s)] == [False, False, mtp]
                block = [a for a in stage_layout(pipe.cfg, pipe.fence, 2, s.shape.ctx, pipe.policy) if a.layer == 8]
            assert_empty(pipe)
            if mtp:
                bytes_of_block = slab_bytes(block)
    assert [a - b for a, b in zip(held[True], held[False], strict=True)] == [0, 0, bytes_of_block] and bytes_of_block > 0


def kv_layers(cache: Any) -> list[tuple[str, int]]:
    return [("kv", il) for il, layer in enumerate(cache.kv) if layer is not None]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("accept", [0, 1, 3, 5])
def test_snapshots_lead_where_they_should(model: Path, mode: Any, accept: int) -> None:
    """The block's rows are never written: its length stays 0."""
    with launch(model) as pipe:
        with pipe.open(TOKENS[:20], max_new_tokens=40, speculate=5, snapshots=2, recurrent=mode) as s:
            s.prefill()
            snap = s.snapshot()
            s.verify(TOKENS[20:25])
            s.rollback(snap, accept)
            s.snapshot()
            assert_stands(s, TOKENS[: 21 + accept], s.decode(TOKENS[20 + accept])[None])
            assert_snapshot(s, 1, TOKENS[: 20 + accept])
            s.rollback(snap, 1)
            assert_stands(s, TOKENS[:30], s.extend(TOKENS[21:30])[None])
            assert_books_agree(s)
            block = on_stages(s)[-1].cache.kv[8]
            assert block is not None and (block.len, block.len_d.tolist()) == (0, [0])
        assert_empty(pipe)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mtp", [True, False])
def test_the_text_is_the_one_without(model: Path, mtp: bool, mode: Any) -> None:
    with launch_tiny("hybrid", stages=1) as pipe:
        text = list(pipe.generate(TOKENS[:20], max_new_tokens=30, sampling=GREEDY))
    with launch(model, mtp=mtp) as pipe:
        draft = memra_pp.Draft(k=3, by=lambda tokens, k: [*text[len(tokens) - 20 :][: k - 1], 5], recurrent=mode)
        for by in (None, draft):
            assert list(pipe.generate(TOKENS[:20], max_new_tokens=30, sampling=GREEDY, draft=by)) == text
        assert 0 < pipe.stats()["accepted"] < pipe.stats()["drafted"]


def test_a_model_with_the_block_drafts_for_itself(model: Path) -> None:
    """The drafter leaves the block out."""
    with launch(model) as pipe:
        text = list(pipe.generate(TOKENS[:20], max_new_tokens=20, sampling=GREEDY))
        assert list(pipe.generate(TOKENS[:20], max_new_tokens=20, sampling=GREEDY, draft=memra_pp.Draft(k=4, by=model))) == text
        assert pipe.stats()["accepted"] == pipe.stats()["drafted"] > 0
        assert pipe._drafting._model(model).cfg.n_layer == pipe.cfg.n_trunk
