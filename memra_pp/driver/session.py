"""`Session`: one sequence's tokens through the pipeline. What goes in are token ids, what comes back are logits rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from ..admission import Request, SessionShape
from ..cache import DflashTapSink
from ..errors import StageError
from ..models.protocol import Array
from .calls import Calls, Generation, Round, SessionSnapshot
from .sampling import Sampler, SamplingParams
from .session_file import to_write
from .speculation.drafters import Draft
from .waits import stream
from .work import Steps

if TYPE_CHECKING:
    from .pipeline import Pipeline

T = TypeVar("T")


class Session:
    """A sequence on every stage. Open one with `Pipeline.open`; use it as a context manager.

    A call that is refused (`InputError`, `CacheError`) has changed nothing. A step that a stage's device fails is made good by
    replaying the tokens once; if it fails again, `StageError`: close the session and open another.

    `want` of a call says what is answered for a row: its `logits` (f32 `[n_vocab]`), their `argmax` (i32 `[]`), or `topk:n`
    (`[n]` with the fields `id`, i4, and `logit`, f4, best first). Only that crosses the lanes.

    `dflash_taps`, when set, is a sink that every forward fills: the residual rows of the tokens fed, from row `base` on, which
    moves on with them.
    """

    def __init__(self, pipe: Pipeline, request: Request, calls: Calls) -> None:
        self.id, self.request = request.session, request
        self._pipe, self._calls = pipe, calls

    @property
    def shape(self) -> SessionShape:
        """What it was opened for."""
        return self._calls.shape

    @property
    def dflash_taps(self) -> DflashTapSink | None:
        """The sink that every forward fills, if any."""
        return self._calls.taps

    @dflash_taps.setter
    def dflash_taps(self, sink: DflashTapSink | None) -> None:
        self._calls.taps = sink

    @property
    def tokens(self) -> list[int]:
        """The tokens fed and not rolled back, oldest first."""
        return list(self._calls.books.tokens)

    @property
    def pos(self) -> int:
        """How many they are."""
        return self._calls.books.plan.pos

    @property
    def last_logits(self) -> Array | None:
        """The last row's logits, f32 `[n_vocab]`; None if they were not asked for, or a rollback went behind it."""
        return self._calls.last_logits

    @property
    def drafts_possible(self) -> int:
        """The most drafts that fit in the next round, as its base, the context and the rings allow."""
        return self._calls.drafts_possible()

    def prefill(self, all_logits: bool = False, want: str = "logits") -> Array:
        """Feeds the prompt, in chunks; the answer for its last row, f32 `[n_vocab]`, or for all, `[len(prompt), n_vocab]`.

        Raises:
            InputError: it was fed already, or all logits are more than 4 GiB.
            StageError: a stage failed.
        """
        return self._run(self._calls.prefill(all_logits, want))

    def extend(self, tokens: Iterable[int], want: str = "logits") -> Array:
        """Feeds more tokens, in chunks: the next turn of a dialogue, say. The answer for the last row, f32 `[n_vocab]`.

        Raises:
            InputError: no tokens, or bad ones; nothing was fed.
            CacheError: they do not fit the session's context, or a live snapshot's rows; nothing was fed.
            StageError: a stage failed.
        """
        return self._run(self._calls.extend(tokens, want))

    def decode(self, token: int, want: str = "logits") -> Array:
        """Feeds one token; f32 `[n_vocab]`, the distribution after it. Raises as `extend`."""
        return self._run(self._calls.extend([token], want))

    def verify(self, tokens: Iterable[int], want: str = "logits") -> Array:
        """Feeds a draft in one step; f32 `[len(tokens), n_vocab]`, row `i` being the distribution after token `i`.

        All rows stand until `rollback` to a snapshot taken before.

        Raises:
            InputError: no tokens, bad ones, or more than `speculate + 1`; nothing was fed.
            CacheError: they do not fit the session's context, its rings or a live snapshot; nothing was fed.
            StageError: a stage failed.
        """
        return self._run(self._calls.verify(tokens, want))

    def snapshot(self, pin: bool = True) -> SessionSnapshot:
        """Takes a snapshot where the session stands.

        Costs no traversal: the stages take it in front of the next rows.

        A pinned one keeps the rows it needs: appends that would overwrite them are refused. One that is not pinned can be
        lapped, and then no longer restored.

        Raises:
            InputError: nothing has been fed yet, or `pin` is not a bool.
            CapacityExceeded: as many are live as the session was opened with.
        """
        return self._calls.snapshot(pin)

    def rollback(self, snap: SessionSnapshot, accept: int) -> None:
        """Stands at `snap.pos + accept` again, state and all; snapshots taken since `snap` have ended.

        Costs no traversal: the stages go back when the next rows come, replaying the accepted ones where the model has
        recurrent state and did not keep the state wanted.

        Raises:
            InputError: the snapshot is another session's, or `accept` is not an integer.
            RingLapped: rows it needs are overwritten: full re-prime required. Nothing has changed.
            CacheError: it has ended, or fewer than `accept` tokens were fed since. Nothing has changed.
        """
        self._calls.rollback(snap, accept)

    def round(
        self, drafts: Iterable[int], sampler: Sampler | SamplingParams | None = None, *, next: int | None = None
    ) -> Round:
        """One draft/verify round, in one traversal: feeds the token sampled last and `drafts` behind it, keeps the drafts that
        `sampler` would have sampled itself, rolls the others back, and samples the token after them.

        What is rolled back rides in front of the next step; so does its replay, which a round never lets grow.

        Args:
            drafts: at most `speculate` (see `drafts_possible`); none makes it a plain decode.
            sampler: how tokens are picked (None: greedily).
            next: the token to feed first (None: `next` of the round before).

        Raises:
            InputError: a bad token or draft, or no token to feed first: nothing was fed. Or the sampler failed: `next` was
                fed, and no draft stands.
            CacheError: the rows do not fit, or no snapshot is free for the round; nothing was fed.
            StageError: a stage failed.
        """
        return self._run(self._calls.round(drafts, sampler, next))

    def generate(
        self, max_new_tokens: int, sampling: SamplingParams | None = None, draft: Draft | None = None
    ) -> Iterator[int]:
        """Tokens after the prompt of a fresh session, one by one: see `Pipeline.generate`. `draft.k` may not exceed the
        session's `speculate`."""
        return self._stream(self._calls.generate(max_new_tokens, sampling, draft))

    def export(self, target: str | PathLike[str] | BinaryIO) -> None:
        """Writes the session to a file, from which `Pipeline.import_session` goes on, bit for bit, by stages cut elsewhere too.

        The session stays open. Its snapshots are not written. A path's file is there once it is whole.

        Args:
            target: a path, or a file to write.

        Raises:
            InputError: nothing has been fed yet, or the file cannot be written.
            StageError: a stage failed.
        """
        with to_write(target) as out:
            self._run(self._calls.export(out))

    def park(self) -> None:
        """Sets the session aside in this process's memory, and gives its bytes back on every stage, for others to use.

        Its snapshots end. Every call but `unpark`, `close` and `cancel` is an InputError then. Raises as `export`.
        """
        self._pipe.park(self)

    def unpark(self, timeout: float | None = None) -> None:
        """Takes a parked session up again, where it stood.

        Args:
            timeout: seconds to wait for bytes that others hold (None: not at all).

        Raises:
            InputError: it is not parked.
            AdmissionError: there is no room, or not in time; it stays parked.
            SessionCancelled: it was closed meanwhile.
            StageError: a stage failed.
        """
        self._pipe.unpark(self, timeout)

    def cancel(self) -> None:
        """Ends the call under way, from any thread, and every later one: they raise SessionCancelled. Others do not notice.
        Close the session then."""
        self._calls.cancel()

    def close(self) -> None:
        """Ends the call under way, if there is one, and gives the bytes back on every stage; closing twice is fine."""
        if self._calls.closed:
            return
        self._pipe.end_later(self)  # first of all, so that an interrupt finds it either open or ending
        self._calls.close()
        try:
            self._pipe.release(self)
        except StageError:
            if not self._pipe.chain.failed:
                raise

    def abandon(self) -> None:
        """Marks the session closed because its pipeline closes."""
        self._calls.closed = True

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def calls(self) -> Calls:
        """What its calls do, for a face that waits by other means."""
        return self._calls

    def _run(self, steps: Steps[T]) -> T:
        return self._pipe.run(steps)

    def _stream(self, tokens: Generation) -> Iterator[int]:
        """Keeps the session from being dropped while it generates."""
        yield from stream(tokens, self._pipe.scheduler.wait)
