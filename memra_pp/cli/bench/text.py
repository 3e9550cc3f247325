"""The figures of a bench as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from ..table import columns, human
from .figures import Bench, Figures


def tables(bench: Bench) -> str:
    """All of them, what was measured first; the summary is the last line."""
    figures = bench.figures
    blocks = [
        _prefill(figures),
        _decode(figures),
        _stages(figures),
        _hops(figures),
        _rounds(figures),
        [f"left out: {why}" for why in figures.left_out],
        [_summary(bench)],
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _prefill(figures: Figures) -> list[str]:
    rows = [(f"{p.rows:,}", f"{p.tokens_per_s:,.1f}", f"{p.seconds:.3f}", str(p.runs)) for p in figures.prefill]
    return _table(("prompt", "tok/s", "seconds", "runs"), rows)


def _decode(figures: Figures) -> list[str]:
    busy = [f"busy {stage.stage} %" for stage in figures.stages]
    rows = [
        (
            str(d.sessions),
            f"{d.tokens_per_s:,.1f}",
            f"{d.p50_ms:.2f}",
            f"{d.p99_ms:.2f}",
            *(f"{100 - 100 * stage.bubble:.0f}" for stage in d.stages),
        )
        for d in figures.decode
    ]
    return _table(("sessions", "tok/s", "step p50 ms", "p99 ms", *busy), rows)


def _stages(figures: Figures) -> list[str]:
    rows = [
        (
            str(s.stage),
            f"{s.layers[0]}-{s.layers[1] - 1}",
            s.device,
            "-" if s.weight_bytes is None else human(s.weight_bytes),
            f"{s.planned_bytes:,}",
            f"{s.allocated_bytes:,}",
        )
        for s in figures.stages
    ]
    return _table(("stage", "layers", "device", "weights", "planned B", "allocated B"), rows)


def _hops(figures: Figures) -> list[str]:
    rows = [(f"{hop.source} to {hop.target}", f"{hop.median_us:,.0f}", f"{hop.p99_us:,.0f}") for hop in figures.hops]
    return _table(("hop", "median us", "p99 us"), rows, left=(0,))


def _rounds(figures: Figures) -> list[str]:
    said = [
        f"rollback: decode {r.decode_ms:.2f} ms, snapshot and verify of {r.drafts + 1} {r.verify_ms:.2f} ms, "
        f"decode after it, {r.accepted} kept, {r.back_ms:.2f} ms"
        for r in figures.rollback
    ]
    return said + [
        f"speculation {s.drafter}, on a text that repeats itself: {s.tokens_per_s:,.1f} tok/s, "
        f"{s.accepted} of {s.drafted} drafts accepted, {s.tokens_per_traversal:.2f} tokens a traversal"
        for s in figures.speculation
    ]


def _summary(bench: Bench) -> str:
    figures, launch = bench.figures, bench.launch
    parts = [
        f"{bench.model.name}: {len(figures.stages)} stage{'' if len(figures.stages) == 1 else 's'}, cut: {launch.cut_by}",
        f"K/V {', '.join(launch.kv)}",
        f"loaded in {launch.load_s:.1f} s",
        f"measured in {figures.measured_s:.0f} s",
        bench.machine.cpu,
    ]
    return ", ".join(parts)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    return columns(header, *rows, left=left) if rows else []
