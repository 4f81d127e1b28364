"""The newest report of each service, as Prometheus reads it.

Counters count since the process began to report. A join node's own counts are stored with its state and come and go
with its partitions, which is no work done here and now.

Invariant: a counter only rises, and by no more than was done. Taking a report costs once a second, never per row;
asking for the figures changes nothing.
"""

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from services.runtime.metrics import ALL, BY_NAME, METRICS, Metric, samples

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LASTING = {"join_node"}  # roles whose counts outlive their process
FRESH = {"joinmesh_cpu_seconds_total", "joinmesh_dead_blocks_total"}  # those that do not, for all that
Series = tuple[str, tuple[str, ...]]


class Figures(Collector):
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._places: dict[str, Any] = {}  # instance -> when it started, and its partitions
        self._now: dict[str, dict[Series, float]] = {}  # instance -> what its newest report says
        self._risen: dict[Series, float] = {}

    def take(self, report: Mapping[str, Any]) -> None:
        """The next report of a service."""
        instance, role = str(report.get("instance")), report.get("service")
        if role not in ALL:
            return
        now = {(metric.name, labels): value for metric, labels, value in samples(report)}
        with self._lock:
            known, places = self._places.get(instance), (report.get("started_ms"), report.get("partitions"))
            before = self._now[instance] if known is not None and known[0] == places[0] else {}
            for series, value in now.items():
                if BY_NAME[series[0]].is_counter:
                    came_with = places != known and role in LASTING and series[0] not in FRESH
                    rise = 0.0 if came_with else value - before.get(series, 0.0)
                    self._risen[series] = self._risen.get(series, 0.0) + max(0.0, rise)
            self._now[instance], self._places[instance] = now, places

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        with self._lock:
            found: dict[str, dict[tuple[str, ...], float]] = {}
            for now in self._now.values():
                for series, value in now.items():
                    name, labels = series
                    found.setdefault(name, {})[labels] = self._risen.get(series, value)
        for metric in METRICS:
            if metric.name in found:
                yield _family(metric, found[metric.name].items())

    def text(self) -> bytes:
        """Everything, in Prometheus' text format, with what prometheus_client says of any process."""
        registry = CollectorRegistry()
        registry.register(self)
        registry.register(_Build())
        ProcessCollector(registry=registry)
        return generate_latest(registry)


class _Build(Collector):
    def collect(self) -> Iterator[GaugeMetricFamily]:
        from importlib.metadata import version

        told = GaugeMetricFamily("joinmesh_build_info", "The version that runs here; always 1", labels=["version"])
        told.add_metric([version("joinmesh")], 1)
        yield told


def _family(metric: Metric, series: Iterable[tuple[tuple[str, ...], float]]) -> GaugeMetricFamily | CounterMetricFamily:
    kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=list(metric.labels))
    for labels, value in series:
        family.add_metric(list(labels), value)
    return family
