"""What of a pipeline's figures goes to Prometheus, under which names, and the thread that takes it there.

`METRICS` is the one list of names: the exporter walks it, and what is drawn of them elsewhere is checked against it. Names,
units and types follow https://prometheus.io/docs/practices/naming. Whoever exports them may put a prefix before the names, as
Ray does: `ray_`.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ...errors import StageError
from .report import Report

log = logging.getLogger(__name__)

EVERY_S = 5.0
JOIN_S = 5.0
STATES = ("ready", "recovering", "failed")
PIPELINE = "pipeline"
"""The tag that every metric has: the pipeline's name."""

Figures = Mapping[str, Any]
"""`stats()` of a pipeline, if there are any just now, and its `health` among them."""
Samples = Iterable[tuple[tuple[Any, ...], float]]
"""Values, each behind the values of its tags."""


@dataclass(frozen=True)
class Metric:
    """One metric: its tags beside `PIPELINE`, and how its samples are read out of the figures. Where these lack what it reads,
    as while no stage answers, it has none."""

    name: str
    help: str
    tags: tuple[str, ...]
    read: Callable[[Figures], Samples]

    @property
    def counter(self) -> bool:
        """Whether it only grows; else it is a gauge."""
        return self.name.endswith("_total")

    def samples(self, figures: Figures) -> list[tuple[dict[str, str], float]]:
        """Tags and value of each."""
        try:
            found = list(self.read(figures))
        except KeyError:
            return []
        return [(dict(zip(self.tags, map(str, of), strict=True)), value) for of, value in found]


def _whole(name: str, key: str, help: str) -> Metric:
    """Of the pipeline as a whole."""
    return Metric(name, help, (), lambda figures: [((), figures[key])])


def _stage(name: str, key: str, help: str) -> Metric:
    """Of each stage."""
    return Metric(name, help, ("stage", "device"), lambda figures: [(_of(stage), stage[key]) for stage in figures["stages"]])


def _of(stage: Mapping[str, Any]) -> tuple[Any, str]:
    """A stage's tags: its number and its device, without what that is."""
    return stage["stage"], stage["device"].partition(" ")[0]


METRICS = (
    Metric(
        "memra_pp_state",
        "1 for the state that the pipeline is in: ready, recovering or failed; 0 for the others.",
        ("state",),
        lambda figures: [((state,), state == figures["health"]["state"]) for state in STATES],
    ),
    Metric(
        "memra_pp_recoveries_total",
        "Times that the stages were wired anew because one was lost.",
        (),
        lambda figures: [((), figures["health"]["recoveries"])],
    ),
    _whole("memra_pp_rebuilds_total", "rebuilds", "Sessions replayed from their tokens after a device or a stage had failed."),
    _whole("memra_pp_tokens_total", "tokens", "Tokens sampled by rounds and generations."),
    _whole("memra_pp_rounds_total", "rounds", "Rounds: steps that sample, with drafts or without."),
    _whole("memra_pp_drafted_tokens_total", "drafted", "Drafts that rounds have verified."),
    _whole("memra_pp_accepted_tokens_total", "accepted", "Drafts that were accepted."),
    _whole("memra_pp_traversals_total", "traversals", "Frames sent through the chain of stages."),
    _whole("memra_pp_hops_total", "hops", "Ways of frames to a stage or back, of those that came back."),
    _whole("memra_pp_hop_seconds_total", "hop_s", "Time that frames have spent on these ways, waiting included."),
    _whole("memra_pp_sessions", "sessions", "Sessions that are open."),
    Metric(
        "memra_pp_waiting_requests",
        "Requests in the queue for bytes.",
        (),
        lambda figures: [((), figures["admission"]["waiting"])],
    ),
    Metric(
        "memra_pp_verdicts_total",
        "Verdicts of admission: admitted, deferred, refused.",
        ("verdict",),
        lambda figures: [((name,), figures["admission"][name]) for name in ("admitted", "deferred", "refused")],
    ),
    Metric(
        "memra_pp_not_admitted_total",
        "Verdicts that did not admit, by the stage and the reason that bound.",
        ("verdict", "stage", "reason"),
        lambda figures: [
            ((why["verdict"], why["stage"], why["reason"]), why["count"]) for why in figures["admission"]["reasons"]
        ],
    ),
    Metric(
        "memra_pp_stage_cache_bytes",
        "Bytes that a stage has allocated for sessions, by what they are for.",
        ("stage", "device", "kind"),
        lambda figures: [
            ((*_of(stage), kind), size) for stage in figures["stages"] for kind, size in stage["bytes"].items()
        ],
    ),
    _stage("memra_pp_stage_arena_bytes", "arena_bytes", "Bytes that a stage's device has reserved for sessions."),
    _stage("memra_pp_stage_learned_bytes", "learned_bytes", "Bytes that a stage was seen to use beyond what was planned."),
    _stage("memra_pp_stage_sessions", "sessions", "Sessions that a stage holds."),
    _stage("memra_pp_stage_steps_total", "steps", "Forward passes of a stage."),
    _stage("memra_pp_stage_rows_total", "rows", "Rows that a stage has computed."),
    _stage("memra_pp_stage_faults_total", "faults", "Entries that a stage could not apply."),
    _stage("memra_pp_stage_busy_seconds_total", "busy_s", "Time in which a stage was at a frame."),
    Metric(
        "memra_pp_stage_wait_seconds_total",
        "Time in which a stage waited for a frame (in), or until the one before was sent (out).",
        ("stage", "device", "direction"),
        lambda figures: [
            ((*_of(stage), way), stage[f"wait_{way}_s"]) for stage in figures["stages"] for way in ("in", "out")
        ],
    ),
    _stage("memra_pp_stage_bubble_ratio", "bubble", "The part of its time in which a stage waited, since it was loaded."),
    Metric(
        "memra_pp_device_bytes",
        "A device's bytes for sessions: the budget, and what of it is reserved, learned, free, and free in one piece.",
        ("device", "kind"),
        lambda figures: [
            ((device["device"], kind), device[f"{kind}_bytes"])
            for device in figures["devices"]
            for kind in ("budget", "reserved", "learned", "free", "largest_free")
        ],
    ),
)  # fmt: skip


