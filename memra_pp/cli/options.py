"""What the command's options are read into: numbers, cuts, sizes, devices, weights and formats."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from itertools import groupby

from ..cache import KvPolicy
from ..config import ModelConfig, WeightBytes
from ..config.weight_bytes import weights_of_bits, weights_of_total

MAX_DEVICES = 4096
MAX_SIZE = 1 << 60
LEAST_DEVICE = 1 << 20
MAX_SECONDS = 3600

_NAMED = {
    **{f"{prefix}iB": 1024**n for n, prefix in reversed([*enumerate("KMGT", 1)])},
    **{f"{prefix}B": 1000**n for n, prefix in reversed([*enumerate("KMGT", 1)])},
}
UNITS = {
    "": 1,
    "b": 1,
    "bytes": 1,
    **{name.lower(): n for name, n in _NAMED.items()},
    **{name.lower().removesuffix("b"): n for name, n in _NAMED.items()},
}
_SIZE = re.compile(r"(\d{1,20}(?:\.\d{1,9})?) ?([a-z]*)", re.ASCII | re.IGNORECASE)
_BITS = re.compile(r"(\d{1,2}(?:\.\d{1,9})?) ?bpw", re.ASCII | re.IGNORECASE)
_MANY = re.compile(r"(\d{1,9})x(.*)", re.ASCII | re.IGNORECASE)


def count(text: str) -> int:
    """A whole number, 0 or more."""
    if not text.isdecimal() or len(text) > 12:
        raise argparse.ArgumentTypeError(f"{text[:20]!r}: a number, 0 or more")
    return int(text)


def positive(text: str) -> int:
    """A whole number, 1 or more; `32k` is 32,768."""
    digits = text.removesuffix("k").removesuffix("K")
    if not digits.isdecimal() or len(digits) > 12 or (number := int(digits) * (1 if digits == text else 1024)) < 1:
        raise argparse.ArgumentTypeError(f"{text[:20]!r}: a number from 1, such as 64 or 32k")
    return number


def lengths(text: str) -> tuple[int, ...]:
    """Whole numbers of 1 or more, separated by commas, from the smallest on; `4k` is 4,096."""
    return tuple(sorted({positive(part) for part in text.split(",")}))


def seconds(text: str) -> float:
    """Seconds, more than 0 and at most an hour."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text[:20]!r}: more than 0 and at most {MAX_SECONDS:,} seconds")
    return number


def cuts(text: str) -> list[int]:
    """Layers separated by commas."""
    return _integers(text, "layers separated by commas, such as 6,12")


def ids(text: str) -> list[int]:
    """Token ids separated by commas."""
    return _integers(text, "token ids separated by commas, such as 2,105,9")


def _integers(text: str, wanted: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: {wanted}") from None


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
        if each < LEAST_DEVICE:
            raise argparse.ArgumentTypeError(f"{each:,} bytes: did you mean {each}GiB?")
        out += [each] * n
    return out


def spelled(nbytes: int) -> str:
    """Bytes as `size` reads them back: from MB on in the unit that needs the fewest characters."""
    texts = [(f"{nbytes / unit:.3f}".rstrip("0").rstrip(".") + name, unit) for name, unit in _NAMED.items() if unit > 1024]
    return min([text for text, unit in texts if nbytes >= unit and size(text) == nbytes] or [str(nbytes)], key=len)


def spelled_devices(memory: Sequence[int]) -> str:
    """Devices as `sizes` reads them back."""
    runs = [(len([*run]), spelled(nbytes)) for nbytes, run in groupby(memory)]
    return ",".join(each if n == 1 else f"{n}x{each}" for n, each in runs)


def weights(text: str) -> Callable[[ModelConfig], WeightBytes]:
    """What a model's weights take: a total such as `40GiB`, or bits a parameter such as `4.5bpw`."""
    if bits := _BITS.fullmatch(text.strip()):
        if not 0 < (each := Fraction(bits[1])) <= 64:
            raise argparse.ArgumentTypeError(f"{text[:40]!r}: more than 0 and at most 64 bits a parameter, such as 4.5bpw")
        return partial(weights_of_bits, bits=each)
    try:
        total = size(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: a size such as 40GiB, or bits such as 4.5bpw") from None
    if total < LEAST_DEVICE:
        raise argparse.ArgumentTypeError(f"{total:,} bytes: did you mean {total}GiB, or {total}bpw?")
    return partial(weights_of_total, total=total)


def policy(args: argparse.Namespace) -> KvPolicy:
    """The formats and rings that were given, else those of the environment."""
    given = {"MEMRA_KV_K": args.kv_k, "MEMRA_KV_V": args.kv_v}
    chosen = KvPolicy.from_env({**os.environ, **{name: value for name, value in given.items() if value is not None}})
    return chosen if args.ring is None else replace(chosen, ring=args.ring)
