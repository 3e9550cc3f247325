"""`Pipeline`: a launched model. Opens sessions, generates, tells how its stages fare, and closes everything."""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from functools import cached_property
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeVar

from ..admission import Admission, Request, SessionShape
from ..cache.sizing import Recurrent
from ..errors import InputError, checked_int
from ..models.tokenizer import Tokenizer, load_tokenizer
from ..stage.frames import MAX_BODY_BYTES
from ..stage.worker import MAX_SESSIONS
from .batcher import Batcher
from .calls import Calls
from .chain import Chain
from .door import MAX_WAIT_S, Door, checked_wait
from .figures.report import Report
from .figures.trace import chrome_trace
from .figures.watcher import Watcher
from .many import Ask, Many
from .opener import Opener
from .sampling import SamplingParams
from .scheduler import Scheduler
from .session import Session
from .session_file import Reader, fingerprint, opened
from .shapes import asked_shape, checked_tenant, most_drafts
from .speculation.drafters import Draft, Drafter
from .speculation.drafting import Drafting
from .tokens import checked_prompt
from .waits import run, run_async
from .work import Steps

T = TypeVar("T")
MANY = 64
"""Sessions that `generate_many` keeps open."""


class Pipeline:
    """Stages that are loaded and wired. `with memra_pp.launch(...) as pipe:` leaves nothing running behind it.

    Attributes:
        cfg: the model's config.
        fence: where it is cut, `(0, c1, ..., n_trunk)`.
        policy: K/V formats and ring switch.
        max_ctx: the most rows of a session.
        default_max_new_tokens: what a session is charged for that does not say how many tokens it wants.
        prefill_chunk: most rows in one step.
        step_timeout: seconds after which a step that has not come back means that a stage hangs.
    """

    def __init__(
        self,
        model: Path,
        chain: Chain,
        admission: Admission,
        default_max_new_tokens: int,
        prefill_chunk: int,
        step_timeout: float,
        cut: Mapping[str, Any],
    ) -> None:
        first = chain.specs[0]
        self.cfg, self.fence, self.policy = first.cfg, first.fence, first.policy
        self.max_ctx = admission.limit
        self.default_max_new_tokens = default_max_new_tokens
        self.prefill_chunk = prefill_chunk
        self.step_timeout = step_timeout
        self.chain = chain
        self._model = model
        self._most_drafts = most_drafts(prefill_chunk, self.cfg.n_vocab)
        self._names = [str(spec) for spec in chain.specs]
        self._door = Door(admission)
        self.scheduler = Scheduler(chain, Batcher(chain.overlap, prefill_chunk, MAX_BODY_BYTES // 2))
        self._opener = Opener(chain, self.scheduler, self._door, step_timeout)
        weakref.finalize(self, self.scheduler.stop).atexit = False
        self._ids = itertools.count(1)
        self._sessions: weakref.WeakValueDictionary[int, Session] = weakref.WeakValueDictionary()
        self._drops: dict[int, weakref.finalize[[int], Session]] = {}
        self._drafting = Drafting(self.cfg.n_vocab)
        self.report = Report(cut, chain, self.scheduler, self._door, self._opener)
        self.watchers: list[Watcher] = []

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ConfigError: the model's files hold none that can be read.
        """
        return load_tokenizer(self._model)

    def open(
        self,
        prompt: Iterable[int],
        *,
        max_new_tokens: int | None = None,
        speculate: int = 0,
        recurrent: Recurrent = "replay",
        snapshots: int = 1,
        timeout: float | None = None,
        tenant: str = "",
    ) -> Session:
        """Opens a session for a prompt of token ids: every stage allocates its share, or none does.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: rows to allow for after the prompt (None: the pipeline's default); the context is clamped to
                `max_ctx`.
            speculate: most drafts of a round; a `verify` takes one token more.
            recurrent: how a rollback finds recurrent state: `replay` or `states`.
            snapshots: most live snapshots at a time.
            timeout: seconds to wait for bytes that others hold, first come, first served (None: not at all).
            tenant: whose session it is, where `launch` caps what one tenant may hold.

        Raises:
            InputError: a bad prompt or argument, or a prompt longer than the context.
            AdmissionError: a stage's device cannot hold its share, or not in time; the message names it and the bytes, and
                `verdict` says whether and when to try again.
            StageError: a stage failed.
        """
        session, request, wait_s = self._asked(prompt, max_new_tokens, speculate, recurrent, snapshots, timeout, tenant)
        with self._kept(session):
            self._opener.open(request, wait_s)
        return session

    def open_wanted(self, prompt: Iterable[int], ask: Ask, wanted: Callable[[], bool]) -> Session:
        """`open` for `ask`, which waits for bytes in its turn as long as the session is `wanted`.

        Raises:
            SessionCancelled: it was wanted no more.
        """
        session, request, wait_s = self._asked(prompt, timeout=MAX_WAIT_S, **ask.options())
        with self._kept(session):
            self._opener.open(request, wait_s, wanted)
        return session

    async def open_async(
        self,
        prompt: Iterable[int],
        *,
        max_new_tokens: int | None = None,
        speculate: int = 0,
        recurrent: Recurrent = "replay",
        snapshots: int = 1,
        timeout: float | None = None,
        tenant: str = "",
    ) -> Session:
        """`open` for a task: it waits without a thread, and one that is cancelled leaves the queue. Raises as `open`."""
        session, request, wait_s = self._asked(prompt, max_new_tokens, speculate, recurrent, snapshots, timeout, tenant)
        with self._kept(session):
            await self._opener.open_async(request, wait_s)
        return session

    def import_session(
        self, source: str | PathLike[str] | BinaryIO, *, timeout: float | None = None, tenant: str = ""
    ) -> Session:
        """Opens a session where one stands that `Session.export` has written, by any number of stages of this model.

        Args:
            source: the path of its file, or a file to read.
            timeout, tenant: as of `open`.

        Raises:
            InputError: the file is of another model or policy, of a later version, cut or damaged; nothing was allocated.
            AdmissionError, StageError: as `open`.
        """
        with opened(source) as file:
            reader = self.reader(file)
            session, request, wait_s = self._requested(reader.header.tokens, reader.shape, timeout, tenant)
            with self._kept(session):
                self._opener.open(request, wait_s)
            self._fill(session, reader)
        return session

    def park(self, session: Session) -> None:
        """See `Session.park`."""
        self.run(session.calls.park())
        self._opener.close(session.id)

    def unpark(self, session: Session, timeout: float | None) -> None:
        """See `Session.unpark`."""
        wait_s = checked_wait(timeout)
        with session.calls.unparking() as held:
            reader = self.reader(io.BytesIO(held))
            self._opener.close(session.id)  # where an interrupt has cut a call like this one short
            self._opener.open(session.request, wait_s)
            self._fill(session, reader)

    async def unpark_async(self, session: Session, timeout: float | None) -> None:
        """`unpark` for a task: it waits for bytes without a thread."""
        wait_s = checked_wait(timeout)
        with session.calls.unparking() as held:
            reader = await asyncio.to_thread(self.reader, io.BytesIO(held))
            await asyncio.to_thread(self._opener.close, session.id)
            await self._opener.open_async(session.request, wait_s)
            await self._fill_async(session, reader)

    async def import_async(self, source: str | PathLike[str] | BinaryIO, timeout: float | None, tenant: str) -> Session:
        """`import_session` for a task."""
        with contextlib.ExitStack() as stack:
            file = await asyncio.to_thread(stack.enter_context, opened(source))
            reader = await asyncio.to_thread(self.reader, file)
            session, request, wait_s = self._requested(reader.header.tokens, reader.shape, timeout, tenant)
            with self._kept(session):
                await self._opener.open_async(request, wait_s)
            await self._fill_async(session, reader)
        return session

    def reader(self, file: BinaryIO) -> Reader:
        """A session's file, if it is one that this pipeline can take up. Raises InputError."""
        reader = Reader(file, self.cfg, self.policy, self.fingerprint, self.max_ctx)
        checked_int(InputError, "the session's speculate", reader.shape.speculate, 0, self._most_drafts)
        return reader

    def _fill(self, session: Session, reader: Reader) -> None:
        """Has a session that was just opened stand where the file's does, or gives its bytes back."""
        try:
            self.run(session.calls.adopt(reader))
        except BaseException:
            self._opener.close(session.id)
            raise

    async def _fill_async(self, session: Session, reader: Reader) -> None:
        """`_fill` for a task. One that is cancelled does not keep its loop waiting for the stages."""
        try:
            await self.run_async(session.calls.adopt(reader))
        except BaseException:
            self._opener.end_later(session.id)
            await asyncio.shield(asyncio.to_thread(self._opener.after_call))
            raise

    @cached_property
    def fingerprint(self) -> str:
        """What tells this model from another, in the files of sessions."""
        return fingerprint(self._model, self.cfg)

    def generate(
        self,
        prompt: Iterable[int],
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        draft: Draft | None = None,
    ) -> Iterator[int]:
        """Tokens after a prompt, one by one, until `max_new_tokens`, the context's end, a text of `sampling.stop` (its last
        token is given out) or one of `sampling.eos_ids` (default: the model's own), which is not.

        Args:
            prompt: token ids, at least one.
            max_new_tokens: most tokens to give out (None: the pipeline's default).
            sampling: how tokens are picked (None: greedily).
            draft: how to speculate (None: not at all). It changes the time a text takes, never the text.

        Raises:
            InputError, AdmissionError, ConfigError, StageError: as `open`, and for a drafter that cannot be used, when the
                first token is asked for.
        """
        ask = self.ask(max_new_tokens, sampling, draft)
        with self.open(prompt, **ask.options()) as session:
            yield from session.generate(*ask)

    def generate_many(
        self,
        prompts: Iterable[Iterable[int]],
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        draft: Draft | None = None,
        concurrency: int = MANY,
    ) -> Generator[tuple[int, int], None, None]:
        """`generate` for many prompts at once: pairs of a prompt's index and its next token, as they come.

        Each text is the one that `generate` gives, whatever runs beside it. At most `concurrency` sessions are open, fewer
        where no more fit, and no more prompts are taken than that; nothing runs ahead of whoever takes the tokens by more than
        a step.

        Args:
            prompts: token ids, at least one each; may be endless.
            max_new_tokens, sampling, draft: of every prompt, as in `generate`.
            concurrency: most sessions at a time.

        Raises:
            InputError, AdmissionError, ConfigError, StageError: as `generate`, of any prompt; then all are ended.
        """
        return self.many(prompts, self.ask(max_new_tokens, sampling, draft), concurrency).run()

    def many(self, prompts: Iterable[Iterable[int]], ask: Ask, concurrency: int) -> Many:
        """`generate_many` before it runs. Raises InputError for a bad `concurrency`."""
        return Many(self, prompts, ask, checked_int(InputError, "concurrency", concurrency, 1, MAX_SESSIONS))

    def ask(self, max_new_tokens: int | None, sampling: SamplingParams | None, draft: Draft | None) -> Ask:
        """How a prompt is to be continued, with this pipeline's defaults."""
        return Ask(self.default_max_new_tokens if max_new_tokens is None else max_new_tokens, sampling, draft)

    def drafter(self, draft: Draft, ctx: int) -> contextlib.AbstractContextManager[Drafter]:
        """The drafter of one generation of at most `ctx` rows. A drafting model is loaded once, and stays with the pipeline.

        Raises:
            ConfigError: the drafting model cannot be used.
        """
        return self._drafting.drafter(draft, ctx)

    def run(self, steps: Steps[T]) -> T:
        """Runs a session's call in this thread."""
        done = run(steps, self.scheduler.wait)
        if self._opener.ending:
            self._opener.after_call()
        return done

    async def run_async(self, steps: Steps[T]) -> T:
        """Runs a session's call in this task."""
        done = await run_async(steps)
        if self._opener.ending:
            await asyncio.to_thread(self._opener.after_call)
        return done

    def stats(self) -> dict[str, Any]:
        """What the pipeline and each stage have done, and the bytes of every device.

        `traversals` counts frames through the chain, of which `rounds` were rounds, with `drafted` drafts and `accepted` of
        them; `tokens` were sampled by rounds and generations; `hop_s` seconds were spent in `hops` ways from stage to stage,
        the first from here and the last back; `rebuilds` counts replays of a session's tokens after a stage's device had
        failed or a stage was lost, and `recoveries` such losses. `devices` has each one's budget, what is reserved, allocated,
        learned and free of it, and the largest free block, in bytes; `admission` counts verdicts, `reasons` for those that did
        not admit, and those who wait. `cut` says what cut the model, `by` `even`, `bytes`, `cuts` or `time:` with a kind of
        work; then also what was measured of both kinds: the `fence` that is best for each, and the seconds `stage_s` of its
        stages, `embed_s`, `layers_s` and `head_s`.

        Raises:
            StageError: the pipeline is closed, or a stage does not answer.
        """
        self._opener.finish()
        return self.report.stats()

    def health(self) -> dict[str, Any]:
        """Whether the pipeline serves, at once and without asking a stage.

        `ready`; `state`, one of `ready`, `recovering`, `failed` and `closed`; the `cause` of what is broken, which names stage,
        layers and device; `epoch`, which counts how often the stages were wired; how many `recoveries` were tried, and the
        `last_recovery` that went well: its `cause`, what was `lost` and the seconds it took, `took_s`.
        """
        return self.report.health()

    def trace_start(self) -> None:
        """Has every stage keep what becomes of each frame from now on, the last `MAX_SPANS` spans.

        Raises:
            StageError: the pipeline is closed, or a stage does not answer.
        """
        self.chain.trace_start()
        self.scheduler.spans.trace()

    def trace(self) -> dict[str, Any]:
        """What stages and driver have kept since `trace_start`, on one clock, in Chrome's trace format (`chrome_trace`): write
        it with `json.dump`, and open it in Perfetto. No more is kept then.

        Raises:
            StageError: the pipeline is closed, or a stage does not answer.
        """
        stages, offsets = self.chain.trace()
        return chrome_trace(self._names, stages, offsets, self.scheduler.spans.take())

    def close(self) -> None:
        """Ends every session and stage; closing twice is fine."""
        for watcher in self.watchers:
            watcher.stop()
        self._door.close()
        for session in list(self._sessions.values()):
            session.abandon()
        self._sessions.clear()
        self._drafting.close()
        self.scheduler.close()
        self.chain.close()
        for watcher in self.watchers:
            watcher.join()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @contextlib.contextmanager
    def _kept(self, session: Session) -> Iterator[None]:
        """Counts a session in, if it is opened. One that is dropped without a close is closed at the next chance."""
        drop = self._drops[session.id] = weakref.finalize(session, self._dropped, session.id)
        drop.atexit = False
        try:
            yield
        except BaseException:
            self._drops.pop(session.id, None)
            drop.detach()
            self._opener.end_if_open(session.id)
            raise
        self._sessions[session.id] = session

    def _dropped(self, number: int) -> None:
        self._drops.pop(number, None)
        self._opener.end_later(number)

    @property
    def must_not_wait(self) -> bool:
        """Whether a finalizer runs in the middle of this thread's work on opens, closes or steps."""
        return self._opener.busy

    def end_later(self, session: Session) -> None:
        """Marks a session to be closed at the next chance."""
        self._opener.end_later(session.id)

    def release(self, session: Session) -> None:
        """Closes a session on every stage and gives its bytes back."""
        self._sessions.pop(session.id, None)
        drop = self._drops.pop(session.id, None)
        if drop is not None:
            drop.detach()
        self._opener.close(session.id)

    def _asked(
        self,
        prompt: Iterable[int],
        max_new_tokens: int | None,
        speculate: int = 0,
        recurrent: Recurrent = "replay",
        snapshots: int = 1,
        timeout: float | None = None,
        tenant: str = "",
    ) -> tuple[Session, Request, float]:
        """The session that is asked for, not open yet, its request for bytes, and the seconds it may wait."""
        tokens = checked_prompt(prompt, self.cfg.n_vocab, self.max_ctx)
        new = self.default_max_new_tokens if max_new_tokens is None else max_new_tokens
        shape = asked_shape(len(tokens), self.max_ctx, self._most_drafts, new, speculate, recurrent, snapshots)
        return self._requested(tokens, shape, timeout, tenant)

    def _requested(
        self, tokens: list[int], shape: SessionShape, timeout: float | None, tenant: str
    ) -> tuple[Session, Request, float]:
        wait_s = checked_wait(timeout)
        request = Request(next(self._ids), shape, checked_tenant(tenant))
        return Session(self, request, Calls(self, request.session, tokens, shape)), request, wait_s
