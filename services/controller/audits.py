"""What the last audit said, for the controller's report: passed or not, when, and how far each query was off.

Invariant: it only reads `<mesh>.audit`, never waits for it once it runs, and a topic that cannot be read stops nothing.
"""

import json
import logging
from datetime import datetime
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition

from schemas import topics
from schemas.mesh import Mesh
from services.runtime.kafka import AUDIT_READER, client_config

log = logging.getLogger("joinmesh.controller")
BEGIN_S = 5.0


class AuditWatch:
    def __init__(self, mesh: Mesh) -> None:
        self.last: dict[str, Any] | None = None
        place = TopicPartition(topics.audit(mesh.name), 0, 0)
        self._consumer = Consumer(
            client_config(mesh, group_id=f"{mesh.name}.{AUDIT_READER}", enable_auto_commit=False, log_level=0)
        )
        try:
            low, high = self._consumer.get_watermark_offsets(place, timeout=BEGIN_S)
            place.offset = max(low, high - 1)  # the last one; older ones would be taken for news
        except KafkaException as error:
            log.warning("the last audit is not known: %s cannot be read (%s)", place.topic, error.args[0].str())
        self._consumer.assign([place])

    def look(self) -> dict[str, Any] | None:
        """The last audit known now; does not wait."""
        for message in self._consumer.consume(100, 0):
            if message.error() is None and (verdict := short(message.value())) is not None:
                self.last = verdict
        return self.last

    def close(self) -> None:
        self._consumer.close()


def short(value: bytes | None) -> dict[str, Any] | None:
    """A record of the audit topic as reports show it; None for what is not one.

    >>> short(b'{"made": "2026-01-02T03:04:05+00:00", "passed": false, "queries": {"q": {"passed": false,'
    ... b' "recall": 0.5, "differences": {"missing": 2, "extra": 1}}}}')
    {'passed': False, 'at_ms': 1767323045000, 'queries': {'q': {'passed': False, 'recall': 0.5, 'differences': 3}}}
    >>> short(b'{"passed": true}') is short(None) is None
    True
    """
    try:
        record = json.loads(value or b"")
        return {
            "passed": bool(record["passed"]),
            "at_ms": int(datetime.fromisoformat(record["made"]).timestamp() * 1000),
            "queries": {
                name: {
                    "passed": bool(verdict["passed"]),
                    "recall": float(verdict["recall"]),
                    "differences": sum(map(int, verdict["differences"].values())),
                }
                for name, verdict in record["queries"].items()
            },
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
