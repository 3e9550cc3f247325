"""Where a session stands on every stage of a local pipeline, to the byte, and whether the driver's books say the same."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import numpy as np

import memra_pp
from memra_pp.cache import Cache, CacheSnapshot
from memra_pp.stage.session import StageSession


def on_stages(session: memra_pp.Session) -> list[StageSession]:
    """The session as each stage has it."""
    return [worker.sessions[session.id] for worker in session._pipe.chain._workers]  # type: ignore[attr-defined]


def digest(buffer: Any) -> str:
    return sha256(buffer).hexdigest()[:12]


def standing(cache: Cache) -> dict[str, Any]:
    """All that a forward may read at `cache.pos`, and the lengths."""
    found: dict[str, Any] = {"pos": cache.pos}
    for il, layer in enumerate(cache.kv):
        if layer is not None:
            start = layer.ring.view_start(cache.pos) if layer.ring else 0
            rows = layer.physical_rows(min(start, layer.len), min(cache.pos, layer.len))
            for name, plane, size in (("k", layer.k, layer.k_tok_bytes), ("v", layer.v, layer.v_tok_bytes)):
                found[f"{name} {il}"] = digest(plane[rows.start * size : rows.stop * size])
            found[f"len {il}"] = (layer.len, layer.len_d.tolist())
    for il, state in enumerate(cache.recur):
        if state is not None:
            found[f"conv {il}"], found[f"ssm {il}"] = digest(state.conv_state), digest(state.ssm_state)
    return found


def taken(snap: CacheSnapshot) -> dict[str, Any]:
    """All that a snapshot holds."""
    copies = {f"{name} {il}": digest(getattr(copy, name)) for il, copy in snap.states.items() for name in ("conv", "ssm")}
    return {"pos": snap.pos, "lens": snap.lens, **copies}


def image(session: memra_pp.Session) -> list[Any]:
    """Everything an entry may change on any stage: every byte of every buffer, names and books."""
    found = []
    for stage in on_stages(session):
        cache = stage.cache
        layers = [layer for layer in (*cache.kv, *cache.recur) if layer is not None]
        kv = [(layer.len, layer.base) for layer in cache.kv if layer is not None]
        live = [(mark.name, mark.pos, mark.pin) for mark in cache.plan.live]
        slots = [(taken(snap), snap.mark and (snap.mark.name, snap.mark.pin)) for snap in stage.slots]
        found.append((stage.seq, stage.fault, stage.broken, cache.pos, kv, live, slots))
        found.append([digest(buffer) for layer in layers for buffer in layer.buffers()])
    return found


def assert_same(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    different = [name for name in wanted if given.get(name) != wanted[name]]
    assert not different and given.keys() == wanted.keys(), f"not the same: {different}"


@contextmanager
def plain(pipe: memra_pp.Pipeline, tokens: list[int], snapshots: int = 0) -> Iterator[tuple[memra_pp.Session, Any]]:
    """A session that is only fed `tokens`, and all its logits rows."""
    with pipe.open(tokens, max_new_tokens=16, snapshots=snapshots) as session:
        yield session, session.prefill(all_logits=True)


def assert_stands(session: memra_pp.Session, tokens: list[int], answers: Any = None) -> None:
    """The session stands on every stage where one stands that is only fed `tokens`; `answers` are the last of its rows."""
    assert session.tokens == tokens and session.pos == len(tokens)
    with plain(session._pipe, tokens) as (other, rows):
        if answers is not None:
            np.testing.assert_array_equal(answers, rows[len(rows) - len(answers) :])
        if session._calls.books.owed is None:
            for mine, its in zip(on_stages(session), on_stages(other), strict=True):
                assert_same(standing(mine.cache), standing(its.cache))


def assert_snapshot(session: memra_pp.Session, index: int, tokens: list[int]) -> None:
    """A snapshot that the stages were told of holds what one holds that is taken after feeding `tokens`."""
    with plain(session._pipe, tokens, snapshots=1) as (other, _):
        other.snapshot()
        other.decode(0)
        for mine, its in zip(on_stages(session), on_stages(other), strict=True):
            assert_same(taken(mine.slots[index]), taken(its.slots[0]))


def assert_books_agree(session: memra_pp.Session) -> None:
    """What the driver has written down of a session is what every stage has, but for what it has not told them yet."""
    books = session._calls.books
    bases = {(ring.rows, ring.window): ring.base for ring in books.plan._rings}
    told = [slot for slot in books.slots if slot is not None and slot not in books.fresh]
    user = [(slot.index, slot.mark.pos, slot.mark.pin) for slot in told]
    known = [(m.pos, m.pin) for m in books.plan.live if not any(m is slot.mark for slot in books.fresh)]
    for stage in on_stages(session):
        cache, n_trunk = stage.cache, session._pipe.cfg.n_trunk
        rings = [layer.ring for layer in cache.kv[:n_trunk] if layer is not None and layer.ring is not None]
        assert all(ring.base == bases[ring.rows, ring.window] for ring in rings)
        kept = enumerate(stage.slots[: len(books.slots)])
        live = [(i, s.mark) for i, s in kept if s.mark in cache.plan.live and not books.drop >> i & 1]
        assert [(i, mark.pos, mark.pin) for i, mark in live] == user
        in_order = [(m.pos, m.pin) for m in cache.plan.live if any(m is mark for _, mark in live)]
        assert in_order == known
        assert stage.seq == books.seq and not stage.broken
        assert cache.pos == books.plan.pos or books.owed is not None


def assert_empty(pipe: memra_pp.Pipeline, rebuilds: int | None = 0) -> None:
    """Nothing is held. A rebuild that no device asked for hides a step that a stage refused."""
    stats = pipe.stats()
    assert stats["sessions"] == 0 and stats["rebuilds"] == (stats["rebuilds"] if rebuilds is None else rebuilds)
    assert all(stage["allocated_bytes"] == stage["planned_bytes"] == 0 for stage in stats["stages"])
