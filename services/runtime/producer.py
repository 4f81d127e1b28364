"""A producer that loses nothing quietly: idempotent, in order, and loud when a delivery fails.

Invariant: records to one partition arrive in the order they were given, each once, or `check` raises and the service
stops; what it had not been told is delivered is sent again when it starts (outbox, source offsets) and dropped by its
receiver.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

from schemas.errors import MachineError
from schemas.mesh import Mesh
from schemas.topics import MAX_RECORD_BYTES
from services.runtime.kafka import client_config
from services.runtime.security.refusals import refusal

_logger = logging.getLogger("joinmesh.kafka")
SILENT_MOST_S = 30.0
_logger.addFilter(lambda record: "CONFWARN" not in record.getMessage())  # gapless is called experimental; we mean it


class Sender:
    def __init__(self, mesh: Mesh, **settings: Any) -> None:
        config = client_config(
            mesh,
            enable_idempotence=True,
            enable_gapless_guarantee=True,
            linger_ms=1,  # blocks for several partitions go in one request
            message_max_bytes=MAX_RECORD_BYTES,
            queue_buffering_max_kbytes=256 << 10,
            **settings,
        )
        self.mesh, self.producer = mesh, Producer(config, logger=_logger)
        self.failed: tuple[str, KafkaError] | None = None  # the topic, and why
        self.unacknowledged = 0
        self.delivered: dict[tuple[str, int], int] = {}  # (topic, partition) -> the offset behind our last record there
        self._moved = time.monotonic()  # when something was last delivered, or given after a time without

    def send(
        self, topic: str, partition: int, value: bytes, key: bytes | None = None, done: Callable[[], None] | None = None
    ) -> None:
        def delivered(error: KafkaError | None, message: Message) -> None:
            self.unacknowledged -= 1
            self._moved = time.monotonic()
            if error is not None:
                self.failed = topic, error
                return
            self.delivered[topic, partition] = (message.offset() or 0) + 1
            if done is not None:
                done()

        if self.unacknowledged == 0:
            self._moved = time.monotonic()
        self.unacknowledged += 1
        while True:
            try:
                self.producer.produce(topic, value, key=key, partition=partition, on_delivery=delivered)
                return
            except BufferError:
                self.producer.poll(0.05)

    def check(self, wait_s: float = 0.0) -> None:
        """Take deliveries; raise if one failed, or if none comes any more: a new process has a new connection."""
        self.producer.poll(wait_s)
        if self.unacknowledged and time.monotonic() - self._moved > SILENT_MOST_S:
            raise MachineError(f"nothing was acknowledged by Kafka for {SILENT_MOST_S:.0f} s; starting again")
        if self.failed is not None:
            topic, error = self.failed
            raise refusal(self.mesh, error, topic, "write") or MachineError(
                f"a record could not be delivered: {error.str()}; restarting sends it again"
            )

    def flush(self, timeout_s: float = 120.0) -> None:
        """Wait until everything is delivered."""
        left = self.producer.flush(timeout_s)
        self.check()
        if left:
            raise MachineError(f"{left} records were not delivered within {timeout_s:.0f} s; is the broker up?")
