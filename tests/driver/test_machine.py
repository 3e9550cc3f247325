"""Sessions that open, go back and close in any order, beside ones that were only ever fed the tokens that stand: after every
call the same logits, the same bytes on every stage, and driver and stages of one mind."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from ringed import NARROW, WIDE, launch_tiny, some_tokens
from standing import assert_books_agree, assert_empty, assert_snapshot, assert_stands, image, on_stages, plain

import memra_pp
from memra_pp.errors import CacheError, CapacityExceeded, MemraError, RingLapped, SnapshotPinned

WINDOWS = [NARROW.window, WIDE.window]


@dataclass(eq=False)
class Taken:
    """A snapshot, where it was taken, whether it can still be used, and whether the stages have taken it."""

    snap: memra_pp.SessionSnapshot
    pos: int
    pin: bool
    live: bool = True
    told: bool = False


@dataclass(eq=False)
class Live:
    """A session, the tokens that should stand in it, and its snapshots, oldest first."""

    session: memra_pp.Session
    tokens: list[int]
    taken: list[Taken] = field(default_factory=list)

    @property
    def live(self) -> list[Taken]:
        return [t for t in self.taken if t.live]


class Sessions(RuleBasedStateMachine):
    """Some sessions of one pipeline. Numbers drawn are folded into what there is to choose from."""

    number = st.integers(0, 5)
    token = st.integers(0, 60)
    mode = st.sampled_from(["states", "replay"])
    share = st.sampled_from([0.5, 0.01, 0.7, 0.99, 0, 1, 2])

    room = 200

    def __init__(self, pipe: memra_pp.Pipeline) -> None:
        super().__init__()
        self.pipe, self.rebuilds = pipe, pipe.stats()["rebuilds"]
        self.open_ones: list[Live] = []

    def one(self, number: int) -> Live:
        return self.open_ones[number % len(self.open_ones)]

    def one_taken(self, number: int) -> tuple[Live, Taken]:
        """Each fourth time any snapshot, one that has ended too; else a live one, if there is one."""
        every = [(live, taken) for live in self.open_ones for taken in reversed(live.taken)]
        usable = [(live, taken) for live, taken in every if taken.live]
        among = every if number % 4 == 3 or not usable else usable
        return among[number // 4 % len(among)]

    @property
    def any_taken(self) -> bool:
        return any(live.taken for live in self.open_ones)

    def refused(self, live: Live, error: type[MemraError], call: partial[object]) -> None:
        """The call is refused, and has changed nothing anywhere."""
        before = image(live.session)
        with pytest.raises(error):
            call()
        assert image(live.session) == before
        assert live.session.tokens == live.tokens
        assert_books_agree(live.session)

    def fed(self, live: Live, tokens: list[int], answers: object) -> None:
        """No stage refused a step: a rebuild would have hidden it."""
        assert self.pipe.stats()["rebuilds"] == self.rebuilds
        live.tokens += tokens
        assert_books_agree(live.session)
        assert_stands(live.session, live.tokens, answers)
        for taken in live.live:
            if not taken.told:
                assert_snapshot(live.session, taken.snap._slot.index, live.tokens[: taken.pos])
                taken.told = True

    def expected(self, live: Live, rows: int) -> type[CacheError] | None:
        """What feeding `rows` rows is refused with."""
        return CapacityExceeded if len(live.tokens) + rows > live.session.shape.ctx else None

    def feed(self, live: Live, tokens: list[int], call: partial[np.ndarray]) -> None:
        error = self.expected(live, len(tokens))
        if error is None:
            self.fed(live, tokens, np.atleast_2d(call()))
        else:
            self.refused(live, error, call)

    @initialize(speculate=st.integers(2, 6), snapshots=st.integers(1, 3), mode=mode)
    def open_first(self, speculate: int, snapshots: int, mode: str) -> None:
        self.open([1, 2, 3], 3, speculate, snapshots, mode)

    @precondition(lambda self: len(self.open_ones) < 3)
    @rule(
        prompt=st.lists(token, min_size=1, max_size=40),
        first=st.integers(1, 40),
        speculate=st.integers(0, 6),
        snapshots=st.integers(1, 3),
        mode=mode,
    )
    def open(self, prompt: list[int], first: int, speculate: int, snapshots: int, mode: str) -> None:
        head, rest = prompt[:first], prompt[first:]
        asked = {"speculate": speculate, "recurrent": mode, "snapshots": snapshots}
        session = self.pipe.open(head, max_new_tokens=len(rest) + self.room, **asked)
        live = Live(session, [])
        self.open_ones.append(live)
        self.fed(live, head, session.prefill(all_logits=True))
        if rest:
            self.fed(live, rest, session.extend(rest)[None])

    @precondition(lambda self: self.open_ones)
    @rule(which=number, tokens=st.lists(token, min_size=1, max_size=25))
    def extend(self, which: int, tokens: list[int]) -> None:
        live = self.one(which)
        self.feed(live, tokens, partial(live.session.extend, tokens))

    @precondition(lambda self: self.open_ones)
    @rule(which=number, tokens=st.lists(token, min_size=4, max_size=7))
    def verify(self, which: int, tokens: list[int]) -> None:
        live = self.one(which)
        draft = tokens[: live.session.shape.speculate + 1]
        self.feed(live, draft, partial(live.session.decode, *draft) if len(draft) == 1 else partial(live.session.verify, draft))

    @precondition(lambda self: self.open_ones)
    @rule(which=number, pin=st.booleans())
    def snapshot(self, which: int, pin: bool) -> None:
        live = self.one(which)
        if len(live.live) == live.session.shape.snapshots:
            self.refused(live, CapacityExceeded, partial(live.session.snapshot, pin))
            self.end(live.live[0])
        before = self.pipe.chain.traversals
        snap = live.session.snapshot(pin)
        assert self.pipe.chain.traversals == before
        live.taken.append(Taken(snap, len(live.tokens), pin))
        assert snap.pos == len(live.tokens)
        assert_books_agree(live.session)

    @precondition(lambda self: self.any_taken)
    @rule(which=st.integers(0, 50), share=share)
    def rollback(self, which: int, share: float) -> None:
        self.go_back(*self.one_taken(which), share)

    def go_back(self, live: Live, taken: Taken, share: float) -> None:
        fed = len(live.tokens) - taken.pos
        accept = max(0, fed + 1 if share > 1 else min(fed, round(fed * share + 0.4)))
        call = partial(live.session.rollback, taken.snap, accept)
        rings = [layer for stage in on_stages(live.session) for layer in stage.cache.kv if layer is not None and layer.ring]
        if not taken.live or accept > fed:
            self.refused(live, CacheError, call)
        elif any(layer.base > layer.ring.view_start(taken.pos) for layer in rings):
            assert not taken.pin
            self.refused(live, RingLapped, call)
        else:
            self.back(live, taken, accept)

    def back(self, live: Live, taken: Taken, accept: int) -> None:
        before = self.pipe.chain.traversals
        live.session.rollback(taken.snap, accept)
        assert self.pipe.chain.traversals == before
        del live.tokens[taken.pos + accept :]
        for newer in live.taken[live.taken.index(taken) + 1 :]:
            newer.live = False
        assert live.session.tokens == live.tokens
        assert_books_agree(live.session)

    @precondition(lambda self: self.open_ones)
    @rule(
        which=number,
        pin=st.booleans(),
        tokens=st.lists(token, min_size=7, max_size=7),
        accept=st.integers(0, 7),
        more=st.lists(token, max_size=9),
        again=st.integers(0, 9),
    )
    def try_out(self, which: int, pin: bool, tokens: list[int], accept: int, more: list[int], again: int) -> None:
        """As a round by hand does; then perhaps other tokens, and back among those."""
        live = self.one(which)
        self.snapshot(which, pin)
        self.verify(which, tokens)
        taken = live.taken[-1]
        self.back(live, taken, min(accept, len(live.tokens) - taken.pos))
        if more:
            self.extend(which, more)
            self.back(live, taken, min(again, len(live.tokens) - taken.pos))

    @precondition(lambda self: self.any_taken)
    @rule(which=st.integers(0, 50))
    def close_snapshot(self, which: int) -> None:
        live, taken = self.one_taken(which)
        self.end(taken)
        assert_books_agree(live.session)

    def end(self, taken: Taken) -> None:
        taken.snap.close()
        taken.live = False

    @precondition(lambda self: self.open_ones)
    @rule(which=number, first=token, right=st.integers(0, 6), then=st.lists(token, min_size=2, max_size=6))
    def round(self, which: int, first: int, right: int, then: list[int]) -> None:
        """The drafts are right at first, then anything."""
        live = self.one(which)
        most = live.session.shape.speculate
        drafts = [*self.greedy([*live.tokens, first], right % (most + 1)), *then][:most]
        call = partial(live.session.round, drafts, next=first)
        error = self.expected(live, 1 + len(drafts))
        if error is None and drafts and len(live.live) == live.session.shape.snapshots:
            self.refused(live, CapacityExceeded, call)
            self.end(live.live[0])
        if error is not None:
            self.refused(live, error, call)
            return
        done = call()
        with plain(self.pipe, [*live.tokens, first, *drafts]) as (_, rows):
            best = rows[len(live.tokens) :].argmax(-1).tolist()
        accepted = next((i for i, draft in enumerate(drafts) if best[i] != draft), len(drafts))
        assert (done.accepted, done.next, done.rows.tolist()) == (accepted, best[accepted], best)
        self.fed(live, [first, *drafts[:accepted]], None)

    def greedy(self, tokens: list[int], n: int) -> list[int]:
        made: list[int] = []
        with self.pipe.open(tokens, max_new_tokens=n) as session:
            best = session.prefill(want="argmax")
            while len(made) < n:
                made.append(int(best))
                best = session.decode(made[-1], want="argmax")
        return made

    @precondition(lambda self: len(self.open_ones) > 1)
    @rule(which=number)
    def close(self, which: int) -> None:
        live = self.one(which)
        live.session.close()
        self.open_ones.remove(live)

    def teardown(self) -> None:
        """One token more tells every stage what it is owed."""
        try:
            for live in self.open_ones:
                if self.expected(live, 1) is None:
                    self.fed(live, [7], live.session.decode(7)[None])
        finally:
            for live in self.open_ones:
                live.session.close()
        assert_empty(self.pipe, self.rebuilds)


class LongSessions(Sessions):
    """The same, with thousands of rows at a time: rings move, pinned rows stay, others are lapped."""

    room = 19_000

    def expected(self, live: Live, rows: int) -> type[CacheError] | None:
        if (error := super().expected(live, rows)) is not None:
            return error
        pinned = min((t.pos for t in live.live if t.pin), default=None)
        for window in WINDOWS:
            held = min(live.session.shape.ctx, window + 4127)
            if pinned is not None and len(live.tokens) + rows - max(0, pinned - window + 1) // 32 * 32 > held:
                return SnapshotPinned
        return None

    @rule(which=Sessions.number, rows=st.one_of(st.integers(1, 5000), st.integers(3900, 4200)))
    def leap(self, which: int, rows: int) -> None:
        live, tokens = self.one(which), some_tokens(rows)
        self.feed(live, tokens, partial(live.session.extend, tokens))

    @precondition(lambda self: self.open_ones)
    @rule(
        which=Sessions.number,
        pin=st.booleans(),
        rows=st.one_of(st.integers(1, 4200), st.integers(4000, 6000)),
        share=Sessions.share,
    )
    def leap_from_a_snapshot(self, which: int, pin: bool, rows: int, share: float) -> None:
        self.snapshot(which, pin)
        self.leap(which, rows)
        live = self.one(which)
        self.go_back(live, live.taken[-1], share)


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much]


@pytest.mark.parametrize(("name", "examples"), [("hybrid", 30), ("gemma3_tiny", 30), ("ringed", 50)])
def test_any_sequence_of_calls_leaves_what_plain_feeding_leaves(name: str, examples: int) -> None:
    """Steps are short, so that replays are longer."""
    with launch_tiny(name, stages=3, prefill_chunk=16) as pipe:
        run_state_machine_as_test(
            partial(Sessions, pipe),
            settings=settings(max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=QUIET),
        )


@pytest.mark.parametrize("chunk", [512, 4096])
def test_so_it_does_while_rings_move(chunk: int) -> None:
    with launch_tiny("ringed", stages=2, prefill_chunk=chunk) as pipe:
        run_state_machine_as_test(
            partial(LongSessions, pipe),
            settings=settings(max_examples=20, stateful_step_count=25, deadline=None, suppress_health_check=QUIET),
        )
