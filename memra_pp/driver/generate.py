"""The loop of a generation: plain decoding is a round without drafts. It yields tokens, and the outcomes it must wait for."""

from __future__ import annotations

import sys
import time
from contextlib import closing, nullcontext
from typing import TYPE_CHECKING

from ..errors import InputError, checked_int, require
from .sampling import Sampler, SamplingParams
from .speculation.drafters import Draft, DraftControl, Drafter, checked_drafts

if TYPE_CHECKING:
    from .calls import Calls, Generation
    from .pipeline import Pipeline


def generate(
    pipe: Pipeline, calls: Calls, max_new_tokens: int, sampling: SamplingParams | None, draft: Draft | None
) -> Generation:
    """Feeds the prompt of a fresh session, then gives out tokens one by one (see `Pipeline.generate`); a session that has
    generated goes on.

    Raises:
        InputError: a bad argument, or `draft.k` is more than the session's `speculate`.
    """
    sampler = Sampler(sampling)
    require(draft is None or isinstance(draft, Draft), InputError, "draft", draft, "a Draft, or None")
    most = checked_int(InputError, "max_new_tokens", max_new_tokens, 0, sys.maxsize)
    if draft is not None and draft.k > calls.shape.speculate:
        raise InputError(f"draft.k={draft.k}: this session was opened with speculate={calls.shape.speculate}; open with more")
    if draft is not None and not calls.shape.snapshots:
        raise InputError("drafts need a snapshot, and this session was opened with snapshots=0: open with one more")
    if sampler.params.top_k > pipe.cfg.n_vocab:
        raise InputError(f"top_k={sampler.params.top_k}: the vocabulary has {pipe.cfg.n_vocab} tokens; 0 stands for all")
    if not most:
        return
    ends, made = _Ends(pipe, sampler.params), 0
    with closing(_tokens(pipe, calls, most, sampler, draft)) as tokens:
        for item in tokens:
            if isinstance(item, int):
                if item in ends.ids:
                    return
                made += 1
                yield item
                if made == most or ends.reached(item):
                    return
            else:
                yield item


def _tokens(pipe: Pipeline, calls: Calls, most: int, sampler: Sampler, draft: Draft | None) -> Generation:
    """The tokens sampled, as long as there is room for their rows; of a session that has sampled, those behind the last one."""
    books = calls.books
    with nullcontext() if draft is None else pipe.drafter(draft, calls.shape.ctx) as drafter:
        before = calls.sampled() if books.tokens else None
        if before is None:
            answer = yield from calls.prefill(False, sampler.want)
            token = calls.pick(sampler, answer)
            yield token
        else:
            token = before
        if draft is not None and drafter is not None:
            left = most - (before is None)
            yield from _speculated(pipe, calls, left, sampler, DraftControl(draft.k), drafter, token)
        while books.plan.pos < calls.shape.ctx:
            token = (yield from calls.round((), sampler, token)).next
            yield token


def _speculated(
    pipe: Pipeline, calls: Calls, most: int, sampler: Sampler, control: DraftControl, drafter: Drafter, token: int
) -> Generation:
    """At most `most` tokens behind `token`, drafted and judged."""
    books, made = calls.books, 0
    while books.plan.pos < calls.shape.ctx:
        started = time.perf_counter()
        k = min(control.next_k(), calls.drafts_possible(), most - made - 1)
        drafts = _drafts(drafter, books.tokens, token, k, pipe.cfg.n_vocab)
        drafted = time.perf_counter()
        done = yield from calls.begin_round(drafts, sampler, token)
        control.record(len(drafts), done.accepted, 1 + len(drafts), time.perf_counter() - drafted, drafted - started)
        made += done.accepted + 1
        given = 0
        try:  # whoever takes the tokens may stop at any of them: the session then stands behind that one
            for token in (*drafts[: done.accepted], done.next):
                yield token
                given += 1
        finally:
            calls.end_round(done, min(given, done.accepted))


def _drafts(drafter: Drafter, tokens: list[int], token: int, k: int, n_vocab: int) -> list[int]:
    """At most `k` drafts behind the tokens fed and `token`. The text is copied for a drafter that is asked only."""
    return checked_drafts(drafter.propose([*tokens, token], k), k, n_vocab) if k > 0 else []


class _Ends:
    """What ends a generation: the ids that do, and the texts, looked for in the last tokens given out."""

    def __init__(self, pipe: Pipeline, sampling: SamplingParams) -> None:
        self.ids = pipe.cfg.eos_ids if sampling.eos_ids is None else frozenset(sampling.eos_ids)
        self._stop = sampling.stop
        self._tokenizer = pipe.tokenizer if self._stop else None
        self._tail: list[int] = []
        self._longest = max((4 * len(text) for text in self._stop), default=0)

    def reached(self, token: int) -> bool:
        """Whether `token` completes one of the texts."""
        if self._tokenizer is None:
            return False
        self._tail = [*self._tail[-self._longest :], token]  # a token is a byte at least, a character four at most
        text = self._tokenizer.decode(self._tail)
        return any(stop in text for stop in self._stop)
