"""What tests share: a real Kafka broker, and names that no other test uses.

Invariant: never a mock. In this order: the broker that JOINMESH_TEST_BOOTSTRAP names, one in Docker when an engine
answers and has the image, else the local broker that `joinmesh broker up` also starts.
"""

import contextlib
import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from schemas.mesh import Mesh, parse_mesh
from tests.certificates import Certificates, Endpoint, make_certificates

KAFKA_IMAGE = os.environ.get("JOINMESH_TEST_KAFKA_IMAGE", "apache/kafka:4.0.0")
CreateTopics = Callable[..., None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite", action="store_true", help="renew golden texts such as tests/plans/*.txt; review the diff"
    )


@pytest.fixture(scope="session")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a broker for this test run."""
    given = os.environ.get("JOINMESH_TEST_BOOTSTRAP")
    if given:
        yield given
        return
    with contextlib.ExitStack() as stack:
        address = _docker_broker(stack)
        if address is None:
            from services.broker import LocalBroker

            address = stack.enter_context(
                LocalBroker(tmp_path_factory.mktemp("broker"), tied=True, progress=print)
            ).bootstrap
        yield address


def _docker_broker(stack: contextlib.ExitStack) -> str | None:
    """A broker in a container, or None when Docker cannot give one."""
    import docker
    from docker.errors import DockerException

    try:
        client = docker.from_env(timeout=5)
        has_bridge = bool(client.networks.list(names=["bridge"], filters={"driver": "bridge"}))
    except DockerException:
        return None
    from testcontainers.core.container import DockerContainer

    from services.broker.local import answers, free_port

    port, controller = free_port(), free_port()
    inside = 9092 if has_bridge else port  # without a network of its own, the container has the machine's
    settings = {
        "KAFKA_NODE_ID": "1",
        "KAFKA_PROCESS_ROLES": "broker,controller",
        "KAFKA_CONTROLLER_LISTENER_NAMES": "CONTROLLER",
        "KAFKA_LISTENERS": f"PLAINTEXT://{'0.0.0.0' if has_bridge else '127.0.0.1'}:{inside},CONTROLLER://localhost:{controller}",
        "KAFKA_ADVERTISED_LISTENERS": f"PLAINTEXT://127.0.0.1:{port}",
        "KAFKA_CONTROLLER_QUORUM_VOTERS": f"1@localhost:{controller}",
        "KAFKA_LISTENER_SECURITY_PROTOCOL_MAP": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "KAFKA_AUTO_CREATE_TOPICS_ENABLE": "false",
        "KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR": "1",
        "KAFKA_TRANSACTION_STATE_LOG_REPLICATION_FACTOR": "1",
        "KAFKA_TRANSACTION_STATE_LOG_MIN_ISR": "1",
        "KAFKA_GROUP_INITIAL_REBALANCE_DELAY_MS": "0",
    }
    container = DockerContainer(KAFKA_IMAGE)
    container = container.with_bind_ports(9092, port) if has_bridge else container.with_kwargs(network_mode="host")
    for name, value in settings.items():
        container = container.with_env(name, value)
    try:
        stack.enter_context(container)
        deadline = time.monotonic() + 60
        while not answers(f"127.0.0.1:{port}"):
            if time.monotonic() > deadline:
                raise DockerException(f"the broker in {KAFKA_IMAGE} does not answer")
            time.sleep(0.2)
    except Exception as error:  # whatever Docker cannot do, the local broker can
        print(f"no broker from Docker ({type(error).__name__}: {error}); using the local one")
        stack.close()
        return None
    return f"127.0.0.1:{port}"


@pytest.fixture
def mesh_name(request: pytest.FixtureRequest) -> str:
    """A name that begins every topic of this test, and of no other."""
    return re.sub(r"[^A-Za-z0-9]+", "-", request.node.name)[:30].strip("-") + "-" + uuid.uuid4().hex[:8]


@pytest.fixture
def create_topics(bootstrap: str) -> CreateTopics:
    """create_topics("a", "b", partitions=2, config={…}) on the test broker."""
    from schemas.topics import Topic
    from services.runtime.kafka import ensure_topics

    def create(*names: str, partitions: int = 4, config: dict[str, str] | None = None) -> None:
        mesh = Mesh(name="t", kafka={"bootstrap.servers": bootstrap}, partitions=1, streams={}, queries={})
        ensure_topics(mesh, [Topic(name, partitions, config or {}) for name in names], lambda _: None)

    return create


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def token_endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


SHOP = """
mesh: {mesh}
kafka: {{bootstrap: "{bootstrap}"}}
partitions: 4
streams:
  orders: {{topic: {mesh}-orders, event_time: ts, lateness: 2s,
    fields: {{order_id: int64, amount: float64, country: string, ts: timestamp}}}}
  payments: {{topic: {mesh}-payments, event_time: ts, lateness: 1s,
    fields: {{order_id: int64, paid: float64, ts: timestamp}}}}
  shipments: {{topic: {mesh}-shipments, event_time: ts, lateness: 3s,
    fields: {{order_id: int64, carrier: string, ts: timestamp}}}}
queries:
  paid_orders: |
    SELECT o.order_id, p.paid, s.carrier
    FROM orders [RANGE 30 SECONDS] AS o, payments [RANGE 20 SECONDS] AS p, shipments [RANGE 60 SECONDS] AS s
    WHERE o.order_id = p.order_id AND o.order_id = s.order_id AND o.amount > 10
"""


@pytest.fixture
def shop_file(bootstrap: str, mesh_name: str, tmp_path: Path) -> Path:
    """A mesh file of the shop whose topics are this test's own."""
    file = tmp_path / "mesh.yaml"
    file.write_text(SHOP.format(mesh=mesh_name, bootstrap=bootstrap))
    return file


@pytest.fixture
def shop(shop_file: Path) -> Mesh:
    return parse_mesh(shop_file.read_text(), file=str(shop_file))
