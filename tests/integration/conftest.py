"""What the broker tests share: running the command line as a user would, and reading results as a user would."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition

ROOT = Path(__file__).parent.parent.parent


def joinmesh(*arguments: str | Path, check: bool = True, timeout: float = 400) -> subprocess.CompletedProcess[str]:
    """Run the command line; a failure shows what it said."""
    done = subprocess.run(
        [sys.executable, "-m", "services.cli.main", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert not check or done.returncode == 0, (
        f"joinmesh {' '.join(map(str, arguments))}\n{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    )
    return done


def read_topic(bootstrap: str, topic: str) -> list[tuple[str, Any, int]]:
    """(key, JSON value, timestamp) of every record a read_committed reader sees."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "test-reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
    found, open_partitions = [], set(partitions)
    while open_partitions:
        for message in consumer.consume(10_000, 1.0):
            error = message.error()
            if error is None:
                found.append(
                    ((message.key() or b"").decode(), json.loads(message.value() or b"null"), message.timestamp()[1])
                )
            elif error.code() == KafkaError._PARTITION_EOF:
                open_partitions.discard(message.partition())
    consumer.close()
    return found


@pytest.fixture
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    return joinmesh


@pytest.fixture
def read(bootstrap: str) -> Callable[[str], list[tuple[str, Any, int]]]:
    return lambda topic: read_topic(bootstrap, topic)
