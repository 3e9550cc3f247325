"""What `ray job submit` runs: prompts from a file or a queue through a pipeline on the cluster, answers to a file.

    ray job submit --working-dir . -- python cluster/job.py cluster/job.yaml

A prompt is a line of text, or of JSON: `{"id": ..., "prompt": "a text", "max_new_tokens": ...}`, or with `"tokens": [...]` in
place of a text. An answer is a line of JSON: the `id` (that of the prompt's line, if it had none) and `tokens`, and the `text`
if the prompt was one, or an `error`. It is on the disk before the next prompt is taken up: a job that is submitted again goes
on behind what is answered. Out of a queue, `prompts: queue:NAME`, come the same objects, until None.

A file is read through before anything is loaded, and a line of it that is no prompt is an error of the job, which does not
begin. What comes out of a queue and is no prompt, or has an id that was there before, is answered with an `error`, and the job
goes on. Without an id, the Nth that came out of it is `#N`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from job_file import QUEUE, Job, read_job
from job_prompts import Log, Prompt, file_prompts, queue_prompts

from memra_pp import ModelConfig, aio
from memra_pp.driver.speculation.model_drafter import ModelDrafter
from memra_pp.errors import AdmissionError, ConfigError, InputError, MemraError, StageError
from memra_pp.models import load_tokenizer

OPEN_S = 86400.0
SAY_S = 10.0
END = object()


class Run:
    """A job under way: some tasks take prompts, one after the other, and write answers."""

    def __init__(
        self, job: Job, pipe: aio.Pipeline, prompts: Iterator[Prompt | None], answered: Set[str], answers: Log
    ) -> None:
        self._job, self._pipe, self._prompts, self._done, self._answers = job, pipe, prompts, answered, answers
        self._taking = asyncio.Lock()
        self._started = time.monotonic()
        self.answered = self.tokens = 0

    async def run(self) -> None:
        """Answers every prompt. Raises what ends the job: a StageError, or a ConfigError of the prompts."""
        async with asyncio.TaskGroup() as group:
            telling = group.create_task(self._tell())
            workers = [group.create_task(self._work()) for _ in range(self._job.concurrency)]
            await asyncio.wait(workers)
            telling.cancel()

    def __str__(self) -> str:
        seconds = time.monotonic() - self._started
        return f"{self.answered} answered, {len(self._done)} before, {self.tokens} tokens, {self.tokens / seconds:.1f} tok/s"

    async def _work(self) -> None:
        while (prompt := await self._next()) is not None:
            answer = await self._answer(prompt)
            await asyncio.to_thread(self._answers.add, {"id": prompt.id, **answer})
            self.answered += 1

    async def _next(self) -> Prompt | None:
        async with self._taking:
            while (prompt := await self._taken()) is not END:
                if prompt is not None and prompt.id not in self._done:
                    return prompt
        return None

    async def _taken(self) -> Any:
        """What the iterator gives, or END. A task that is cancelled waits for it: what has left a queue is written down."""
        step = asyncio.ensure_future(asyncio.to_thread(next, self._prompts, END))
        try:
            return await asyncio.shield(step)
        except asyncio.CancelledError:
            await asyncio.wait([step])
            raise

    async def _answer(self, prompt: Prompt) -> dict[str, Any]:
        """The answer, or why this prompt can have none."""
        if prompt.problem:
            return {"error": prompt.problem}
        try:
            tokenizer = self._pipe.tokenizer if isinstance(prompt.prompt, str) else None
        except ConfigError as error:
            return {"error": str(error)}
        tokens: list[int] | None = None
        try:
            ask = self._pipe.sync.ask(prompt.max_new_tokens or self._job.max_new_tokens, self._job.sampling, self._job.draft)
            ids = prompt.prompt if tokenizer is None else tokenizer.encode(prompt.prompt)
            async with self._pipe.open(ids, timeout=OPEN_S, **ask.options()) as session:
                tokens = [token async for token in session.generate(*ask)]
        except (InputError, AdmissionError) as error:
            return {"error": str(error)}
        except StageError as error:
            if self._pipe.health()["state"] in ("failed", "closed"):
                raise
            if tokens is None:  # else it was the close that failed
                return {"error": str(error)}
        self.tokens += len(tokens)
        return {"tokens": tokens} | ({} if tokenizer is None else {"text": tokenizer.decode(tokens)})

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(SAY_S)
            print(self, flush=True)


def check(job: Job) -> None:
    """What can be known before any weight is loaded: the model, the one that drafts, each prompt of a file, and a tokenizer
    for its texts.

    Raises:
        ConfigError: one of them cannot be used.
    """
    cfg = ModelConfig.from_path(job.model)
    if job.draft is not None and job.draft.by != "ngram":
        ModelDrafter.check(ModelConfig.from_path(job.draft.by), cfg.n_vocab)
    if not job.prompts.startswith(QUEUE):
        kinds = {type(prompt.prompt) for prompt in file_prompts(Path(job.prompts))}
        if str in kinds:
            load_tokenizer(job.model)


async def run(job: Job) -> None:
    """Runs a job to its end, or until this task is cancelled; nothing is left running."""
    ending = asyncio.current_task()
    if ending is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.cancel)
    await asyncio.to_thread(check, job)
    answers = Log(job.answers)
    queued = job.prompts.startswith(QUEUE)
    taken = Log(job.answers.with_name(f"{job.answers.name}.taken")) if queued else None
    try:
        async with aio.launch(job.model, progress=_progress, **job.launch) as pipe:
            named = job.prompts.removeprefix(QUEUE)
            answered = {str(line.get("id")) for line in answers.lines}
            prompts = file_prompts(Path(named)) if taken is None else queue_prompts(named, taken, answered)
            under_way = Run(job, pipe, prompts, answered, answers)
            try:
                await under_way.run()
            finally:
                print(under_way, flush=True)
    finally:
        answers.close()
        if taken is not None:
            taken.close()


def _progress(text: str, done: int, of: int) -> None:
    print(f"[{done}/{of}] {text}", flush=True)


def main() -> int:
    """Exit code 0 when all is answered; 1 for an error, which is said in one line; 143 when it was told to end."""
    parser = argparse.ArgumentParser(description="Prompts through a pipeline on a Ray cluster, answers to a file.")
    parser.add_argument("job", type=Path, help="the job file, as cluster/job.yaml")
    args = parser.parse_args()
    try:
        asyncio.run(run(read_job(args.job)))
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    except MemraError as error:
        return _failed(error)
    except ExceptionGroup as errors:
        return _failed(errors.exceptions[0])
    return 0


def _failed(error: Exception) -> int:
    if not isinstance(error, MemraError):
        raise error
    print(f"job: error: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
