"""`Batcher`: which entries make up the next micro-batch. Decisions only: it has no thread, no clock and no frame.

Up to as many micro-batches as there are stages are on their way, so that each stage works on another one, and one more while
nobody decodes. Sessions that decode are spread evenly over them. A piece of a prefill rides with decodes if it is short enough
not to slow them much, and no decode that waits sees more than one piece go before it. By themselves, pieces are packed into
what takes a stage about as long each time: the slowest micro-batch is what all stages wait for.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

from ..stage.frames import CLOSE, READ, SEAT, STEP, WRITE
from .work import Work

MAX_ENTRIES = 512
"""Entries of one frame."""
ALONE = (SEAT, READ, WRITE)
LEAST_PIECE, WHOLE_PIECE = 16, 128
"""Rows of the shortest piece of a prefill beside decodes, and most rows of one by itself where they take longer than `PIECE_S`:
fewer cost nearly as much. A prompt is cut evenly; one that has all stages to itself may be cut into half as many rows, so that
each stage has a piece."""
PIECE_S = 0.025
"""Time that a piece should take on a stage while nobody decodes: short beside a prompt, so that stages overlap."""
SLOWED = 2.0
"""How many times as long a step may take that carries a piece beside decodes."""
GRACE, MOST_GRACE_S = 0.25, 0.005
"""What part of a stage's time is waited, at most, for sessions just answered to come back, so that they stay together."""
LEARNED = 0.2
"""How much of what was seen last goes into an estimate that it raises; one that it lowers follows at once."""


