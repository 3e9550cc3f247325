"""How calls wait: the one difference between a thread's face and a task's.

A call is a generator of the outcomes that it needs (`work.Steps`). One that is left in the middle, by an interrupt, a task's
cancellation or an error, is closed, and so sees to what it had begun.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any, TypeVar

from ..admission.outcome import Outcome
from .work import Steps

T = TypeVar("T")
LOOK_S = 60.0

Wait = Callable[[Outcome[Any]], None]


def run(steps: Steps[T], wait: Wait) -> T:
    """Runs a call in this thread; its result, or what it raises."""
    try:
        while True:
            wait(next(steps))
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        steps.close()


async def run_async(steps: Steps[T]) -> T:
    """`run` for a task."""
    try:
        while True:
            await _wait(next(steps))
    except StopIteration as done:
        result: T = done.value
        return result
    finally:
        steps.close()


def stream(tokens: Generator[Outcome[Any] | int, None, None], wait: Wait) -> Iterator[int]:
    """The tokens of a generation, which yields them between its waits."""
    try:
        for item in tokens:
            if isinstance(item, Outcome):
                wait(item)
            else:
                yield item
    finally:
        tokens.close()


async def stream_async(tokens: Generator[Outcome[Any] | int, None, None]) -> AsyncGenerator[int, None]:
    """`stream` for a task."""
    try:
        for item in tokens:
            if isinstance(item, Outcome):
                await _wait(item)
            else:
                yield item
    finally:
        tokens.close()


async def _wait(outcome: Outcome[Any]) -> None:
    while not await outcome.wait_async(LOOK_S):
        pass
