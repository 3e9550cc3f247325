"""Where a job's prompts come from, a file or a queue, and the logs that make it go on where it ended."""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from memra_pp.errors import ConfigError

MAX_LINE_BYTES = 64 << 20
NAMESPACE = "memra_pp"
POLL_S = 1.0


@dataclass(frozen=True)
class Prompt:
    """Something to continue: a text, or token ids. `problem` says why it cannot be, if it cannot."""

    id: str
    prompt: str | list[int]
    max_new_tokens: int | None = None
    problem: str = ""


class Log:
    """A file of JSON lines that only grows, each on the disk once it is written. One process at a time has it open.

    A last line that was cut short is dropped. `lines` are those that were there.
    """

    def __init__(self, path: Path) -> None:
        self.lines: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        try:
            self._file: BinaryIO = path.open("a+b", buffering=0)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another job writes to {path}: wait for its end, or name another file") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}): name a file that can") from error
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            self.lines.append(_object(line, f"{path}:{len(self.lines) + 1}"))
            end += len(line)
        self._file.truncate(end)

    def add(self, line: dict[str, Any]) -> None:
        """Adds a line, from any thread; returns when it is on the disk."""
        text = json.dumps(line).encode() + b"\n"
        with self._lock:
            self._file.write(text)
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Lets others have it."""
        with self._lock:
            self._file.close()


def file_prompts(path: Path) -> Iterator[Prompt]:
    """The prompts of a file, in order.

    Raises:
        ConfigError: it cannot be read, or a line of it is no prompt; the message names it.
    """
    seen: set[str] = set()
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
                where = f"{path}:{number}"
                if len(line) == MAX_LINE_BYTES:
                    raise ConfigError(f"{where} is longer than {MAX_LINE_BYTES:,} bytes: cut it")
                if not line.strip():
                    continue
                item = _object(line, where) if line.startswith(b"{") else {"prompt": _text(line, where)}
                prompt = _prompt(item, number, where)
                if prompt.id in seen:
                    raise ConfigError(f"{where}: id {prompt.id!r:.80} was there before: give each prompt its own")
                seen.add(prompt.id)
                yield prompt
    except OSError as error:
        raise ConfigError(
            f"prompts {path} cannot be read ({error.strerror}): name a file that the job can read, such as one of its directory"
        ) from error


def queue_prompts(name: str, taken: Log) -> Iterator[Prompt | None]:
    """The prompts of a queue of the cluster, until None comes out of it; first what an earlier job took and wrote to `taken`.
    None of this iterator says that there is none at the moment. What is no prompt comes with its `problem`: who puts nonsense
    in a queue does not end a job that serves others.
    """
    from ray.util.queue import Empty, Queue

    options = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached", "num_cpus": 0}
    queue, count = Queue(actor_options=options), 0
    for item in taken.lines:
        count += 1
        yield _queued(item, count, name)
    while True:
        try:
            item = queue.get(timeout=POLL_S)
        except Empty:
            yield None
            continue
        if item is None:
            return
        count += 1
        prompt = _queued(item, count, name)
        taken.add({"id": prompt.id, "problem": prompt.problem} if prompt.problem else item)
        yield prompt


def _queued(item: Any, number: int, name: str) -> Prompt:
    """An item of a queue, of any process and so of any type, or of the log of those that were taken."""
    fallback = str(item.get("id", number)) if isinstance(item, dict) else str(number)
    if isinstance(item, dict) and "problem" in item:
        return Prompt(fallback, "", problem=str(item["problem"]))
    try:
        prompt = _prompt(item, number, f"queue {name}, prompt {number}")
        json.dumps(item)
        return prompt
    except (ConfigError, TypeError, ValueError) as error:
        return Prompt(fallback, "", problem=str(error))


def _prompt(item: Any, number: int, where: str) -> Prompt:
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: {item!r:.80} is no prompt: it must be an object with prompt or tokens")
    text, tokens, most = item.get("prompt"), item.get("tokens"), item.get("max_new_tokens")
    if isinstance(text, str) == isinstance(tokens, list):
        raise ConfigError(f"{where}: a prompt has either a text `prompt` or a list `tokens`, not {sorted(item)}")
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigError(f"{where}: max_new_tokens is {most!r:.80}: it must be a whole number from 1")
    return Prompt(str(item.get("id", number)), text if isinstance(text, str) else tokens, most)


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    if not isinstance(item, dict):
        raise ConfigError(f"{where} is no JSON object")
    return item


def _text(line: bytes, where: str) -> str:
    try:
        return line.decode().rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is no UTF-8: {error}") from error