class Sink(Protocol):
    """Where values go."""

    def gauge(self, metric: Metric, tags: Mapping[str, str], value: float) -> None:
        """Sets a gauge."""

    def count(self, metric: Metric, tags: Mapping[str, str], more: float) -> None:
        """Adds to a counter what it has grown by, more than 0."""


class Exporter:
    """Takes the figures to a sink every few seconds, while the pipeline is there. Nothing of it is on a token's way."""

    def __init__(self, report: Report, sink: Sink) -> None:
        self._report, self._sink = report, sink
        self._seen: dict[tuple[str, ...], float] = {}
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()
        atexit.register(self.stop)  # for a pipeline that nobody closes: before what is behind the sink ends

    def stop(self) -> None:
        """See `Watcher`: the sink is not touched any more."""
        atexit.unregister(self.stop)
        with self._lock:
            self._stopped.set()

    def join(self) -> None:
        """See `Watcher`."""
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        failed = False
        while not self._stopped.is_set():
            try:
                self._poll()
            except Exception:
                log.log(logging.DEBUG if failed else logging.WARNING, "metrics could not be told; trying on", exc_info=True)
                failed = True
            self._stopped.wait(EVERY_S)

    def _poll(self) -> None:
        figures = self._figures()
        with self._lock:
            if not self._stopped.is_set():
                self._put(figures)

    def _figures(self) -> Figures:
        """What is known just now: less while the stages do not answer."""
        try:
            stats = self._report.stats()
        except StageError as error:
            log.debug("no stats for the metrics: %s", error)
            stats = {}
        return {**stats, "health": self._report.health()}

    def _put(self, figures: Figures) -> None:
        for metric in METRICS:
            for tags, value in metric.samples(figures):
                if not metric.counter:
                    self._sink.gauge(metric, tags, value)
                elif more := self._growth((metric.name, *tags.values()), value):
                    self._sink.count(metric, tags, more)

    def _growth(self, series: tuple[str, ...], value: float) -> float:
        """What a count has grown by; that of a stage which was replaced begins anew."""
        before = self._seen.get(series, 0)
        self._seen[series] = value
        return value - before if value >= before else value
