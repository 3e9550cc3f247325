"""The sections of a bench's page that have pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from xml.etree.ElementTree import Element

from ..table import human
from .blocks import beside, figure, legend, row, section, table
from .charts import Part, lines, short, strip
from .figures import Bench, Decode, Hop, Prefill, Rollback, Speculation, Stage

COLOURS = 8
"""Stages have the classes `stage0` to `stage7`, over and over."""

TIMES = {"busy": "busy", "wait-in": "waiting for a frame", "wait-out": "waiting to send"}


def fence(bench: Bench) -> Element:
    """What each stage has of the model's layers and weights, of the cache and of the work."""
    stages, last = bench.figures.stages, bench.figures.decode[-1]
    rows: dict[str, list[tuple[float, str]]] = {
        "layers": [(len(range(*stage.layers)), _layers(stage)) for stage in stages],
        "weights": [(n, human(n)) for stage in stages if (n := stage.weight_bytes) is not None],
        "cache": [(stage.allocated_bytes, human(stage.allocated_bytes)) for stage in stages],
        "work": [(times.busy_s, f"busy for {times.busy_s:.2f} s") for times in last.stages],
    }
    note = (
        f"The fence is {list(bench.launch.fence)}, cut: {bench.launch.cut_by}. A colour is a stage: its share of the layers, "
        "of the weights in the model's files (the embedding with the first, the head with the last), of the cache, and of the "
        f"work while {_count(last.sessions, 'session')} decode. The stage with the most work sets the pace."
    )
    bars = [row(name, _shares(name, sizes), "") for name, sizes in rows.items() if sizes]
    names = [(_colour(stage.stage), f"stage {stage.stage}: {_layers(stage)}, {stage.device}") for stage in stages]
    return section("The fence", note, *bars, legend(*names))


def decode(found: Sequence[Decode]) -> Element:
    """Throughput and latency against sessions."""
    places = [str(point.sessions) for point in found]
    rates = {"decode": [point.tokens_per_s for point in found]}
    steps = {"median": [point.p50_ms for point in found], "99th percentile": [point.p99_ms for point in found]}
    cells = [(str(d.sessions), f"{d.tokens_per_s:,.1f}", f"{d.p50_ms:.2f}", f"{d.p99_ms:.2f}", f"{d.steps:,}") for d in found]
    return section(
        "Decode",
        "Sessions that decode at the same time. A step is what one of them waits from a token to its next.",
        beside(
            figure("Throughput", lines("Tokens a second against sessions", "tok/s", "sessions", places, rates)),
            figure(
                "Step latency",
                lines("Milliseconds a step against sessions", "ms", "sessions", places, steps),
                legend(*((f"line{i}", name) for i, name in enumerate(steps))),
            ),
        ),
        table("Decode by sessions", ("sessions", "tok/s", "p50 ms", "p99 ms", "steps"), cells),
    )


def stage_times(found: Sequence[Decode]) -> Element:
    """Where each stage's time goes, with the fewest sessions and with the most."""
    shown = list({point.sessions: point for point in (found[0], found[-1])}.values())
    return section(
        "Where each stage's time goes",
        "While sessions decode. With one session a pipeline's stages wait for each other; with as many as there are stages, or "
        "more, each can work on another.",
        beside(*(figure(_count(point.sessions, "session"), *_time_rows(point)) for point in shown)),
        legend(*TIMES.items()),
    )


def stage_bytes(stages: Sequence[Stage], sessions: int) -> Element:
    """What the sessions take on every stage, planned and allocated."""
    sizes = {f"stage {stage.stage}": stage.allocated_bytes for stage in stages}
    cells = [
        (
            str(stage.stage),
            "-" if stage.weight_bytes is None else human(stage.weight_bytes),
            f"{stage.planned_bytes:,}",
            f"{stage.allocated_bytes:,}",
            human(stage.arena_bytes),
        )
        for stage in stages
    ]
    return section(
        "Bytes by stage",
        f"With {_count(sessions, 'session')} open: planned is what the sizing functions said before, allocated what the "
        "stage's device counts; the arena is what it may come to.",
        *_bars(sizes, lambda value: human(int(value))),
        table("Bytes by stage", ("stage", "weights", "planned B", "allocated B", "arena"), cells),
    )


