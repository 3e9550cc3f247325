"""What a bench's page is put together from."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from .markup import element


def section(title: str, note: str, *children: Element) -> Element:
    """A card with a heading and a line or two that say how to read it."""
    return element("section", element("h2", title), element("p", note, class_="note"), *children)


def beside(*figures: Element) -> Element:
    """Figures next to each other, or one below the other where there is no room."""
    return element("div", *figures, class_="beside")


def figure(title: str, *children: Element) -> Element:
    """A picture under its title."""
    return element("figure", element("h3", title), *children)


def row(name: str, picture: Element, value: str) -> Element:
    """A line of a chart: what it is of, its bar, and the number."""
    return element("div", element("span", name), element("span", value), picture, class_="row")


def legend(*names: tuple[str, str]) -> Element:
    """What the colours mean: classes, and what has them."""
    entries = [element("li", element("i", class_=class_, aria_hidden="true"), name) for class_, name in names]
    return element("ul", *entries, class_="legend")


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]], class_: str = "") -> Element:
    """A table that scrolls where it is wider than the page."""
    head = element("tr", *(element("th", cell, scope="col") for cell in header))
    body = [element("tr", *(element("td", cell) for cell in cells)) for cells in rows]
    whole = element("table", element("caption", caption), element("thead", head), element("tbody", *body), class_=class_)
    return element("div", whole, class_="scroll", tabindex=0, role="region", aria_label=caption)


def facts(*of: tuple[str, str, str], class_: str = "facts") -> Element:
    """Names, what they are, and a unit or a remark to each."""
    pairs = [element("div", element("dt", name), element("dd", value, " ", element("small", more))) for name, value, more in of]
    return element("dl", *pairs, class_=class_)