class Batcher:
    """Entries that wait, and what is known of those on their way.

    Args:
        stages: how many micro-batches may be on their way.
        max_rows: most rows of one.
        max_bytes: most bytes that one takes of a frame.
    """

    def __init__(self, stages: int, max_rows: int, max_bytes: int) -> None:
        self._stages, self._max_rows, self._max_bytes = stages, max_rows, max_bytes
        self._control: deque[Work] = deque()
        self._decodes: deque[Work] = deque()
        self._prefills: deque[Work] = deque()
        self._flying: list[Sequence[Work]] = []
        self._put_off = 0
        self._answered: dict[int, float] = {}
        self._expected_at = -math.inf
        self._slow: set[int] = set()
        self._decode_s = self._row_s = 0.0
        self._now = 0.0

    def add(self, work: Work, now: float) -> None:
        """An entry that is to be sent. `now` is in seconds, as everywhere."""
        self._now, session = now, work.entry.session
        if work.entry.op == STEP:
            answered = self._answered.pop(session, None)
            if answered is not None:
                (self._slow.discard if now - answered <= self._grace else self._slow.add)(session)
            (self._prefills if work.prefill else self._decodes).append(work)
            return
        self._control.append(work)
        if work.entry.op == CLOSE:
            self._answered.pop(session, None)
            self._slow.discard(session)

    def take(self, now: float) -> list[Work]:
        """The entries to be sent now, as one frame; none if there are none, or others should come first."""
        if self._control:
            return self._controls()
        if len(self._decodes) == 1 and not (self._prefills or self._flying or self._answered or self._decodes[0].done()):
            batch = [self._decodes.popleft()]  # one session by itself: nothing to weigh
            self._flying.append(batch)
            return batch
        if len(self._flying) >= self._most_flying(now):
            return []
        self._drop_withdrawn()
        if not (self._decodes or self._prefills):
            return []
        batch = self._next(now)
        if batch:
            self._flying.append(batch)
        return batch

    def back(self, works: Sequence[Work], stage_s: float, now: float) -> None:
        """A micro-batch has come back; `stage_s` is what the slowest stage took for it."""
        if works[0].entry.op != STEP:
            return
        self._now = now
        self._flying.remove(works)
        for work in works:
            if work.entry.logits:
                session = work.entry.session
                self._answered[session] = now
                if session not in self._slow:
                    self._expected_at = now
        self._learn(works, stage_s)

    def piece_rows(self, left: int) -> int:
        """How many rows the next piece should have, of a prefill of which `left` rows are left.

        Any thread may ask: what another one changes is not iterated over.
        """
        if self._decodes or self._flying_decodes() or self._now - self._expected_at < self._grace:
            rows = (SLOWED - 1) * self._decode_s / self._row_s if self._row_s and self._decode_s else 2.0 * LEAST_PIECE
        else:
            alone = self._prompts() < self._stages and self._stages > 1
            most = min(self._whole_piece, max(left / (2 * self._stages), WHOLE_PIECE / 2)) if alone else self._whole_piece
            rows = math.ceil(left / math.ceil(left / most))
        return min(left, self._max_rows, max(LEAST_PIECE, int(rows)))

    def held_s(self, now: float) -> float | None:
        """For how long entries wait for others, if they do."""
        expected = self._expected(now)
        if not expected or len(self._flying) >= self._most_flying(now) or not (self._decodes or self._prefills):
            return None
        return max(0.0, expected[-1] + self._grace - now)

    def clear(self) -> list[Work]:
        """Forgets what waits, which it returns, and what is on its way."""
        waiting = [*self._control, *self._decodes, *self._prefills]
        for queue in (self._control, self._decodes, self._prefills, self._flying, self._answered):
            queue.clear()
        return waiting

    def _controls(self) -> list[Work]:
        """The entries without rows that are first; a piece of a session is by itself."""
        batch = [self._control.popleft()]
        while batch[0].entry.op not in ALONE and self._control and len(batch) < MAX_ENTRIES:
            if self._control[0].entry.op in ALONE:
                break
            batch.append(self._control.popleft())
        return batch

    @property
    def _grace(self) -> float:
        return min(MOST_GRACE_S, GRACE * self._decode_s)

    def _expected(self, now: float) -> list[float]:
        """When those sessions were answered that should be back any moment, the latest first."""
        out = []
        for session, answered in reversed(self._answered.items()):
            if now - answered >= self._grace:
                break
            if session not in self._slow:
                out.append(answered)
        return out

    def _next(self, now: float) -> list[Work]:
        """What goes now. An entry that must be alone, once it is first in its queue, waits until nothing is on its way."""
        if any(work.alone for batch in self._flying for work in batch):
            return []
        lonely = next((queue for queue in (self._decodes, self._prefills) if queue and queue[0].alone), None)
        if lonely is None:
            return self._batch(now)
        return [] if self._flying else [lonely.popleft()]

    def _most_flying(self, now: float) -> int:
        """How many micro-batches may be on their way. While nobody decodes, one more than there are stages: whichever is done
        first has the next one there."""
        if self._stages == 1 or not self._prefills or self._decodes:
            return self._stages
        return self._stages + (not self._flying_decodes() and not self._expected(now))

    @property
    def _whole_piece(self) -> int:
        """Rows that take a stage `PIECE_S`, as far as that is known; by itself it has no other to keep busy."""
        if self._stages == 1:
            return self._max_rows
        rows = int(PIECE_S / self._row_s) if self._row_s else 0
        return min(max(rows, WHOLE_PIECE), self._max_rows)

    def _flying_decodes(self) -> int:
        return sum(not work.prefill for batch in tuple(self._flying) for work in batch)

    def _prompts(self) -> int:
        """How many sessions have pieces that wait or are on their way."""
        works = (*tuple(self._prefills), *(work for batch in tuple(self._flying) for work in batch))
        return len({work.entry.session for work in works if work.prefill})

    def _batch(self, now: float) -> list[Work]:
        passed = bool(self._decodes) and self._decodes[0].passed  # those that a piece has passed are the oldest
        if self._prefills and self._put_off >= self._patience and not passed:
            for work in self._decodes:
                work.passed = True
            return self._pieces(1, [])
        expected = len(self._expected(now))
        decoding = len(self._decodes) + self._flying_decodes() + expected
        share = math.ceil(decoding / self._stages)
        if expected and len(self._decodes) < share:
            return []
        batch = self._pick(self._decodes, share, [], self._max_rows)
        if not self._prefills:
            return batch
        if not batch:
            return self._pieces(1 if decoding else math.ceil(self._prompts() / self._stages), [])
        if self._short and self._decode_s and not self._decodes:
            return self._pieces(1, batch)
        self._put_off += 1
        return batch

    @property
    def _short(self) -> bool:
        """Whether the first piece that waits may ride with decodes: it takes not much time, and leaves room for them."""
        share = math.ceil((len(self._decodes) + self._flying_decodes()) / self._stages)
        return self._prefills[0].entry.rows <= min(self.piece_rows(self._max_rows), self._max_rows - share)

    @property
    def _patience(self) -> int:
        """How many micro-batches may leave without the first piece that waits: one that may ride should soon find a seat."""
        return 2 * self._stages if self._short else 1

    def _pieces(self, most: int, batch: list[Work]) -> list[Work]:
        riders = len(batch)
        batch = self._pick(self._prefills, most, batch, self._max_rows if riders else self._whole_piece)
        self._put_off = 0 if len(batch) > riders else self._put_off + 1
        return batch

    def _pick(self, queue: deque[Work], most: int, batch: list[Work], max_rows: int) -> list[Work]:
        """`batch` and at most `most` of a queue that go with it, oldest first, of at most `max_rows` rows together unless one
        has more. No session is there twice, and none is overtaken by a later entry of its own."""
        rows, n_bytes = sum(w.entry.rows for w in batch), sum(w.n_bytes for w in batch)
        seen, left = {w.entry.session for w in batch}, []
        most = min(most, MAX_ENTRIES) + len(batch)
        while queue and len(batch) < most and not queue[0].alone:
            work = queue.popleft()
            if work.done():
                continue
            entry = work.entry
            fits = rows + entry.rows <= max_rows and n_bytes + work.n_bytes <= self._max_bytes
            if entry.session not in seen and (fits or not batch):
                batch.append(work)
                rows, n_bytes = rows + entry.rows, n_bytes + work.n_bytes
            else:
                left.append(work)
            seen.add(entry.session)
            if rows >= max_rows:
                break
        queue.extendleft(reversed(left))
        return batch

    def _drop_withdrawn(self) -> None:
        """Those that are first in their queue; one behind them still counts, and is dropped when its turn comes."""
        for queue in (self._decodes, self._prefills):
            while queue and queue[0].done():
                queue.popleft()

    def _learn(self, works: Iterable[Work], stage_s: float) -> None:
        """A step takes some time however few rows it has, as one of decodes does, and then some for each row of a piece."""
        pieces = sum(work.entry.rows for work in works if work.prefill)
        if pieces:
            self._row_s = _estimate(self._row_s, max(stage_s - self._decode_s, stage_s / 10) / pieces)
        else:
            self._decode_s = _estimate(self._decode_s, stage_s)


def _estimate(known: float, seen: float) -> float:
    return seen if not known or seen < known else known + LEARNED * (seen - known)
