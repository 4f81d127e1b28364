"""A broker with TLS, passwords and ACLs, one principal a service: a mesh runs with the least rights, is audited equal
over TLS, and whoever does not belong is refused in one clear line. No password is ever seen."""

import asyncio
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    NewTopic,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from schemas.mesh import Mesh, load_mesh, parse_mesh
from services.broker import LocalBroker
from services.broker.guard import Guard, Listener, guard_of, kafka_lines, password_file
from services.broker.local import free_port
from services.runtime.grants import grant
from services.runtime.kafka import admin, client_config
from services.runtime.security.rights import Right
from tests.certificates import Certificates, Endpoint
from tests.integration.conftest import ROOT, joinmesh

CANARY = "canary-7fQ2"  # begins every password
REFUSED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
}
MESH = """
mesh: shop
{kafka}
partitions: 2
streams:
  orders: {{event_time: ts, lateness: 2s, fields: {{order_id: int64, amount: float64, ts: timestamp}}}}
  payments: {{event_time: ts, lateness: 1s, fields: {{order_id: int64, paid: float64, ts: timestamp}}}}
  shipments: {{event_time: ts, lateness: 3s, fields: {{order_id: int64, carrier: string, ts: timestamp}}}}
queries:
  paid: |
    SELECT o.order_id, p.paid, s.carrier
    FROM orders [RANGE 30 SECONDS] AS o, payments [RANGE 20 SECONDS] AS p, shipments [RANGE 60 SECONDS] AS s
    WHERE o.order_id = p.order_id AND o.order_id = s.order_id
plans: {{paid: "((o p) s)"}}
feedback: {{paid: on}}
heralds: {{paid: off}}
"""
SERVICES = ("admin", "controller", "ingest", "paid-j1", "paid-j2", "paid-sink", "audit", "stranger")


@dataclass
class Secured:
    """The broker, and a mesh file whose services come in each by its own name."""

    broker: LocalBroker
    folder: Path
    expired: int
    elsewhere: int
    mutual: int
    texts: list[str]  # everything that was printed

    @property
    def file(self) -> Path:
        return self.folder / "mesh.yaml"

    @property
    def mesh(self) -> Mesh:
        return load_mesh(self.file)

    @property
    def root(self) -> Mesh:
        """As who may do everything."""
        return replace(self.mesh, kafka=self.broker.kafka)

    def run(self, *arguments: object, check: bool = True, file: Path | None = None) -> subprocess.CompletedProcess[str]:
        done = joinmesh(*map(str, arguments), "-f", file or self.file, check=check)
        self.texts.append(done.stdout + done.stderr)
        return done

    def variant(self, name: str, *changes: tuple[str, str]) -> Path:
        """A mesh file with something changed."""
        text = self.file.read_text()
        for old, new in changes:
            assert re.search(old, text), old
            text = re.sub(old, lambda _, new=new: new, text)
        file = self.folder / f"{name}.yaml"
        file.write_text(text)
        return file


