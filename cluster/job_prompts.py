"""Where a job's prompts come from, a file or a queue, and the logs that make it go on where it ended."""

from __future__ import annotations

import fcntl
import json
import os
import stat
import threading
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

from memra_pp.errors import ConfigError

MAX_LINE_BYTES = 64 << 20
NAMESPACE = "memra_pp"
POLL_S = 1.0
NOTHING = object()


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
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"prompts {path} is no regular file: it is read twice, once to be checked")
        with path.open("rb") as file:
            for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
                where = f"{path}:{number}"
                if len(line) == MAX_LINE_BYTES:
                    raise ConfigError(f"{where} is longer than {MAX_LINE_BYTES:,} bytes: cut it")
                if not line.strip():
                    continue
                item = _object(line, where) if line.startswith(b"{") else {"prompt": _text(line, where)}
                prompt = _prompt(item, str(number), where)
                if prompt.id in seen:
                    raise ConfigError(f"{where}: id {prompt.id!r:.80} was there before: give each prompt its own")
                seen.add(prompt.id)
                yield prompt
    except OSError as error:
        raise ConfigError(
            f"prompts {path} cannot be read ({error.strerror}): name a file that the job can read, such as one of its directory"
        ) from error


def queue_prompts(name: str, taken: Log, answered: Set[str]) -> Iterator[Prompt | None]:
    """The prompts of a queue of the cluster, until None comes out of it; first what an earlier job took and wrote to `taken`.
    None of this iterator says that there is none at the moment. What is no prompt, or has an id that is `answered` or was taken
    before, comes with its `problem`: who puts nonsense in a queue does not end a job that serves others.
    """
    from ray.util.queue import Empty, Queue

    options = {"name": name, "namespace": NAMESPACE, "get_if_exists": True, "lifetime": "detached", "num_cpus": 0}
    queue, known = Queue(actor_options=options), set(answered)
    for line in taken.lines:
        prompt = _retaken(line, name)
        known.add(prompt.id)
        yield prompt
    for number in count(len(taken.lines) + 1):
        while (item := _polled(queue, Empty)) is NOTHING:
            yield None
        if item is None:
            return
        prompt = _queued(item, number, name, known)
        known.add(prompt.id)
        taken.add({"id": prompt.id, "problem": prompt.problem} if prompt.problem else {"id": prompt.id, "item": item})
        yield prompt


def _polled(queue: Any, empty: type[Exception]) -> Any:
    try:
        return queue.get(timeout=POLL_S)
    except empty:
        return NOTHING


def _queued(item: Any, number: int, name: str, known: Set[str]) -> Prompt:
    """An item of a queue, of any process and so of any type."""
    own = f"#{number}"
    given = _id(item, own)
    if given in known:
        return Prompt(own, "", problem=f"id {given!r:.80} was there before: give each prompt its own")
    try:
        json.dumps(item)
        return _prompt(item, own, f"queue {name}, prompt {number}")
    except (ConfigError, TypeError, ValueError, RecursionError) as error:
        return Prompt(given, "", problem=str(error))


def _retaken(line: dict[str, Any], name: str) -> Prompt:
    """What was taken before. Raises ConfigError if the log is not one of a queue."""
    if "problem" in line:
        return Prompt(str(line.get("id")), "", problem=str(line["problem"]))
    return replace(_prompt(line.get("item"), "", f"what was taken of queue {name}"), id=str(line.get("id")))


def _prompt(item: Any, own: str, where: str) -> Prompt:
    """The prompt that an object is; its id is `own` if it has none."""
    if not isinstance(item, dict):
        raise ConfigError(f"{where}: {item!r:.80} is no prompt: it must be an object with prompt or tokens")
    text, tokens, most = item.get("prompt"), item.get("tokens"), item.get("max_new_tokens")
    if isinstance(text, str) == isinstance(tokens, list):
        raise ConfigError(f"{where}: a prompt has either a text `prompt` or a list `tokens`, not {[*map(str, item)][:8]}")
    if most is not None and (type(most) is not int or most < 1):
        raise ConfigError(f"{where}: max_new_tokens is {most!r:.80}: it must be a whole number from 1")
    return Prompt(_id(item, own), text if isinstance(text, str) else tokens, most)


def _id(item: Any, own: str) -> str:
    given = item.get("id") if isinstance(item, dict) else None
    return own if given is None else str(given)


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
