"""The producer of the services is loud about what does not arrive."""

import time

import pytest

from schemas.errors import MachineError
from schemas.mesh import Mesh
from services.runtime import producer
from services.runtime.producer import Sender


def test_silence_of_kafka_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that hangs after a broker's restart is cured by a new process, and only the process itself can tell."""
    monkeypatch.setattr(producer, "SILENT_MOST_S", 0.3)
    sender = Sender(Mesh("m", {"bootstrap.servers": "127.0.0.1:1"}, 1, {}, {}), log_level=0)
    time.sleep(0.4)
    sender.check()  # nothing was sent: nothing is missing
    sender.send("t", 0, b"x")
    sender.check()
    time.sleep(0.4)
    with pytest.raises(MachineError, match="nothing was acknowledged by Kafka for 0 s; starting again"):
        sender.check()
    sender.producer.purge()
