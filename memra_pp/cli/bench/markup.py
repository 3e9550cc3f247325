"""HTML and SVG as trees: what goes in as text comes out as text, whatever it holds, because one serialiser escapes it all."""

from __future__ import annotations

import json
from typing import Any
from xml.etree.ElementTree import Element, tostring


def element(tag: str, *children: Element | str, **attributes: object) -> Element:
    """An element. In the names of attributes `_` stands for `-`, and one at the end for nothing: `class_`, `aria_label`."""
    made = Element(tag, {name.rstrip("_").replace("_", "-"): str(value) for name, value in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + child
        else:
            made.text = (made.text or "") + child
    return made


def data(identifier: str, value: Any) -> Element:
    """A value in JSON that a page carries and does not run. The text of a script is not escaped in HTML, so that a `<` in it,
    which might end it, is spelled as JSON can."""
    text = json.dumps(value, indent=1).replace("<", "\\u003c")
    return element("script", text, type="application/json", id=identifier)


def document(root: Element) -> str:
    """The whole page."""
    return "<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html") + "\n"