def prefill(found: Sequence[Prefill]) -> Element:
    """Throughput against the length of prompts."""
    places, rates = [f"{point.rows:,}" for point in found], {"prefill": [point.tokens_per_s for point in found]}
    cells = [(f"{p.rows:,}", f"{p.tokens_per_s:,.1f}", f"{p.seconds:.3f}", str(p.runs)) for p in found]
    return section(
        "Prefill",
        "One prompt at a time, from its first token to the row after its last: the median of some runs.",
        beside(
            figure("Throughput", lines("Tokens a second against the prompt's length", "tok/s", "prompt tokens", places, rates)),
            table("Prefill by length", ("prompt tokens", "tok/s", "seconds", "runs"), cells),
        ),
    )


def hops(found: Sequence[Hop]) -> Element:
    """How long frames take from process to process."""
    medians = {f"{hop.source} → {hop.target}": hop.median_us for hop in found}
    cells = [
        (name, f"{hop.frames:,}", f"{hop.median_us:,.1f}", f"{hop.p99_us:,.1f}")
        for name, hop in zip(medians, found, strict=True)
    ]
    return section(
        "Hops",
        "One session decodes. The time from when a frame was computed, or the driver began to send it, until all of it was on "
        "the next; the bars are medians.",
        *_bars(medians, lambda value: f"{short(value)} µs"),
        table("Hop times", ("hop", "frames", "median µs", "p99 µs"), cells),
    )


def rounds(rollbacks: Sequence[Rollback], speculations: Sequence[Speculation]) -> Element:
    """What going back costs, and what speculation brings."""
    figures = [
        figure("Snapshot and rollback", *_bars(_round_times(found), lambda value: f"{short(value)} ms")) for found in rollbacks
    ]
    if speculations:
        rates = {found.drafter: found.tokens_per_s for found in speculations}
        cells = [(s.drafter, str(s.drafted), str(s.accepted), f"{s.tokens_per_traversal:.2f}") for s in speculations]
        header = ("drafter", "drafted", "accepted", "tokens a traversal")
        bars = _bars(rates, lambda value: f"{short(value)} tok/s")
        figures.append(figure("Speculation", *bars, table("Speculation", header, cells)))
    return section(
        "Rounds",
        "Medians, one session. A snapshot and a rollback ride with the next step and cost no traversal of their own. The text "
        "speculated on repeats itself: what drafts bring depends on the text.",
        beside(*figures),
    )


def _round_times(found: Rollback) -> Mapping[str, float]:
    return {
        "plain decode": found.decode_ms,
        f"snapshot, verify {found.drafts + 1}": found.verify_ms,
        f"back, {found.accepted} kept": found.back_ms,
    }


def _bars(values: Mapping[str, float], said: Callable[[float], str]) -> list[Element]:
    """A bar a value, the longest as long as there is room."""
    most = max(values.values())
    parts = {name: Part(value, "one", "", f"{name}: {said(value)}") for name, value in values.items()}
    return [row(name, strip([part], part.says, most), said(part.size)) for name, part in parts.items()]


def _shares(name: str, sizes: Sequence[tuple[float, str]]) -> Element:
    parts = [Part(size, _colour(s), str(s), f"stage {s}: {says}") for s, (size, says) in enumerate(sizes)]
    return strip(parts, f"{name}: " + "; ".join(part.says for part in parts))


def _time_rows(point: Decode) -> list[Element]:
    rows = []
    for s, times in enumerate(point.stages):
        seconds = dict(zip(TIMES, (times.busy_s, times.wait_in_s, times.wait_out_s), strict=True))
        parts = [Part(spent, class_, "", f"stage {s} {TIMES[class_]}: {spent:.2f} s") for class_, spent in seconds.items()]
        rows.append(
            row(f"stage {s}", strip(parts, "; ".join(part.says for part in parts)), f"{100 - 100 * times.bubble:.0f} % busy")
        )
    return rows


def _colour(stage: int) -> str:
    return f"stage{stage % COLOURS}"


def _layers(stage: Stage) -> str:
    first, end = stage.layers
    return f"layer {first}" if end == first + 1 else f"layers {first}-{end - 1}"


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"
