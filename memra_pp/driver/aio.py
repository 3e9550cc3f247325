"""The driver for tasks: the names of `memra_pp`, to be awaited. One implementation: the sync face's, waited for differently."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from os import PathLike
from types import TracebackType
from typing import Any, BinaryIO, Generic, Protocol, TypeVar

from ..admission import SessionShape
from ..cache import DflashTapSink
from ..cache.sizing import Recurrent
from ..config import ModelConfig
from ..models.protocol import Array
from ..models.tokenizer import Tokenizer
from . import pipeline, session
from .calls import Round, SessionSnapshot
from .launch import launch as sync_launch
from .pipeline import MANY
from .sampling import Sampler, SamplingParams
from .speculation.drafters import Draft
from .waits import stream_async


class _Closing(Protocol):
    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...


T = TypeVar("T", bound=_Closing)


class Opening(Generic[T]):
    """Something that opens: `await` it, or use it in `async with`, which closes it too."""

    def __init__(self, opening: Coroutine[Any, Any, T]) -> None:
        self._opening = opening
        self._opened: T | None = None

    def __await__(self) -> Generator[Any, None, T]:
        return self._opening.__await__()

    async def __aenter__(self) -> T:
        self._opened = await self._opening
        return self._opened

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._opened is not None:
            await self._opened.__aexit__(kind, error, tb)


def launch(*args: Any, **options: Any) -> Opening[Pipeline]:
    """`memra_pp.launch`, in a thread: `async with memra_pp.aio.launch(...) as pipe`. Arguments and errors are the same."""

    async def launching() -> Pipeline:
        return Pipeline(await asyncio.to_thread(lambda: sync_launch.launch(*args, **options)))

    return Opening(launching())


class Pipeline:
    """`memra_pp.Pipeline` for tasks; `sync` is that pipeline, which threads may use at the same time."""

    def __init__(self, sync: pipeline.Pipeline) -> None:
        self.sync = sync

    @property
    def cfg(self) -> ModelConfig:
        """The model's."""
        return self.sync.cfg

    @property
    def tokenizer(self) -> Tokenizer:
        """See `memra_pp.Pipeline.tokenizer`."""
        return self.sync.tokenizer

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
    ) -> Opening[Session]:
        """`memra_pp.Pipeline.open`; a task that is cancelled while it waits leaves the queue."""

        async def opening() -> Session:
            return Session(
                self.sync,
                await self.sync.open_async(
                    prompt,
                    max_new_tokens=max_new_tokens,
                    speculate=speculate,
                    recurrent=recurrent,
                    snapshots=snapshots,
                    timeout=timeout,
                    tenant=tenant,
                ),
            )

        return Opening(opening())

    async def generate(
        self,
        prompt: Iterable[int],
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        draft: Draft | None = None,
    ) -> AsyncGenerator[int, None]:
        """`memra_pp.Pipeline.generate`."""
        ask = self.sync.ask(max_new_tokens, sampling, draft)
        async with self.open(prompt, **ask.options()) as opened, aclosing(opened.generate(*ask)) as tokens:
            async for token in tokens:
                yield token

    async def generate_many(
        self,
        prompts: Iterable[Iterable[int]],
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingParams | None = None,
        draft: Draft | None = None,
        concurrency: int = MANY,
    ) -> AsyncGenerator[tuple[int, int], None]:
        """`memra_pp.Pipeline.generate_many`."""
        many = self.sync.many(prompts, self.sync.ask(max_new_tokens, sampling, draft), concurrency)
        tokens, loop = many.run(), asyncio.get_running_loop()
        thread = ThreadPoolExecutor(1, "memra-many")  # one: an end waits for the step under way
        try:
            while (item := await loop.run_in_executor(thread, next, tokens, None)) is not None:
                yield item
        finally:
            many.stop()
            ended = loop.run_in_executor(thread, tokens.close)
            thread.shutdown(wait=False)  # the loop must not wait, whoever cancels whatever waits for it
            await asyncio.shield(ended)

    def import_session(
        self, source: str | PathLike[str] | BinaryIO, *, timeout: float | None = None, tenant: str = ""
    ) -> Opening[Session]:
        """`memra_pp.Pipeline.import_session`; a task that is cancelled while it waits leaves the queue."""

        async def opening() -> Session:
            return Session(self.sync, await self.sync.import_async(source, timeout, tenant))

        return Opening(opening())

    def health(self) -> dict[str, Any]:
        """`memra_pp.Pipeline.health`: it does not wait."""
        return self.sync.health()

    async def stats(self) -> dict[str, Any]:
        """`memra_pp.Pipeline.stats`."""
        return await asyncio.to_thread(self.sync.stats)

    async def close(self) -> None:
        """`memra_pp.Pipeline.close`."""
        await asyncio.shield(asyncio.to_thread(self.sync.close))

    async def __aenter__(self) -> Pipeline:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()


