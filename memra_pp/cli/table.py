"""Text for people: aligned columns, and bytes to three digits."""

from __future__ import annotations

from collections.abc import Sequence


def columns(*rows: Sequence[str], left: Sequence[int] = ()) -> list[str]:
    """Lines with the cells of every row one below the other, aligned right, or left in the columns `left`."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def human(nbytes: int) -> str:
    """Bytes in the unit that leaves up to three digits before the point, and three in all: `17.3 GiB`."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while abs(value) >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    digits = 0 if units[0] == "B" or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f} {units[0]}"


def beside(*blocks: Sequence[str]) -> list[str]:
    """Blocks of as many lines each, next to each other."""
    widths = [max(map(len, block)) for block in blocks]
    return [
        "   ".join(line.ljust(width) for line, width in zip(lines, widths, strict=True)).rstrip()
        for lines in zip(*blocks, strict=True)
    ]
