"""What a pipeline answers, as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import PurePath
from typing import Any

from .table import columns, human

BAR_WIDTH = 10

Answer = Mapping[str, Any]
"""What `driver.figures.status.ask` gives: `health` is None where the driver does not answer, `stats` where its stages do not;
then `why` says why."""


def listed(answers: Sequence[Answer]) -> list[str]:
    """A line a pipeline."""
    header = ("pipeline", "model", "stages", "sessions", "state", "up")
    return columns(header, *map(_line, answers), left=(0, 1, 4))


def shown(now: Answer, before: Answer | None = None) -> list[str]:
    """All of one pipeline; with what it has answered before, also what it does a second."""
    lines = [_title(now), *_troubles(now)]
    if (stats := now["stats"]) is not None:
        past = before if before is not None and before["stats"] is not None else None
        since = _Since(now, past)
        lines += ["", _doing(stats, since), "", *_stages(stats, since), "", *_devices(stats), "", *_admission(stats)]
    return lines


class _Since:
    """What has been done since an answer before, a second."""

    def __init__(self, now: Answer, before: Answer | None) -> None:
        self._seconds = 0.0 if before is None else now["at"] - before["at"]
        self._before = {} if before is None else before["stats"]

    def rate(self, stats: Mapping[str, Any], *keys: Any) -> float | None:
        """By how much a figure has grown a second; None if that is not known."""
        if self._seconds <= 0:
            return None
        now: Any = stats
        then: Any = self._before
        for key in keys:
            now, then = now[key], then[key]
        return max(0.0, float(now - then) / self._seconds)


def _line(answer: Answer) -> tuple[str, ...]:
    health, stats = answer["health"], answer["stats"]
    if health is None:
        return answer["name"], "", "", "", "does not answer", ""
    some = ("", "") if stats is None else (str(len(stats["stages"])), str(stats["sessions"]))
    return answer["name"], _model(answer), *some, health["state"], _up(answer)


def _title(answer: Answer) -> str:
    if answer["health"] is None:
        return f"{answer['name']}  does not answer"
    return f"{_model(answer)}  {answer['name']}  {answer['backend']}  {answer['health']['state']}  up {_up(answer)}"


def _troubles(answer: Answer) -> list[str]:
    """What is wrong, and was."""
    lines, health = [], answer["health"]
    if health is not None and health["cause"] is not None:
        lines.append(f"cause: {health['cause']}")
    if health is not None and (last := health["last_recovery"]) is not None:
        lines.append(f"recoveries: {health['recoveries']}, the last in {last['took_s']:.1f} s: {last['lost']}")
    if answer["stats"] is None:
        lines.append(f"no figures just now: {answer['why']}")
    return lines


def _doing(stats: Mapping[str, Any], since: _Since) -> str:
    parts = [f"{stats['sessions']} session{'' if stats['sessions'] == 1 else 's'}", f"{stats['tokens']:,} tokens"]
    if (rate := since.rate(stats, "tokens")) is not None:
        parts.append(f"{rate:,.1f} tok/s")
    if stats["drafted"]:
        parts.append(f"{100 * stats['accepted'] / stats['drafted']:.0f} % of {stats['drafted']:,} drafts accepted")
    if stats["hops"]:
        parts.append(f"{1e6 * stats['hop_s'] / stats['hops']:,.0f} us a hop")
    return ", ".join(parts)


def _stages(stats: Mapping[str, Any], since: _Since) -> list[str]:
    header = (
        *("stage", "layers", "device", "busy", "bubble %", "sessions", "rows/s"),
        *("K", "V", "recurrent", "snapshots", "other", "learned"),
    )
    rows = []
    for s, stage in enumerate(stats["stages"]):
        held = stage["bytes"]
        busy, rate = since.rate(stats, "stages", s, "busy_s"), since.rate(stats, "stages", s, "rows")
        rows.append((
            str(stage["stage"]),
            f"{stage['layers'][0]}-{stage['layers'][1] - 1}",
            stage["device"],
            _bar(1 - stage["bubble"] if busy is None and stage["steps"] else busy or 0.0),
            f"{100 * stage['bubble']:.0f}",
            str(stage["sessions"]),
            "" if rate is None else f"{rate:,.0f}",
            *(human(held[kind]) for kind in ("k", "v", "recurrent", "snapshot")),
            human(held["length"] + held["padding"]),
            human(stage["learned_bytes"]),
        ))  # fmt: skip
    return columns(header, *rows, left=(2, 3))


def _devices(stats: Mapping[str, Any]) -> list[str]:
    kinds = ("budget", "reserved", "learned", "free", "largest_free")
    rows = [(device["device"], *(human(device[f"{kind}_bytes"]) for kind in kinds)) for device in stats["devices"]]
    return columns(("device", *(kind.replace("_", " ") for kind in kinds)), *rows, left=(0,))


def _admission(stats: Mapping[str, Any]) -> list[str]:
    told = stats["admission"]
    counts = ", ".join(f"{told[name]:,} {name}" for name in ("admitted", "deferred", "refused"))
    reasons = [f"  {why['verdict']} by stage {why['stage']}, {why['reason']}: {why['count']:,}" for why in told["reasons"]]
    return [f"admission: {counts}, {told['waiting']:,} waiting", *reasons]


def _bar(part: float) -> str:
    filled = round(BAR_WIDTH * min(1.0, part))
    return "#" * filled + "." * (BAR_WIDTH - filled)


def _model(answer: Answer) -> str:
    return PurePath(answer["model"]).stem


def _up(answer: Answer) -> str:
    return str(timedelta(seconds=int(answer["up_s"])))
