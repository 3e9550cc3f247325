"""The fenced blocks of the documents, and the commands of those for a shell."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHOWN = ("", "text", "{toctree}", "{eval-rst}", "{command-help}", "{include}")
"""Fences that nobody runs: what a command prints, and what the documentation site puts in their place."""

_FENCE = re.compile(r"^(?P<ticks>```+)(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=ticks)\s*$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its document, the line where its text begins, its language, and the text."""

    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Those of a block for a shell, lines that go on joined to one."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [" ".join(line.split()) for line in lines if line.strip() and not line.lstrip().startswith("#")]


def documents() -> list[Path]:
    """Every document whose blocks a reader may run."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "cluster").glob("*.md"))]


def blocks(document: Path) -> Iterator[Block]:
    """The fenced blocks of a document, in order.

    Raises:
        ValueError: a fence that is indented, of tildes, or has no end: it would be overlooked.
    """
    text = document.read_text()
    if overlooked := re.findall(r"^\s*(?:```|~~~).*", _FENCE.sub("", text), re.MULTILINE):
        raise ValueError(f"{document}: fences {overlooked}: begin them at the line's beginning with ```, and end them so")
    for match in _FENCE.finditer(text):
        language = match["info"].split()[0] if match["info"].strip() else ""
        line = text.count("\n", 0, match.start("text")) + 1
        yield Block(str(document.relative_to(ROOT)), line, language, match["text"])
