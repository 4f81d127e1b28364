"""What a service measured, written once a second to `<mesh>.report`, keyed by instance.

Invariant: a report is a whole picture, not a difference: the newest record of an instance is all there is to know.
Whoever else in the process wants to know what it measured (the metrics) listens here; nothing is measured twice.
"""

import shutil
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import psutil
from confluent_kafka import Producer

from schemas import topics
from schemas.mesh import Mesh

INTERVAL_S = 1.0
LISTENERS: list[Callable[[Mapping[str, Any]], None]] = []  # of this process


class Reporter:
    def __init__(
        self, mesh: Mesh, producer: Producer, service: str, instance: str, disk: Path | None = None, **constant: Any
    ) -> None:
        """`disk`: a folder on the disk whose free space is to be reported."""
        self.topic, self.producer = topics.report(mesh.name), producer
        self.constant = {
            "mesh": mesh.name,
            "service": service,
            "instance": instance,
            **constant,
            "started_ms": int(time.time() * 1000),
        }
        self._due = 0.0
        self._instance, self._disk, self._process = instance, disk, psutil.Process()

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def send(self, **measured: Any) -> None:
        self._due = time.monotonic() + INTERVAL_S
        value = {**self.constant, "at_ms": int(time.time() * 1000), **self._machine(), **measured}
        self.producer.produce(self.topic, msgspec.json.encode(value), key=self._instance.encode(), partition=0)
        for listen in LISTENERS:
            listen(value)

    def _machine(self) -> dict[str, float]:
        used = {"cpu_s": round(time.process_time(), 3), "rss_bytes": self._process.memory_info().rss}
        if self._disk is None or not self._disk.exists():
            return used
        disk = shutil.disk_usage(self._disk)
        return {**used, "disk_free_bytes": disk.free, "disk_size_bytes": disk.total}


class Durations:
    """The last thousand durations, for percentiles."""

    def __init__(self, keep: int = 1000) -> None:
        self._values: deque[float] = deque(maxlen=keep)

    def add(self, milliseconds: float) -> None:
        self._values.append(milliseconds)

    def percentile(self, share: float) -> float | None:
        if not self._values:
            return None
        ordered = sorted(self._values)
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
