"""The face for tasks: the answers of the sync face, and a task that is cancelled takes nobody with it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ringed import some_tokens
from standing import assert_empty

import memra_pp
from memra_pp import aio
from memra_pp.errors import ConfigError, InputError, SessionCancelled, StageError

WAIT_S = 30.0
GREEDY = memra_pp.SamplingParams(temperature=0, eos_ids=())
OPTIONS: dict[str, Any] = {"backend": "local", "stages": 2, "threads": 1, "prefill_chunk": 16}


@pytest.fixture(scope="module")
def sync(data: Path) -> Iterator[memra_pp.Pipeline]:
    with memra_pp.launch(data / "hybrid", **OPTIONS) as pipe:
        yield pipe
        assert_empty(pipe)


def test_every_call_answers_as_in_a_thread(data: Path, sync: memra_pp.Pipeline) -> None:
    async def calls(pipe: aio.Pipeline) -> list[Any]:
        out: list[Any] = []
        async with pipe.open(some_tokens(20), max_new_tokens=40, speculate=4) as s:
            out += [await s.prefill(), await s.decode(3), await s.extend([4, 5]), *await s.verify([6, 7, 8])]
            async with s.snapshot() as snap:
                out += [*await s.verify([9, 10])]
                await s.rollback(snap, 1)
            done = await s.round([1, 2], next=11)
            out += [*done.rows, done.accepted, done.next, s.pos, s.tokens, s.drafts_possible, s.shape.ctx]
        async with pipe.open(some_tokens(3), max_new_tokens=4) as s:
            out.append(await s.prefill(all_logits=True))
        return out

    def plain() -> list[Any]:
        out: list[Any] = []
        with sync.open(some_tokens(20), max_new_tokens=40, speculate=4) as s:
            out += [s.prefill(), s.decode(3), s.extend([4, 5]), *s.verify([6, 7, 8])]
            with s.snapshot() as snap:
                out += [*s.verify([9, 10])]
                s.rollback(snap, 1)
            done = s.round([1, 2], next=11)
            out += [*done.rows, done.accepted, done.next, s.pos, s.tokens, s.drafts_possible, s.shape.ctx]
        with sync.open(some_tokens(3), max_new_tokens=4) as s:
            out.append(s.prefill(all_logits=True))
        return out

    async def launched() -> list[Any]:
        async with aio.launch(data / "hybrid", **OPTIONS) as pipe:
            assert pipe.cfg == sync.cfg
            out = await calls(pipe)
            assert (await pipe.stats())["sessions"] == 0
        with pytest.raises(StageError, match="closed"):
            await pipe.open([1])
        return out

    for a, b in zip(asyncio.run(launched()), plain(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_many_tasks_each_over_its_own_session_get_their_texts_in_shared_traversals(sync: memra_pp.Pipeline) -> None:
    prompts = [some_tokens(n, seed=n) for n in range(1, 13)]
    before = sync.chain.traversals
    alone = [list(sync.generate(p, max_new_tokens=10, sampling=GREEDY)) for p in prompts]
    between = sync.chain.traversals

    async def one(pipe: aio.Pipeline, prompt: list[int]) -> list[int]:
        return [token async for token in pipe.generate(prompt, max_new_tokens=10, sampling=GREEDY)]

    async def tasks() -> list[list[int]]:
        pipe = aio.Pipeline(sync)
        return list(await asyncio.gather(*(one(pipe, prompt) for prompt in prompts)))

    assert asyncio.run(tasks()) == alone
    assert sync.chain.traversals - between < 0.75 * (between - before)


def test_generate_many_for_tasks(sync: memra_pp.Pipeline) -> None:
    prompts = [some_tokens(n, seed=n) for n in range(1, 6)]
    options: dict[str, Any] = {"max_new_tokens": 6, "sampling": GREEDY}

    async def task() -> list[list[int]]:
        texts: list[list[int]] = [[] for _ in prompts]
        async for index, token in aio.Pipeline(sync).generate_many(prompts, **options, concurrency=2):
            texts[index].append(token)
        return texts

    async def left_early() -> None:
        many = aio.Pipeline(sync).generate_many(prompts, **options)
        await anext(many)
        await many.aclose()

    assert asyncio.run(task()) == [list(sync.generate(p, **options)) for p in prompts]
    asyncio.run(left_early())
    assert_empty(sync)


def test_a_task_that_is_cancelled_anywhere_leaves_the_others_their_texts(sync: memra_pp.Pipeline) -> None:
    prompt = some_tokens(9)
    expected = list(sync.generate(prompt, max_new_tokens=16, sampling=GREEDY))

    async def one(pipe: aio.Pipeline) -> list[int]:
        return [token async for token in pipe.generate(prompt, max_new_tokens=16, sampling=GREEDY)]

    async def tasks() -> None:
        pipe = aio.Pipeline(sync)
        for turn in range(12):
            stays = [asyncio.create_task(one(pipe)) for _ in range(2)]
            goes = [asyncio.create_task(one(pipe)) for _ in range(3)]
            for n, task in enumerate(goes):
                for _ in range(3 * turn + n):
                    await asyncio.sleep(0)
                task.cancel()
            for done in await asyncio.gather(*goes, return_exceptions=True):
                assert isinstance(done, asyncio.CancelledError) or done == expected
            assert await asyncio.gather(*stays) == [expected] * 2

    asyncio.run(tasks())
    assert_empty(sync)


def test_a_call_that_is_cut_short_ends_its_session_alone(sync: memra_pp.Pipeline) -> None:
    async def task() -> None:
        pipe = aio.Pipeline(sync)
        async with pipe.open(some_tokens(4), max_new_tokens=9) as a, pipe.open(some_tokens(4), max_new_tokens=9) as b:
            await a.prefill()
            await b.prefill()
            call = asyncio.create_task(a.decode(3))
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            with pytest.raises(StageError, match="interrupted"):
                await a.decode(3)
            assert (await b.decode(3)).shape == (sync.cfg.n_vocab,)
            b.cancel()
            with pytest.raises(SessionCancelled):
                await b.decode(3)

    asyncio.run(task())


def test_what_is_refused_is_refused_alike(data: Path, sync: memra_pp.Pipeline) -> None:
    async def task() -> None:
        pipe = aio.Pipeline(sync)
        with pytest.raises(InputError):
            await pipe.open([])
        with pytest.raises(InputError, match="snapshots"):
            await pipe.open([1], max_new_tokens=10, speculate=3, snapshots=10**3)
        async with pipe.open([1], max_new_tokens=4) as s:
            with pytest.raises(InputError, match="prefill"):
                await s.decode(1)
            with pytest.raises(InputError):
                [token async for token in s.generate(-1)]
        with pytest.raises(ConfigError):
            await aio.launch(data / "hybrid", stages=99)

    asyncio.run(task())


@pytest.mark.parametrize("cancels", [1, 2])
def test_generate_many_that_waits_for_bytes_ends_when_it_is_cancelled_and_holds_up_no_loop(data: Path, cancels: int) -> None:
    """The one session that fits is this very loop's own."""
    options = {"max_new_tokens": 8}
    with memra_pp.launch(data / "hybrid", **OPTIONS) as whole, whole.open([1, 2, 3], **options):
        held = [stage["allocated_bytes"] for stage in whole.stats()["stages"]]

    async def tasks() -> None:
        async with aio.launch(data / "hybrid", budget_bytes=held, **OPTIONS) as pipe:
            holder = await pipe.open([1, 2, 3], **options)

            async def many() -> None:
                async for _ in pipe.generate_many([[1, 2, 3]], max_new_tokens=8):
                    pass

            task = asyncio.create_task(many())
            while not pipe.sync._door.stats()["admission"]["waiting"]:
                await asyncio.sleep(0.01)
            for _ in range(cancels):
                task.cancel()
                await asyncio.sleep(0)
            done, _ = await asyncio.wait([task], timeout=WAIT_S)
            assert done and task.cancelled()
            await holder.close()
            async with pipe.open([1, 2, 3], timeout=WAIT_S, **options) as another:
                await another.prefill()

    asyncio.run(tasks())
