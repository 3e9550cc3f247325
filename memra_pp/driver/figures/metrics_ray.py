"""Metrics by way of Ray: every node exports what its processes have told it, under `ray_` and the name, for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.util.metrics import Counter, Gauge

from .metrics import METRICS, PIPELINE, Exporter, Metric
from .report import Report


def exporters(pipeline: str, report: Report) -> list[Exporter]:
    """What exports a pipeline's metrics by the Ray that this process uses; nothing if that exports none, as where
    `ray[default]` is not installed."""
    return [Exporter(report, RaySink(pipeline))] if exports() else []


def exports() -> bool:
    """Whether this process's node exports metrics."""
    here = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return any(node["NodeID"] == here and node.get("MetricsExportPort", 0) > 0 for node in nodes)


class RaySink:
    """Ray's metrics of one pipeline."""

    def __init__(self, pipeline: str) -> None:
        self.pipeline = pipeline
        tags = {metric.name: (PIPELINE, *metric.tags) for metric in METRICS}
        own = {PIPELINE: pipeline}
        self._gauges = {m.name: Gauge(m.name, m.help, tags[m.name]).set_default_tags(own) for m in METRICS if not m.counter}
        self._counters = {m.name: Counter(m.name, m.help, tags[m.name]).set_default_tags(own) for m in METRICS if m.counter}

    def gauge(self, metric: Metric, tags: Mapping[str, str], value: float) -> None:
        """See `Sink`."""
        self._gauges[metric.name].set(value, dict(tags))

    def count(self, metric: Metric, tags: Mapping[str, str], more: float) -> None:
        """See `Sink`."""
        self._counters[metric.name].inc(more, dict(tags))
