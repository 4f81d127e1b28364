"""The local broker: keeps its records over a crash, never harms what is not its own, and says what is missing in one
sentence."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from schemas.errors import MachineError
from services.broker import LocalBroker
from services.broker.jars import KAFKA_VERSION, broker_jars, require_disk
from services.broker.java import find_java, parse_version


def test_records_survive_kill_9_and_a_clean_stop(tmp_path: Path) -> None:
    broker = LocalBroker(tmp_path / "b", tied=True)
    with broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic("t", 1, 1)])["t"].result()
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        producer.produce("t", b"kept", partition=0)
        assert producer.flush(10) == 0
        port = broker.port
        running = broker.running()
        assert running is not None
        broker.kill()
        assert not running.is_running()
        broker.start()
        assert broker.port == port
        assert _first_record(broker.bootstrap) == b"kept"
    assert broker.running() is None
    assert not (tmp_path / "b" / "broker.pid").exists()


def _first_record(bootstrap: str) -> bytes | None:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "g", "enable.auto.commit": False})
    consumer.assign([TopicPartition("t", 0, 0)])
    try:
        for _ in range(20):
            message = consumer.poll(1)
            if message is not None and message.error() is None:
                return message.value()
    finally:
        consumer.close()
    return None


def test_a_tied_broker_dies_with_who_started_it(tmp_path: Path) -> None:
    """Even by kill -9: a killed demo or test run leaves no broker behind."""
    code = (
        f"import time; from services.broker import LocalBroker; LocalBroker({str(tmp_path)!r}, tied=True).start();"
        " print('up', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"up\n"
    pid = json.loads((tmp_path / "broker.pid").read_text())["pid"]
    owner.kill()
    owner.wait()
    owner.stdout.close()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert LocalBroker(tmp_path).running() is None


def test_a_foreign_process_under_the_old_pid_is_left_alone(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "60"])
    try:
        note = {"pid": other.pid, "created": psutil.Process(other.pid).create_time(), "port": 1}
        (tmp_path / "broker.pid").write_text(json.dumps(note))
        assert LocalBroker(tmp_path).stop() is False
        assert other.poll() is None
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()


def test_a_busy_port_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            MachineError,
            match=(
                rf"^port {port} on 127.0.0.1 is busy; choose another one, for example `joinmesh broker up --port \d+`"
            ),
        ):
            LocalBroker(tmp_path, port).start()


def test_a_broker_that_dies_shows_its_last_words(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "meta.properties").write_text("version=1\nnode.id=77\ncluster.id=x\n")
    with pytest.raises(MachineError, match=r"the broker died while starting: .*77.*whole log: .*broker\.log"):
        LocalBroker(tmp_path).start()
    assert LocalBroker(tmp_path).running() is None


def test_missing_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        MachineError, match=r"^Java 17 or newer is needed and no `java` is on the PATH; install openjdk-17-jre"
    ):
        find_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(MachineError, match="JAVA_HOME="):
        find_java()


def test_too_old_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _script(tmp_path / "java", """echo 'openjdk version "11.0.2" 2019-01-15' >&2""")
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(
        MachineError, match=r"^Java 17 or newer is needed, but .*java is Java 11; install openjdk-17-jre"
    ):
        find_java()


@pytest.mark.parametrize(
    ("text", "version"), [('openjdk version "21" 2023-09-19', 21), ('java version "1.8.0_392"', 8), ("no", None)]
)
def test_java_versions(text: str, version: int | None) -> None:
    assert parse_version(text) == version


def test_a_download_that_fails_is_never_taken_as_complete(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A java that fetches one jar and then fails, as a network that goes away does."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _script(
        tmp_path / "java",
        'libs="$(dirname "${11}")"; mkdir -p "$libs"; touch "$libs/kafka_2.13-4.3.0.jar"; echo "Connection refused";'
        " exit 1",
    )
    said: list[str] = []
    with pytest.raises(MachineError, match=r"could not fetch Apache Kafka .*Connection refused.*check the network"):
        broker_jars(str(tmp_path / "java"), said.append)
    assert said[0].startswith("fetching Apache Kafka")
    assert not list((tmp_path / "joinmesh").glob(f"kafka-{KAFKA_VERSION}*"))


def test_too_little_disk(tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"^too little disk at .*: [\d.]+ GiB free, 1048576 GiB needed"):
        require_disk(tmp_path, needed_bytes=2**50)


def _script(file: Path, body: str) -> None:
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
