"""What the command's options are read into: numbers, cuts, sizes and devices."""

from __future__ import annotations

import argparse
import os
import re
from fractions import Fraction

MAX_DEVICES = 4096
MAX_SIZE = 1 << 60

UNITS = {
    "": 1,
    "b": 1,
    "bytes": 1,
    **{f"{prefix}b": 1000**n for n, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}ib": 1024**n for n, prefix in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,9})?) ?([a-z]*)", re.ASCII | re.IGNORECASE)
_MANY = re.compile(r"(\d{1,9})x(.*)", re.ASCII | re.IGNORECASE)


def count(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isdecimal() or len(text) > 12:
        raise argparse.ArgumentTypeError(f"{text[:20]!r}: a number, 0 or more")
    return int(text)


def cuts(text: str) -> list[int]:
    """Layers separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: layers separated by commas, such as 6,12") from None


def size(text: str) -> int:
    """Bytes out of `79.6GiB`, `512 MB` or `1000000`, rounded down."""
    match = _SIZE.fullmatch(text.strip())
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None or (nbytes := int(Fraction(match[1]) * unit)) > MAX_SIZE:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: a size such as 80GiB, 79.6GiB, 500MB or a number of bytes")
    return nbytes


def sizes(text: str) -> list[int]:
    """The memory of every device in `80GiB,80GiB,48GiB` or `8x80GiB,48GiB`."""
    out: list[int] = []
    for part in text.split(","):
        many = _MANY.fullmatch(part.strip())
        n, each = (int(many[1]), size(many[2])) if many else (1, size(part))
        if n < 1 or each < 1 or len(out) + n > MAX_DEVICES:
            raise argparse.ArgumentTypeError(
                f"{part[:40]!r}: 1 to {MAX_DEVICES} devices, each with some memory, such as 8x80GiB"
            )
        out += [each] * n
    return out


def with_formats(kv_k: str | None, kv_v: str | None) -> dict[str, str]:
    """The environment, the formats that were given before it."""
    given = {"MEMRA_KV_K": kv_k, "MEMRA_KV_V": kv_v}
    return {**os.environ, **{name: value for name, value in given.items() if value is not None}}
