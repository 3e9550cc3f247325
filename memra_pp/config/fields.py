"""Typed, bounded reads from a text config: a value is used only after its type and range were checked."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError

MAX_LAYERS = 4096
MAX_HEADS = 1 << 16
MAX_WIDTH = 1 << 24
MAX_VOCAB = 1 << 28
MAX_ROWS = 1 << 30
"""Bounds on what a config may claim, far above any model and low enough that byte counts stay below 2**63."""

MAX_SHOWN = 200
_short = reprlib.Repr()
_short.maxstring = _short.maxother = 60
_short.maxlist = _short.maxdict = 4


def show(value: object) -> str:
    """`repr(value)`, cut to a length that fits a one-line message."""
    try:
        return _short.repr(value)[:MAX_SHOWN]
    except ValueError:  # an int too long to be written out
        return f"a {type(value).__name__} too long to show"


class Fields:
    """A text config under Hugging Face names.

    Every refusal is a `ConfigError` that names the file, the architecture, the key (and the `spelled` one that the file
    itself uses), its value and what is allowed.
    """

    def __init__(self, arch: str, raw: Mapping[str, Any], where: str, spelled: Mapping[str, str] | None = None) -> None:
        self.arch = arch
        self.raw = raw
        self.where = where
        self._spelled = spelled or {}

    def refuse(self, what: str) -> ConfigError:
        """An error about this model."""
        return ConfigError(f"{self.where}: {self.arch}: {what}")

    def bad(self, name: str, allowed: str) -> ConfigError:
        """An error about the value of `name`."""
        return self.refuse(f"{self.key(name)}={show(self.raw.get(name))} is not {allowed}")

    def key(self, name: str) -> str:
        """`name`, with the file's own spelling where it differs."""
        return f"{name} ({self._spelled[name]})" if name in self._spelled else name

    def given(self, name: str) -> bool:
        """Whether `name` is there and not null."""
        return self.raw.get(name) is not None

    def count(self, name: str, *, least: int = 1, most: int = MAX_WIDTH, default: int | None = None) -> int:
        """A whole number in `[least, most]`; `default` stands for a missing or null one."""
        value = self.raw.get(name)
        if value is None:
            if default is None:
                raise self.refuse(f"{self.key(name)} is missing; give a whole number from {least} to {most}")
            return default
        if type(value) is not int or not least <= value <= most:
            raise self.bad(name, f"a whole number from {least} to {most}")
        return value

    def either(self, *names: str, least: int = 1, most: int = MAX_WIDTH, default: int | None = None) -> int:
        """The one value of a field that has several names; two that differ are refused."""
        values = {name: self.count(name, least=least, most=most) for name in names if self.given(name)}
        if len(set(values.values())) > 1:
            said = " and ".join(f"{self.key(name)}={value}" for name, value in values.items())
            raise self.refuse(f"{said} contradict each other; leave one")
        if not values and default is None:
            raise self.refuse(f"{' or '.join(self.key(n) for n in names)} is missing; give a whole number from {least}")
        return next(iter(values.values()), default or 0)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.raw.get(name)
        if value is not None and type(value) is not bool:
            raise self.bad(name, "true or false")
        return default if value is None else value

    def number(self, name: str, default: float) -> float:
        """A finite number above 0."""
        value = self.raw.get(name)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 < value < 1e300:
            raise self.bad(name, "a finite number above 0")
        return float(value)

    def section(self, name: str) -> Mapping[str, Any]:
        """A nested object; empty when missing or null."""
        value = self.raw.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.bad(name, "an object")
        return value or {}

    def inside(self, name: str) -> Fields:
        """`section(name)` with the same ways to read it."""
        return Fields(f"{self.arch}.{name}", self.section(name), self.where)

    def kinds(self, name: str, n: int, allowed: Sequence[str]) -> list[str] | None:
        """A list of `n` layer kinds out of `allowed`; None when missing or null."""
        value = self.raw.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)) or len(value) != n:
            size = f" ({len(value)} entries)" if isinstance(value, (list, tuple)) else ""
            raise self.refuse(f"{self.key(name)}={show(value)}{size} is not a list of {n} entries, one a layer")
        for il, kind in enumerate(value):
            if kind not in allowed:
                raise self.refuse(
                    f"layer {il}: {self.key(name)} says {show(kind)}, whose state cannot be sized; "
                    f"sized here: {', '.join(allowed)}"
                )
        return list(value)
