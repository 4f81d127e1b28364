"""Reads `<mesh>.report`: the latest word of each service instance.

Invariant: a report is what a service said about itself; nothing is added but its age. Reading never joins a consumer
group and never commits, so any number of people may look at the same time.
"""

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from confluent_kafka import OFFSET_END, Consumer, TopicPartition

from schemas import topics
from schemas.mesh import Mesh
from services.runtime.kafka import REPORT_READER, client_config, reach

Report = dict[str, Any]
TAIL = 3_000  # records; some minutes of a large mesh


class ReportReader:
    """Follows the report topic; `latest` maps an instance (`ingest-0`, `paid_orders.j1-0`) to its newest report."""

    def __init__(self, mesh: Mesh) -> None:
        self.topic = topics.report(mesh.name)
        self.latest: dict[str, Report] = {}
        self.exists = self.topic in reach(mesh).topics
        self._consumer = Consumer(
            client_config(
                mesh,
                group_id=f"{mesh.name}.{REPORT_READER}",
                enable_auto_commit=False,
                auto_offset_reset="earliest",
                log_level=0,
                fetch_wait_max_ms=100,
            )
        )

    def from_end(self) -> "ReportReader":
        """Only what is reported from now on."""
        self._consumer.assign([TopicPartition(self.topic, 0, OFFSET_END)])
        self._consumer.poll(0.2)
        return self

    def read_tail(self, expected: Iterable[str] = ()) -> dict[str, Report]:
        """The newest report of every instance; goes back to the beginning only when an expected service is not among
        the last ones."""
        if not self.exists:
            return {}
        low, high = self._consumer.get_watermark_offsets(TopicPartition(self.topic, 0), timeout=10)
        start = max(low, high - TAIL)
        self._read_to(start, high)
        if start > low and any(not instances(self.latest, name) for name in expected):
            newer = dict(self.latest)
            self._read_to(low, start)
            self.latest.update(newer)
        return self.latest

    def _read_to(self, start: int, end: int) -> None:
        place = TopicPartition(self.topic, 0, start)
        self._consumer.assign([place])
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            self.poll(0.2)
            at = self._consumer.position([place])[0].offset
            if at >= end or (at < 0 and start >= end):
                return

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Take what is there; says whether anything was."""
        messages = self._consumer.consume(1000, timeout_s)
        for message in messages:
            if message.error() is None:
                self._take(message.key(), message.value())
        return bool(messages)

    def _take(self, key: Any, value: Any) -> None:
        try:
            report = json.loads(value)
            instance = key.decode() if isinstance(key, bytes) else str(key)
        except (TypeError, ValueError):
            return  # not ours; a status command must not stumble over it
        if isinstance(report, dict):
            self.latest[instance] = report

    def close(self) -> None:
        self._consumer.close()


def instances(reports: dict[str, Report], service: str) -> dict[str, Report]:
    """The reports of one service: `ingest` has instances `ingest-0`, `ingest-1`, …; the controller is just
    `controller`.

    >>> sorted(instances({"a.j1-0": {}, "a.j1-1": {}, "a.j10-0": {}, "a.j1": {}}, "a.j1"))
    ['a.j1', 'a.j1-0', 'a.j1-1']
    """
    return {key: report for key, report in reports.items() if key == service or key.rpartition("-")[0] == service}


class IdleWatch:
    """Decides from reports that everything produced so far has gone through the whole mesh.

    Idle = every service that reads data has reported since this run began, is ready, says lag 0, and no counter of any
    of them has moved for `quiet_s`, counted between reports, so that a service that hangs without reporting never looks
    idle.
    """

    def __init__(
        self, services: Iterable[str], quiet_s: float, now_ms: Callable[[], float] = lambda: time.time() * 1000
    ) -> None:
        self.services = [name for name in services if name != "controller"]
        self.quiet_ms = quiet_s * 1000
        self.began_ms = now_ms()
        self._seen: tuple[object, ...] = ()
        self._since_ms = self.began_ms

    @staticmethod
    def _of(reports: dict[str, Report], name: str) -> dict[str, Report]:
        """Of a worker, or of all workers of a service."""
        return {name: reports[name]} if name in reports else instances(reports, name)

    def waiting_for(self, reports: dict[str, Report]) -> str:
        """How far it is, in a few words, for a person who waits."""
        words = []
        for service in self.services:
            mine = [r for r in self._of(reports, service).values() if float(r.get("at_ms", 0)) >= self.began_ms]
            lag = sum(int(r.get("lag") or 0) for r in mine)
            words += (
                [f"{service} has {lag:,} to read" if mine else f"{service} has not reported yet"]
                if lag or not mine
                else []
            )
        read = sum(int(r.get("events_in") or 0) for r in instances(reports, "ingest").values())
        return f"{read:,} events read; " + (", ".join(words) or "nothing left to read, waiting for quiet")

    def idle(self, reports: dict[str, Report]) -> bool:
        counters: list[object] = []
        oldest_ms = float("inf")
        waiting = False
        for service in self.services:
            mine = {k: r for k, r in self._of(reports, service).items() if float(r.get("at_ms", 0)) >= self.began_ms}
            waiting = waiting or not mine
            for key, report in sorted(mine.items()):
                waiting = (
                    waiting or report.get("lag") != 0 or report.get("ready") is False
                )  # without partitions yet, nothing lags
                oldest_ms = min(oldest_ms, float(report["at_ms"]))
                counters.append(
                    (key, report.get("events_in"), report.get("rows_in"), report.get("rows_out"), report.get("lag"))
                )
        if tuple(counters) != self._seen or waiting:
            self._seen = tuple(counters)
            self._since_ms = max((float(r.get("at_ms", 0)) for r in reports.values()), default=self.began_ms)
            return False
        return oldest_ms - self._since_ms >= self.quiet_ms
