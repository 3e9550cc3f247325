"""Pictures for a page, in SVG. Across they are in percent and down in pixels, so that they are as wide as there is room and
their text keeps its size. Colours are the style sheet's, by class."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from xml.etree.ElementTree import Element

from .markup import element

HEIGHT, TOP, BOTTOM = 220, 26, 182
LEFT, RIGHT = 13.0, 98.0
BAR = 26
TICKS = 4
LINE = 13.0
ROOM_FOR_TEXT = 0.06
"""The share of a strip from which a part has room for a short name."""


@dataclass(frozen=True)
class Part:
    """A part of a strip: its size in any unit, its class, its name in the strip, and what is said of it."""

    size: float
    class_: str
    name: str
    says: str


def strip(parts: Sequence[Part], label: str, whole: float | None = None) -> Element:
    """Parts side by side, to scale; all of them fill it, or `whole` would."""
    total = whole or sum(part.size for part in parts) or 1.0
    drawn, at = [], 0.0
    for part in parts:
        share = part.size / total
        drawn.append(_titled(part.says, "rect", x=_percent(at), y=0, width=_percent(share), height=BAR, class_=part.class_))
        if part.name and share >= ROOM_FOR_TEXT:
            drawn.append(element("text", part.name, x=_percent(at + share / 2), y=BAR / 2 + 4, class_="in"))
        at += share
    return _picture(label, BAR, *drawn)


def lines(label: str, unit: str, axis: str, places: Sequence[str], series: Mapping[str, Sequence[float]]) -> Element:
    """A line a series, of the classes `line0` and `line1`, over places that are evenly apart; each point has its value beside
    it, unless another's is there."""
    top = ceiling(max((max(values) for values in series.values()), default=0.0))
    across = [LEFT + (RIGHT - LEFT) * (i + 0.5) / len(places) for i in range(len(places))]
    drawn = [
        *_grid(top, unit),
        *(element("text", place, x=f"{x:.2f}%", y=BOTTOM + 18) for x, place in zip(across, places, strict=True)),
    ]
    drawn.append(element("text", axis, x=f"{RIGHT}%", y=HEIGHT, class_="end"))
    taken: defaultdict[str, list[float]] = defaultdict(list)
    for n, (name, values) in enumerate(series.items()):
        points = [(x, _down(value, top)) for x, value in zip(across, values, strict=True)]
        for (x1, y1), (x2, y2) in pairwise(points):
            drawn.append(element("line", x1=f"{x1:.2f}%", y1=f"{y1:.1f}", x2=f"{x2:.2f}%", y2=f"{y2:.1f}", class_=f"line{n}"))
        for (x, y), place, value in zip(points, places, values, strict=True):
            says = f"{name}, {place} {axis}: {short(value)} {unit}"
            drawn.append(_titled(says, "circle", cx=f"{x:.2f}%", cy=f"{y:.1f}", r=4, class_=f"line{n}"))
            if all(abs(y - other) >= LINE for other in taken[place]):
                drawn.append(element("text", short(value), x=f"{x:.2f}%", y=f"{y - 9:.1f}", class_="value"))
                taken[place].append(y)
    return _picture(label, HEIGHT, *drawn)


def ceiling(value: float) -> float:
    """The least of 1, 2, 4 and 6 times a power of ten, or ten of those, that is not below `value`: it is divided into four."""
    power = 1.0
    while power > value > 0:
        power /= 10
    while 10 * power < value:
        power *= 10
    return next(factor * power for factor in (1, 2, 4, 6, 8, 10) if factor * power >= value)


def short(value: float) -> str:
    """A number in three digits or so."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def _grid(top: float, unit: str) -> list[Element]:
    drawn = [element("text", unit, x=0, y=12, class_="start")]
    for i in range(TICKS + 1):
        y = f"{_down(top * i / TICKS, top):.1f}"
        drawn.append(element("line", x1=f"{LEFT}%", y1=y, x2=f"{RIGHT}%", y2=y, class_="grid"))
        drawn.append(element("text", f"{top * i / TICKS:,.6g}", x=f"{LEFT - 1.5}%", y=float(y) + 4, class_="end"))
    return drawn


def _down(value: float, top: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * value / top


def _picture(label: str, height: float, *drawn: Element) -> Element:
    return element("svg", element("title", label), *drawn, role="img", aria_label=label, width="100%", height=height)


def _titled(says: str, tag: str, **attributes: object) -> Element:
    return element(tag, element("title", says), **attributes)


def _percent(share: float) -> str:
    return f"{100 * share:.3f}%"