class Session:
    """`memra_pp.Session` for tasks: the same calls, awaited. A task that is cancelled in a call ends its session, no other."""

    def __init__(self, pipe: pipeline.Pipeline, sync: session.Session) -> None:
        self._pipe, self._sync, self._calls = pipe, sync, sync.calls

    @property
    def id(self) -> int:
        """The session's number."""
        return self._sync.id

    @property
    def shape(self) -> SessionShape:
        """What it was opened for."""
        return self._sync.shape

    @property
    def tokens(self) -> list[int]:
        """The tokens fed and not rolled back, oldest first."""
        return self._sync.tokens

    @property
    def pos(self) -> int:
        """How many they are."""
        return self._sync.pos

    @property
    def drafts_possible(self) -> int:
        """See `memra_pp.Session.drafts_possible`."""
        return self._sync.drafts_possible

    @property
    def dflash_taps(self) -> DflashTapSink | None:
        """The sink that every forward fills, if any."""
        return self._sync.dflash_taps

    @dflash_taps.setter
    def dflash_taps(self, sink: DflashTapSink | None) -> None:
        self._sync.dflash_taps = sink

    @property
    def last_logits(self) -> Array | None:
        """See `memra_pp.Session.last_logits`."""
        return self._sync.last_logits

    async def export(self, target: str | PathLike[str] | BinaryIO) -> None:
        """`memra_pp.Session.export`, in a thread."""
        await asyncio.to_thread(self._sync.export, target)

    async def park(self) -> None:
        """`memra_pp.Session.park`, in a thread."""
        await asyncio.to_thread(self._sync.park)

    async def unpark(self, timeout: float | None = None) -> None:
        """`memra_pp.Session.unpark`; a task that is cancelled while it waits leaves the queue."""
        await self._pipe.unpark_async(self._sync, timeout)

    async def prefill(self, all_logits: bool = False, want: str = "logits") -> Array:
        """`memra_pp.Session.prefill`."""
        return await self._pipe.run_async(self._calls.prefill(all_logits, want))

    async def extend(self, tokens: Iterable[int], want: str = "logits") -> Array:
        """`memra_pp.Session.extend`."""
        return await self._pipe.run_async(self._calls.extend(tokens, want))

    async def decode(self, token: int, want: str = "logits") -> Array:
        """`memra_pp.Session.decode`."""
        return await self._pipe.run_async(self._calls.extend([token], want))

    async def verify(self, tokens: Iterable[int], want: str = "logits") -> Array:
        """`memra_pp.Session.verify`."""
        return await self._pipe.run_async(self._calls.verify(tokens, want))

    def snapshot(self, pin: bool = True) -> Opening[SessionSnapshot]:
        """`memra_pp.Session.snapshot`."""

        async def taken() -> SessionSnapshot:
            return self._calls.snapshot(pin)

        return Opening(taken())

    async def rollback(self, snap: SessionSnapshot, accept: int) -> None:
        """`memra_pp.Session.rollback`."""
        self._calls.rollback(snap, accept)

    async def round(
        self, drafts: Iterable[int], sampler: Sampler | SamplingParams | None = None, *, next: int | None = None
    ) -> Round:
        """`memra_pp.Session.round`."""
        return await self._pipe.run_async(self._calls.round(drafts, sampler, next))

    async def generate(
        self, max_new_tokens: int, sampling: SamplingParams | None = None, draft: Draft | None = None
    ) -> AsyncGenerator[int, None]:
        """`memra_pp.Session.generate`."""
        async with aclosing(stream_async(self._calls.generate(max_new_tokens, sampling, draft))) as tokens:
            async for token in tokens:
                yield token

    def cancel(self) -> None:
        """`memra_pp.Session.cancel`."""
        self._sync.cancel()

    async def close(self) -> None:
        """`memra_pp.Session.close`."""
        await asyncio.shield(asyncio.to_thread(self._sync.close))

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        await self.close()
