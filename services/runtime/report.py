"""What a service measured, written once a second to `<mesh>.report`, keyed by instance.

Invariant: a report is a whole picture, not a difference: the newest record of an instance is all there is to know.
"""

import time
from collections import deque
from typing import Any

import msgspec
from confluent_kafka import Producer

from schemas import topics
from schemas.mesh import Mesh

INTERVAL_S = 1.0


class Reporter:
    def __init__(self, mesh: Mesh, producer: Producer, service: str, instance: str, **constant: Any) -> None:
        self.topic, self.producer = topics.report(mesh.name), producer
        self.constant = {"service": service, "instance": instance, **constant, "started_ms": int(time.time() * 1000)}
        self._due = 0.0
        self._instance = instance

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due

    def send(self, **measured: Any) -> None:
        self._due = time.monotonic() + INTERVAL_S
        cpu = time.process_time()
        value = {**self.constant, "at_ms": int(time.time() * 1000), "cpu_s": round(cpu, 3), **measured}
        self.producer.produce(self.topic, msgspec.json.encode(value), key=self._instance.encode(), partition=0)


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
