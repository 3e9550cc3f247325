"""The one YAML file that a job is told everything by, and errors that name the line."""

from __future__ import annotations

import difflib
import math
import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, get_args

import yaml

from memra_pp import Draft, SamplingParams
from memra_pp.cache.formats import K_CHOICES, V_CHOICES
from memra_pp.cli.options import policy
from memra_pp.driver.launch.launch import Balance
from memra_pp.errors import ConfigError, MemraError

MAX_FILE_BYTES = 1 << 20
QUEUE = "queue:"

Check: TypeAlias = Callable[[Any], Any]
"""The value if it is allowed; else it raises ValueError with what is."""


@dataclass(frozen=True)
class Job:
    """What a job file says. `prompts` is a path or `queue:NAME`; `launch` is what `memra_pp.launch` is called with."""

    model: str
    prompts: str
    answers: Path
    max_new_tokens: int = 256
    concurrency: int = 64
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    draft: Draft | None = None
    launch: Mapping[str, Any] = field(default_factory=dict)


def read_job(path: Path) -> Job:
    """A job file, checked.

    Raises:
        ConfigError: it cannot be read, or a line of it cannot be used; the message names file and line, the value, and what was
            allowed.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): name a job file") from error
    if len(text) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is longer than {MAX_FILE_BYTES:,} bytes: name a job file")
    try:
        loader = yaml.SafeLoader(text)
        found = _Reader(path, loader).section(loader.get_single_node(), FIELDS, ("model", "prompts", "answers"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = path if mark is None else f"{path}:{mark.line + 1}"
        raise ConfigError(f"{where}: this is no YAML: {getattr(error, 'problem', None) or error}") from error
    formats = Namespace(kv_k=found.pop("kv_k", None), kv_v=found.pop("kv_v", None), ring=found.pop("ring", None))
    job = {name: found.pop(name) for name in Job.__dataclass_fields__ if name in found}
    return Job(**job, launch={**found, "policy": policy(formats)})


class _Reader:
    """Reads the mappings of one file."""

    def __init__(self, path: Path, loader: Any) -> None:
        self._path, self._loader = path, loader

    def section(self, node: Any, fields: Mapping[str, Any], needed: tuple[str, ...] = ()) -> dict[str, Any]:
        """The checked values of a mapping that may have these keys."""
        if not isinstance(node, yaml.MappingNode):
            self._no(node, f"this must be lines of `key: value`, of {', '.join(fields)}")
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key not in fields:
                close = difflib.get_close_matches(str(key), fields, 1)
                self._no(key_node, f"no such key: {key!r:.80}; " + (f"did you mean {close[0]}?" if close else _listed(fields)))
            if key in found:
                self._no(key_node, f"{key} is here twice: leave one of them")
            found[key] = self._value(key, value_node, fields[key])
        for key in needed:
            if key not in found:
                self._no(node, f"{key} is missing: add a line `{key}: ...`")
        return found

    def _value(self, key: str, node: Any, wanted: Check | Mapping[str, Any]) -> Any:
        if isinstance(wanted, Mapping):
            values = self.section(node, wanted)
            try:
                return SECTIONS[key](**values)
            except MemraError as error:
                self._no(node, f"{key}: {error}")
        value = self._loader.construct_object(node, deep=True)
        try:
            return wanted(value)
        except ValueError as error:
            self._no(node, f"{key} is {value!r:.80}: it must be {error}")

    def _no(self, node: Any, what: str) -> Any:
        line = 1 if node is None else node.start_mark.line + 1
        raise ConfigError(f"{self._path}:{line}: {what}")


def _listed(fields: Mapping[str, Any]) -> str:
    return f"there are {', '.join(fields)}"


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a text")
    return value


def _path(value: Any) -> Path:
    path = Path(os.path.expandvars(_text(value))).expanduser()
    if not path.is_absolute():
        raise ValueError("a path from the root: a submitted job runs in a copy of its directory, which Ray removes")
    return path


def _whole(least: int, most: int = 1 << 50) -> Check:
    def check(value: Any) -> int:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"a whole number from {least} to {most:,}")
        return value

    return check


def _number(least: float, most: float) -> Check:
    def check(value: Any) -> float:
        if type(value) not in (int, float) or not math.isfinite(value) or not least <= value <= most:
            raise ValueError(f"a number from {least:g} to {most:g}")
        return float(value)

    return check


def _one_of(*allowed: str) -> Check:
    def check(value: Any) -> str:
        value = {False: "off"}.get(value, value) if "off" in allowed else value  # YAML 1.1 reads off as false
        if value not in allowed:
            raise ValueError(f"one of {', '.join(allowed)}")
        return str(value)

    return check


def _list_of(each: Check, example: str) -> Check:
    def check(value: Any) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise ValueError(f"a list, such as {example}")
        try:
            return [each(item) for item in value]
        except ValueError as error:
            raise ValueError(f"a list, each of it {error}") from None

    return check


def _devices(value: Any) -> Any:
    return value if value in ("auto", "cpu", "cuda") else _list_of(_text, '["cuda:0", "cuda:1"]')(value)


SAMPLING: Mapping[str, Check] = {
    "temperature": _number(0, 1e6),
    "top_p": _number(0, 1),
    "top_k": _whole(0, 1 << 31),
    "seed": _whole(0, (1 << 63) - 1),
    "stop": _list_of(_text, '["\\n\\n"]'),
}
DRAFT: Mapping[str, Check] = {
    "k": _whole(1, 256),
    "by": _text,
    "recurrent": _one_of("replay", "states"),
}
SECTIONS: Mapping[str, Callable[..., Any]] = {"sampling": SamplingParams, "draft": Draft}
FIELDS: Mapping[str, Any] = {
    "model": _text,
    "prompts": _text,
    "answers": _path,
    "max_new_tokens": _whole(1),
    "concurrency": _whole(1, 65536),
    "sampling": SAMPLING,
    "draft": DRAFT,
    "stages": _whole(1, 4096),
    "cuts": _list_of(_whole(1, 1 << 20), "[6, 12]"),
    "balance": _one_of(*get_args(Balance)),
    "devices": _devices,
    "kv_k": _one_of(*K_CHOICES),
    "kv_v": _one_of(*V_CHOICES),
    "ring": _one_of("off", "step", "all"),
    "max_ctx": _whole(1),
    "threads": _whole(1, 256),
    "budget_bytes": _whole(1),
    "prefill_chunk": _whole(1, 4096),
    "bypass": _whole(0, 1 << 20),
    "recoveries": _whole(0, 1 << 20),
    "silence_timeout": _number(1, 86400),
    "step_timeout": _number(1, 86400),
    "placement_timeout": _number(1, 86400),
}
"""What a job file may say. All from `stages` on are options of `memra_pp.launch`, or together its `policy`."""
