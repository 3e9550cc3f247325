"""What a bench found: a table of figures, each with its peer or floor beside it; also as JSON, and as a plot."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WIDE = 16
"""A sweep over more than so many times its least point is drawn on a logarithmic axis."""
HEADINGS = ("what", "at", "value", "unit", "peer", "", "ratio", "target", "met")


@dataclass(frozen=True)
class Row:
    """A figure: `what` was measured, `at` which point of a sweep, and the same of its `peer`, in the same unit.

    The target bounds the ratio, or the value where there is no peer.
    """

    what: str
    value: float
    unit: str
    at: float | None = None
    peer: str = ""
    peer_value: float | None = None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def ratio(self) -> float | None:
        """The value over the peer's."""
        return self.value / self.peer_value if self.peer_value else None

    @property
    def target(self) -> str:
        """What the ratio should be; nothing if there is no target."""
        bounds = ((">=", self.at_least), ("<=", self.at_most))
        return ", ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None if there is none."""
        if not self.target:
            return None
        figure = self.value if self.ratio is None else self.ratio
        return (self.at_least is None or figure >= self.at_least) and (self.at_most is None or figure <= self.at_most)

    def as_json(self) -> dict[str, Any]:
        """All of it, by name."""
        names = ("what", "at", "value", "unit", "peer", "peer_value", "ratio", "target", "met")
        return {name: getattr(self, name) for name in names}

    def cells(self) -> tuple[str, ...]:
        """Its line of the table."""
        ratio = "" if self.ratio is None else f"{self.ratio:.3f}"
        peer = "" if self.peer_value is None else _number(self.peer_value)
        met = {None: "", True: "yes", False: "NO"}[self.met]
        at = "" if self.at is None else f"{self.at:g}"
        return self.what, at, _number(self.value), self.unit, peer, self.peer, ratio, self.target, met


@dataclass
class Report:
    """Figures of one bench. `axis` names what `Row.at` counts, `inputs` what the figures rest on."""

    title: str
    axis: str = ""
    inputs: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def add(self, what: str, value: float, unit: str, **more: Any) -> None:
        """Adds a `Row`."""
        self.rows.append(Row(what, value, unit, **more))

    @property
    def met(self) -> bool:
        """Whether no target is missed."""
        return all(row.met is not False for row in self.rows)

    def give_out(self, args: argparse.Namespace) -> None:
        """Prints the table, unless JSON is to be printed; writes the files that were asked for."""
        rows = [row.as_json() for row in self.rows]
        text = json.dumps({"title": self.title, "axis": self.axis, "inputs": self.inputs, "rows": rows}, indent=1)
        print(text if args.json == "-" else self.table(), flush=True)
        if args.json not in (None, "-"):
            Path(args.json).write_text(text + "\n")
        if args.plot is not None:
            plot(self, args.plot)

    def table(self) -> str:
        """Aligned columns: texts to the left, numbers to the right."""
        lines = [(*HEADINGS[:1], self.axis, *HEADINGS[2:]), *(row.cells() for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        right = (False, True, True, False, True, False, True, False, False)
        aligned = [
            "  ".join(
                cell.rjust(width) if to_right else cell.ljust(width)
                for cell, width, to_right in zip(line, widths, right, strict=True)
                if width
            ).rstrip()
            for line in lines
        ]
        return "\n".join((self.title, *aligned))


def parser(doc: str | None) -> argparse.ArgumentParser:
    """The options that all benches have; `doc` is the module's, whose first line says what it measures."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--quick", action="store_true", help="small and short, to see that it works: the figures mean nothing")
    add_outputs(made)
    return made


def add_outputs(made: argparse.ArgumentParser) -> None:
    """The options that say where `Report.give_out` puts what was found."""
    made.add_argument("--json", metavar="FILE", help="write the figures there; - prints them instead of the table")
    made.add_argument("--plot", metavar="FILE.png", type=_plot_file, help="draw them there; needs the extra `plot`")


def integers(text: str) -> tuple[int, ...]:
    """An option's `1,2,4`."""
    numbers = tuple(int(part) for part in text.split(","))
    if min(numbers) < 1:
        raise ValueError(text)
    return numbers


def say(text: str) -> None:
    """What is being done, where it spoils neither table nor JSON."""
    print(text, file=sys.stderr, flush=True)


def plot(report: Report, file: str) -> None:
    """A panel a unit: sweeps as lines, their peers dashed, other figures as bars."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    units = list(dict.fromkeys(row.unit for row in report.rows))
    figure, panels = pyplot.subplots(1, len(units), figsize=(7 * len(units), 5), squeeze=False, layout="constrained")
    for unit, panel in zip(units, panels[0], strict=True):
        rows = [row for row in report.rows if row.unit == unit]
        if all(row.at is not None for row in rows):
            _draw_lines(panel, rows)
            panel.set(xlabel=report.axis, ylabel=unit)
        else:
            _draw_bars(panel, rows)
            panel.set(xlabel=unit)
    figure.suptitle(report.title, wrap=True)
    figure.savefig(file)
    pyplot.close(figure)


def _draw_lines(panel: Any, rows: Sequence[Row]) -> None:
    for what in dict.fromkeys(row.what for row in rows):
        of_line = [row for row in rows if row.what == what]
        values = {row.at: row.value for row in of_line}
        [line] = panel.plot(list(values), list(values.values()), marker="o", label=what)
        for peer in dict.fromkeys(row.peer for row in of_line if row.peer):
            peers = {row.at: row.peer_value for row in of_line if row.peer == peer}
            panel.plot(list(peers), list(peers.values()), "--.", color=line.get_color(), alpha=0.6, label=f"{what}: {peer}")
    panel.set_ylim(bottom=0)
    if max(row.at for row in rows) > WIDE * min(row.at for row in rows):
        panel.set_xscale("log", base=2)
    panel.legend(fontsize="small")


def _draw_bars(panel: Any, rows: Sequence[Row]) -> None:
    bars: dict[str, tuple[float, str]] = {}
    for row in rows:
        name = row.what if row.at is None else f"{row.what}, {row.at:g}"
        bars[name] = row.value, "C0"
        if row.peer_value is not None:
            bars[f"{name}: {row.peer}"] = row.peer_value, "C7"
    values, colors = zip(*bars.values(), strict=True)
    drawn = panel.barh(list(bars), values, color=colors)
    panel.bar_label(drawn, [_number(value) for value in values], padding=3)
    panel.margins(x=0.2)
    panel.invert_yaxis()


def _plot_file(file: str) -> str:
    """Refused before anything is measured if it could not be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise argparse.ArgumentTypeError("a plot needs matplotlib: pip install 'memra-pp[plot]'") from None
    return file


def _number(value: float) -> str:
    """Four digits, more where they are whole."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
