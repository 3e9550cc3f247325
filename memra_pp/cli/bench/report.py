"""The figures of a bench as a page: one HTML file with style, pictures and figures in it, and no script that runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from ..table import human
from . import sections
from .blocks import facts, section, table
from .charts import short
from .figures import Bench
from .markup import data, document, element

STYLE = Path(__file__).with_name("report.css")

CSP = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""The browser is told to fetch nothing and to run nothing."""


def page(bench: Bench) -> str:
    """The whole page. Every text in it that is from outside is escaped where the page is written out, see `markup`."""
    title = f"memra-pp bench: {bench.model.name}"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=CSP),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", STYLE.read_text(encoding="utf-8")),
    )
    body = element("body", _header(bench, title), element("main", *_sections(bench)), data("figures", asdict(bench)))
    return document(element("html", head, body, lang="en"))


def _header(bench: Bench, title: str) -> Element:
    model = bench.model
    line = f"{model.arch}, {model.layers} layers, on {bench.machine.cpu}, {bench.machine.cores} cores, {bench.began}"
    return element("header", element("h1", title), element("p", line), facts(*_headline(bench), class_="heads"))


def _headline(bench: Bench) -> Iterator[tuple[str, str, str]]:
    """The figures that are looked for first: name, number and unit."""
    figures = bench.figures
    last = figures.decode[-1]
    if figures.prefill:
        best = max(figures.prefill, key=lambda point: point.tokens_per_s)
        yield f"prefill, {best.rows:,} tokens", short(best.tokens_per_s), "tok/s"
    for point in figures.decode[:1] if last.sessions == 1 else (figures.decode[0], last):
        yield f"decode, {point.sessions} at a time", short(point.tokens_per_s), "tok/s"
    yield f"step, {last.sessions} at a time", short(last.p50_ms), f"ms, p99 {short(last.p99_ms)} ms"
    yield "stages", str(len(figures.stages)), f"cut: {bench.launch.cut_by}"
    yield "loaded in", f"{bench.launch.load_s:.1f}", "s"


def _sections(bench: Bench) -> Iterator[Element]:
    figures = bench.figures
    yield sections.fence(bench)
    yield sections.decode(figures.decode)
    yield sections.stage_times(figures.decode)
    if figures.prefill:
        yield sections.prefill(figures.prefill)
    yield sections.stage_bytes(figures.stages, figures.held.sessions)
    if figures.hops:
        yield sections.hops(figures.hops)
    if figures.rollback or figures.speculation:
        yield sections.rounds(figures.rollback, figures.speculation)
    if figures.left_out:
        reasons = element("ul", *(element("li", why) for why in figures.left_out))
        yield section("Left out", "What was not measured, and why.", reasons)
    yield _made(bench)
    yield _everything(bench)


def _made(bench: Bench) -> Element:
    """How to get these figures again."""
    machine, launch, figures = bench.machine, bench.launch, bench.figures
    weights = "" if bench.model.weight_bytes is None else f", {human(bench.model.weight_bytes)} of weights"
    told = (
        ("model", bench.model.name, f"{bench.model.arch}, {bench.model.layers} layers{weights}"),
        ("stages", str(len(figures.stages)), f"{launch.backend}, cut: {launch.cut_by}"),
        ("K/V", ", ".join(launch.kv), f"rings {launch.ring}"),
        ("measured", f"in {figures.measured_s:.0f} s", f"{bench.began}, {figures.warm_s:.1f} s of first steps before"),
        (
            "machine",
            machine.cpu,
            f"{machine.cores} cores, {human(machine.memory_bytes)}, load {machine.load:.1f} before, {machine.system}",
        ),
        ("versions", "", ", ".join(f"{name} {of}" for name, of in machine.versions.items())),
    )
    note = "The machine is the one that the command ran on; the stages of a cluster may be elsewhere."
    return section("How it was made", note, element("pre", element("code", bench.command)), facts(*told))


def _everything(bench: Bench) -> Element:
    cells = [(name, str(value)) for name, value in _flat("", asdict(bench))]
    summary = element("summary", f"All {len(cells)} figures")
    note = element("p", "The same in JSON is in this file: the script element with the id ", element("code", "figures"), ".")
    note.set("class", "note")
    return element("section", element("details", summary, note, table("Everything", ("name", "value"), cells, "all")))


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a tree, by their paths."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else key, inner)
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _flat(f"{name}[{i}]", inner)
    else:
        yield name, value