@pytest.fixture(scope="module")
def secured(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates, token_endpoint: Endpoint
) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    (folder / "jwks.json").write_text(token_endpoint.jwks)
    jwks, ports = (folder / "jwks.json").as_uri(), [free_port() for _ in range(3)]
    names = ("EXPIRED", "ELSEWHERE", "MUTUAL")
    oauth = "org.apache.kafka.common.security.oauthbearer"
    properties = {
        "sasl.enabled.mechanisms": "SCRAM-SHA-512,SCRAM-SHA-256,PLAIN,OAUTHBEARER",
        "listener.name.client.scram-sha-256.sasl.jaas.config": (
            "org.apache.kafka.common.security.scram.ScramLoginModule required;"
        ),
        "listener.name.client.plain.sasl.jaas.config": (
            f'org.apache.kafka.common.security.plain.PlainLoginModule required user_plain="{CANARY}-plain";'
        ),
        "listener.name.client.oauthbearer.sasl.jaas.config": f"{oauth}.OAuthBearerLoginModule required;",
        "listener.name.client.oauthbearer.sasl.server.callback.handler.class": (
            f"{oauth}.OAuthBearerValidatorCallbackHandler"
        ),
        "sasl.oauthbearer.jwks.endpoint.url": jwks,
        "sasl.oauthbearer.expected.audience": "kafka",
        "listener.name.mutual.ssl.client.auth": "required",
        **{
            f"listener.name.{name}.ssl.keystore.{key}": value
            for name in ("expired", "elsewhere")
            for key, value in (("type", "PEM"), ("location", str(certificates.store(name))))
        },
    }
    services = guard_of(parse_mesh(MESH.format(kafka="kafka: {bootstrap: none}")))
    guard = Guard(
        admin="root",
        users=(services.admin, *services.users, "shop-stranger"),
        keystore=certificates.store("broker"),
        ca=certificates.ca,
        listeners=tuple(Listener(name, "SSL", port) for name, port in zip(names, ports, strict=True)),
        properties=properties,
    )
    (folder / "broker" / "secrets").mkdir(mode=0o700, parents=True)
    for user in (guard.admin, *guard.users):
        password_file(folder / "broker", user).write_text(f"{CANARY}-{user}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JDK_JAVA_OPTIONS", f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={jwks}")
        broker = LocalBroker(folder / "broker", tied=True, guard=guard).start()
    try:
        found = Secured(broker, folder, *ports, [])
        kafka = kafka_lines(broker.folder, broker.port, "shop")
        found.file.write_text(MESH.format(kafka=kafka.replace(str(broker.folder / "ca.pem"), str(certificates.ca))))
        yield found
    finally:
        broker.stop()


class CommandLines(threading.Thread):
    """Every command line of the machine while a mesh runs, as `ps` would show it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.seen: set[str] = set()
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.3):
            for process in psutil.process_iter():
                try:
                    self.seen.add(" ".join(process.cmdline()))
                except psutil.Error:
                    continue


@pytest.fixture(scope="module")
def lines() -> Iterator[set[str]]:
    watch = CommandLines()
    watch.start()
    yield watch.seen
    watch.stopped.set()


@pytest.fixture(scope="module")
def ran(secured: Secured, lines: set[str]) -> Secured:
    """The mesh, run to its end by a principal without any right but those that are listed."""
    root = secured.variant("root", (r"shop-\$\{service\}", "root"), (r"secrets/root", "secrets/root"))
    secured.run("acls", "--create", "--principal", "User:shop-${service}", file=root)
    secured.run("generate", "--create", 2, "--count", 1500, "--keys", "uniform", "--key-count", 3000, file=root)
    secured.run("topics", "--create")
    secured.run("up", "--data", secured.folder / "data", "--until-idle", 1)
    assert any("services.join_node" in line for line in lines)
    return secured


@pytest.fixture(scope="module")
def spark(secured: Secured) -> Iterator[Any]:
    """One Spark for the module, which also writes its events down."""
    from services.audit.session import start_session

    conf, events = secured.folder / "spark-conf", secured.folder / "spark-events"
    conf.mkdir()
    events.mkdir()
    (conf / "spark-defaults.conf").write_text(f"spark.eventLog.enabled true\nspark.eventLog.dir {events.as_uri()}\n")
    tokens = (secured.folder / "tokens").as_uri()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_CONF_DIR", str(conf))
        session = start_session("local[2]", "1g", secured.folder / "spark.log", tokens)
    yield session
    session.stop()


@pytest.mark.usefixtures("spark")
def test_a_mesh_runs_with_the_least_rights_and_is_audited_equal(ran: Secured) -> None:
    from services.audit import run_audit

    said: list[str] = []
    (verdict,) = run_audit(ran.mesh, report_dir=ran.folder / "report", progress=said.append)
    ran.texts += said
    assert verdict.passed
    assert verdict.found > 20
    status = ran.run("status", "--json").stdout
    assert re.search(r'"blocks_sent": [1-9]', status), "the joins gave no feedback, so its rights were not tried"
    ran.run("status")
    assert ran.run("migrate", "--query", "paid", "--no-wait").returncode == 0


# -- five things that each principal must not do


class Principal:
    """A client of each kind; each attempt gives the error that Kafka answers with, or None."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.client, self.producer = admin(mesh), Producer(client_config(mesh, log_level=0))

    def write(self, topic: str) -> KafkaError | None:
        failed: list[KafkaError] = []
        self.producer.produce(topic, b"x", partition=0, on_delivery=lambda e, _: failed.append(e) if e else None)
        self.producer.flush(10)
        return failed[0] if failed else None

    def read(self, topic: str) -> KafkaError | None:
        consumer = Consumer(client_config(self.mesh, group_id="shop.audit", enable_partition_eof=True, log_level=0))
        consumer.assign([TopicPartition(topic, 0, 0)])
        try:
            message = consumer.poll(10)
            error = message.error() if message is not None else KafkaError(KafkaError._TIMED_OUT)
            return None if error is not None and error.code() == KafkaError._PARTITION_EOF else error
        finally:
            consumer.close()

    def create(self, topic: str) -> KafkaError | None:
        return _error(self.client.create_topics([NewTopic(topic, 1)])[topic])

    def delete(self, topic: str) -> KafkaError | None:
        return _error(self.client.delete_topics([topic])[topic])

    def commit(self, group: str) -> KafkaError | None:
        place = ConsumerGroupTopicPartitions(group, [TopicPartition("orders", 0, 1)])
        return _error(self.client.alter_consumer_group_offsets([place])[group])

    def grant(self, user: str) -> KafkaError | None:
        binding = AclBinding(
            ResourceType.TOPIC,
            "shop.control",
            ResourcePatternType.LITERAL,
            f"User:{user}",
            "*",
            AclOperation.WRITE,
            AclPermissionType.ALLOW,
        )
        return _error(self.client.create_acls([binding])[binding])

    def transact(self, name: str) -> KafkaError | None:
        producer = Producer(client_config(self.mesh, transactional_id=name, log_level=0))
        try:
            producer.init_transactions(10)
        except KafkaException as error:
            return error.args[0]
        except Exception as error:  # raised by error_cb: also a refusal
            return error.__cause__ or KafkaError(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, str(error))  # type: ignore[return-value]
        return None


def _error(future: Any) -> KafkaError | None:
    try:
        future.result(10)
    except KafkaException as error:
        found: KafkaError = error.args[0]
        return found
    return None


MUST_NOT = {
    "admin": ["write orders", "read shop.paid.results", "write shop.paid.results", "delete shop.control", "grant me"],
    "controller": ["write orders", "write shop.paid.results", "create shop.more", "read orders", "grant me"],
    "ingest": [
        "write shop.control",
        "write orders",
        "write shop.paid.results",
        "create shop.more",
        "commit shop.paid.sink",
    ],
    "paid-j1": ["write shop.control", "read orders", "write shop.paid.out", "read shop.paid.j2.in", "create shop.more"],
    "paid-j2": [
        "write shop.control",
        "write shop.paid.results",
        "write shop.audit",
        "commit shop.ingest",
        "delete shop.dead",
    ],
    "paid-sink": [
        "write shop.control",
        "write shop.paid.out",
        "transact shop.other.sink-0",
        "read orders",
        "create shop.x",
    ],
    "audit": ["write shop.control", "write shop.paid.results", "write orders", "delete orders", "commit shop.ingest"],
    "stranger": [
        "write shop.control",
        "read shop.paid.results",
        "write shop.report",
        "create x",
        "transact shop.paid.sink-0",
    ],
}


@pytest.mark.parametrize("service", SERVICES)
def test_nobody_may_do_what_is_not_theirs(ran: Secured, service: str) -> None:
    principal = Principal(ran.mesh.asked_by(service))
    assert len(MUST_NOT[service]) == 5
    for attempt in MUST_NOT[service]:
        what, name = attempt.split()
        error = getattr(principal, what)(name)
        assert error is not None, f"{service} could {attempt}"
        assert error.code() in REFUSED, f"{service} {attempt}: {error}"


def test_the_attempts_succeed_for_who_may(ran: Secured) -> None:
    """So that a refusal above is one."""
    root = Principal(ran.root)
    for attempt in ("create scratch", "write scratch", "read scratch", "commit any", "grant nobody", "transact any"):
        what, name = attempt.split()
        assert getattr(root, what)(name) is None, attempt
    assert root.delete("scratch") is None


# -- one clear line


def _service(secured: Secured, module: str, *more: str, file: Path) -> "subprocess.Popen[str]":
    command = [
        sys.executable,
        "-m",
        f"services.{module}",
        "-f",
        str(file),
        "--data",
        str(secured.folder / "bad"),
        *more,
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def _command(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "services.cli.main", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_whoever_is_refused_says_so_in_one_line(ran: Secured, tmp_path: Path) -> None:
    wrong_password = tmp_path / "wrong"
    wrong_password.write_text(f"{CANARY}-wrong")
    password = r"\$\{file:.*\}"
    wrong = ran.variant("wrong", (password, f"${{file:{wrong_password}}}"))
    missing = ran.variant("missing", (password, "${file:/no/such/secret}"))
    expired = ran.variant("expired", (rf"127.0.0.1:{ran.broker.port}", f"127.0.0.1:{ran.expired}"))
    elsewhere = ran.variant("elsewhere", (rf"127.0.0.1:{ran.broker.port}", f"127.0.0.1:{ran.elsewhere}"))
    plaintext = ran.variant("plaintext", (r"  s(sl|asl|ecurity)\..*\n", ""))
    _take_away(ran, "shop-ingest", "shop.dead", AclOperation.WRITE, ResourceType.TOPIC)
    _take_away(ran, "shop-paid-j1", "shop.paid.j1", AclOperation.READ, ResourceType.GROUP)
    _take_away(ran, "shop-paid-sink", "shop.paid.sink-", AclOperation.WRITE, ResourceType.TRANSACTIONAL_ID)
    _take_away(ran, "shop-audit", "orders", AclOperation.READ, ResourceType.TOPIC)
    j1, sink = ("--query", "paid", "--node", "j1"), ("--query", "paid")
    no_password = "does not let shop-{} in: user name or password is wrong"
    tried = [
        (_command("topics", "-f", str(wrong)), no_password.format("admin")),
        (_command("status", "-f", str(wrong)), no_password.format("admin")),
        (_command("audit", "-f", str(wrong)), no_password.format("audit")),
        (_service(ran, "controller", file=wrong), no_password.format("controller")),
        (_service(ran, "join_node", *j1, file=wrong), no_password.format("paid-j1")),
        (_service(ran, "sink", *sink, file=missing), "of paid-sink comes from file /no/such/secret"),
        (_command("topics", "-f", str(expired)), f"127.0.0.1:{ran.expired}: certificate has expired"),
        (_service(ran, "join_node", *j1, file=expired), "certificate has expired"),
        (_command("audit", "-f", str(elsewhere)), "certificate is not valid for '127.0.0.1'"),
        (_service(ran, "ingest", file=elsewhere), "certificate is not valid for '127.0.0.1'"),
        (_command("topics", "-f", str(plaintext)), "security.protocol"),
        (_service(ran, "ingest", file=ran.file), "shop-ingest lacks rights at .*: Write on topic shop.dead; an admin"),
        (_service(ran, "join_node", *j1, file=ran.file), "shop-paid-j1 lacks rights at .*: Read on group shop.paid.j1"),
        (_service(ran, "sink", *sink, file=ran.file), "shop-paid-sink may not .*transactional id shop.paid.sink-"),
        (_command("audit", "-f", str(ran.file)), "shop-audit lacks rights at .*: Read on topic orders;"),
        (_command("generate", "-f", str(ran.file), "--count", "1"), "shop-admin may not write topic"),
        (_command("acls", "-f", str(ran.file), "--create"), "shop-admin may not .*ACLs"),
    ]
    wrongly = []
    for process, says in tried:
        said, _ = process.communicate(timeout=90)
        ran.texts.append(said)
        command = f"{process.args}\n{said}"
        last = said.strip().splitlines()[-1]
        if not re.search(f"^joinmesh.*{says}", last) or process.returncode not in (1, 78) or "Traceback" in said:
            wrongly.append(f"wanted: {says}\n{command}")
    assert not wrongly, "\n\n".join(wrongly)


def _take_away(secured: Secured, user: str, name: str, operation: Any, kind: Any) -> None:
    pattern = ResourcePatternType.PREFIXED if name.endswith("-") else ResourcePatternType.LITERAL
    chosen = AclBindingFilter(kind, name, pattern, f"User:{user}", "*", operation, AclPermissionType.ALLOW)
    client = admin(secured.root)  # a name of its own: it must live until the answer is there
    assert client.delete_acls([chosen])[chosen].result(10)


# -- every mechanism, every client


def _ways(secured: Secured, certificates: Certificates, endpoint: Endpoint) -> dict[str, dict[str, str]]:
    address = secured.broker.bootstrap
    common = {"bootstrap.servers": address, "security.protocol": "sasl_ssl", "ssl.ca.location": str(certificates.ca)}
    (secured.folder / "tokens").write_text(endpoint.token("by-file"))
    return {
        "User:plain": {
            **common,
            "sasl.mechanism": "PLAIN",
            "sasl.username": "plain",
            "sasl.password": f"{CANARY}-plain",
        },
        "User:sha256": {
            **common,
            "sasl.mechanism": "SCRAM-SHA-256",
            "sasl.username": "sha256",
            "sasl.password": f"{CANARY}-sha256",
        },
        "User:CN=shop-mutual": {
            "bootstrap.servers": f"127.0.0.1:{secured.mutual}",
            "security.protocol": "ssl",
            "ssl.ca.location": str(certificates.ca),
            "ssl.certificate.location": str(certificates.client),
            "ssl.key.location": str(certificates.client_key),
        },
        "User:by-file": {
            **common,
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.token": f"${{file:{secured.folder}/tokens}}",
        },
        "User:by-endpoint": {
            **common,
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": "by-endpoint",
            "sasl.oauthbearer.client.secret": endpoint.secret,
            "sasl.oauthbearer.token.endpoint.url": endpoint.url,
        },
    }


def test_every_mechanism_serves_every_client(
    ran: Secured, spark: Any, certificates: Certificates, token_endpoint: Endpoint
) -> None:
    sha256 = UserScramCredentialUpsertion(
        "sha256", ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096), f"{CANARY}-sha256".encode()
    )
    client = admin(ran.root)
    for future in client.alter_user_scram_credentials([sha256]).values():
        future.result(10)
    ways = _ways(ran, certificates, token_endpoint)
    grant(
        ran.root,
        {who: [Right("topic", "orders", ("Read",)), Right("group", "shop.audit", ("Describe",))] for who in ways},
    )
    for who, kafka in ways.items():
        mesh = replace(ran.mesh, kafka=kafka)
        assert Principal(mesh).read("orders") is None, f"confluent-kafka as {who}"
        assert asyncio.run(_partitions_by_aiokafka(mesh)) == {0, 1}, f"aiokafka as {who}"
        assert _count_by_spark(spark, mesh) > 0, f"Spark as {who}"


async def _partitions_by_aiokafka(mesh: Mesh) -> set[int]:
    from aiokafka import AIOKafkaConsumer
    from faust.transport.drivers.aiokafka import credentials_to_aiokafka_auth

    from services.runtime.security.for_faust import faust_credentials

    auth = credentials_to_aiokafka_auth(faust_credentials(mesh))
    consumer = AIOKafkaConsumer("orders", bootstrap_servers=mesh.bootstrap, enable_auto_commit=False, **auth)
    await consumer.start()
    try:
        return set(consumer.partitions_for_topic("orders") or ())
    finally:
        await consumer.stop()


def _count_by_spark(spark: Any, mesh: Mesh) -> int:
    from services.audit.log import Range, read_topic

    ends = {"orders": {0: 10, 1: 10}}
    frame = read_topic(spark, mesh, Range({"orders": {0: 0, 1: 0}}, {"orders": {0: 0, 1: 0}}, ends), "orders")
    assert frame is not None
    return int(frame.count())


# -- the last, after everything was printed and written


def test_no_password_was_ever_seen(ran: Secured, lines: set[str], spark: Any, token_endpoint: Endpoint) -> None:
    spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty()
    hidden = [CANARY, token_endpoint.secret, token_endpoint.token("by-file"), token_endpoint.token("by-endpoint")]
    for text in [*ran.texts, *lines]:
        assert not [secret for secret in hidden if secret in text], text[:2000]
    looked, private = 0, {ran.broker.folder / "secrets", ran.broker.folder / "server.properties", ran.folder / "tokens"}
    for file in ran.folder.rglob("*"):
        if file.is_file() and not private & {file, *file.parents}:
            looked += 1
            data = file.read_bytes()
            assert not [secret for secret in hidden if secret.encode() in data], file
    assert looked > 50
    assert list((ran.folder / "spark-events").iterdir())
    assert "shop-ingest" in " ".join(ran.texts)
    report = _all_of(ran, "shop.report")
    assert len(report) > 10
    assert CANARY.encode() not in b"".join(report)


def _all_of(secured: Secured, topic: str) -> list[bytes]:
    consumer = Consumer(client_config(secured.root, group_id="reader", enable_partition_eof=True))
    consumer.assign([TopicPartition(topic, 0, 0)])
    found, deadline = [], time.monotonic() + 20
    try:
        while time.monotonic() < deadline:
            message = consumer.poll(1)
            if message is not None and message.error() is not None:
                break
            if message is not None:
                found.append(message.value() or b"")
        return found
    finally:
        consumer.close()


def test_state_is_for_its_owner_only(ran: Secured) -> None:
    folders = [path for path in (ran.folder / "data").rglob("*") if path.is_dir()]
    assert len(folders) > 5
    for path in [ran.folder / "data", *folders]:
        assert path.stat().st_mode & 0o077 == 0, path
